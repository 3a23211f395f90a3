//! The return addresses that the CPU keeps for RET compression.

/// The CPU's depth (Intel SDM, "Intel Processor Trace", indirect transfer compression for returns).
const DEPTH: u32 = 64;

/// What is written and does not count must not hit what does.
const RING: usize = 2 * DEPTH as usize;

/// Blocks at return addresses. A full stack forgets its oldest.
#[derive(Clone, Debug)]
pub struct Returns {
    ring: [u32; RING],
    /// Wraps.
    top: u32,
    /// Where it is empty; more than `DEPTH` below `top` it counts as if it were `DEPTH` below.
    bottom: u32,
}

impl Default for Returns {
    fn default() -> Self {
        Self { ring: [0; RING], top: 0, bottom: 0 }
    }
}

impl Returns {
    /// Pushes `times` (0 or 1) of it, by the same instructions in both cases.
    #[inline(always)]
    pub fn push_if(&mut self, times: u8, block: u32) {
        let top = self.top.wrapping_add(1);
        // What stands above the top means nothing.
        self.ring[top as usize % RING] = block;
        self.top = self.top.wrapping_add(times.into());
    }

    pub fn push(&mut self, block: u32) {
        self.push_if(1, block);
    }

    /// Where it ends now, for `cut`.
    #[inline(always)]
    pub fn top(&self) -> u32 {
        self.top
    }

    /// Takes off what was pushed since then.
    #[inline(always)]
    pub fn cut(&mut self, top: u32) {
        self.top = top;
    }

    #[inline(always)]
    pub fn pop(&mut self) -> Option<u32> {
        if self.is_empty() {
            return None;
        }
        let last = self.ring[self.top as usize % RING];
        self.top = self.top.wrapping_sub(1);
        Some(last)
    }

    /// Before a pop, which alone makes it less: what was pushed beyond the depth is forgotten here.
    #[inline(always)]
    pub fn is_empty(&mut self) -> bool {
        if self.top.wrapping_sub(self.bottom) > DEPTH {
            self.bottom = self.top.wrapping_sub(DEPTH);
        }
        self.top == self.bottom
    }

    pub fn clear(&mut self) {
        self.bottom = self.top;
    }

    /// Blocks are numbered anew: `new` tells how.
    pub fn renumber(&mut self, mut new: impl FnMut(u32) -> u32) {
        if self.is_empty() {
            return;
        }
        let mut at = self.bottom;
        while at != self.top {
            at = at.wrapping_add(1);
            let block = &mut self.ring[at as usize % RING];
            *block = new(*block);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_65_is_forgotten() {
        let mut returns = Returns::default();
        for block in 0..65 {
            returns.push(block);
        }
        for block in (1..65).rev() {
            assert_eq!(returns.pop(), Some(block));
        }
        assert!(returns.is_empty() && returns.pop().is_none());
    }

    #[test]
    fn what_was_forgotten_does_not_come_back() {
        let mut returns = Returns::default();
        (0..1000).for_each(|block| returns.push(block));
        (0..60).for_each(|_| assert!(returns.pop().is_some()));
        (0..10).for_each(|block| returns.push(block));
        returns.push_if(0, 77);
        returns.renumber(|block| block + 1);
        let all: Vec<_> = std::iter::from_fn(|| returns.pop()).collect();
        assert_eq!(all, [10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 940, 939, 938, 937]);
    }
}
