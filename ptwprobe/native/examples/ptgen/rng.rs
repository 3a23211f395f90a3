//! A small, fast generator of random numbers (xorshift64*): the same seed gives the same trace on every machine.

pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(mix(seed ^ 0x9e37_79b9_7f4a_7c15) | 1)
    }

    #[inline]
    pub fn word(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// The upper half of a word, whose bits are the better ones.
    #[inline]
    pub fn half(&mut self) -> u32 {
        (self.word() >> 32) as u32
    }

    /// 0 where `end` is 0.
    #[inline]
    pub fn below(&mut self, end: usize) -> usize {
        ((u64::from(self.half()) * end as u64) >> 32) as usize
    }

    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    /// True in `part` of `whole` cases.
    #[inline]
    pub fn chance(&mut self, part: u32, whole: u32) -> bool {
        (self.below(whole as usize) as u32) < part
    }

    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        from.get(self.below(from.len()))
    }

    /// Distances whose mean is `mean`, so that events are not in step with anything.
    pub fn around(&mut self, mean: usize) -> usize {
        1 + self.below(2 * mean.max(1))
    }
}

/// A hash of a number (the finalizer of splitmix64).
pub fn mix(value: u64) -> u64 {
    let value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ value >> 31
}
