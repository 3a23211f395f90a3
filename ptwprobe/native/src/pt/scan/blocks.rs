//! Blocks of bytes whose packets are found all at once, by instructions that look up 16 bytes in a table.
//!
//! Where a packet begins depends on all packets before it. So of each byte of a block it is found how long a packet that
//! began there would be; from that where the second packet after it would begin, the fourth, the eighth and the
//! sixteenth; and with it which bytes packets that follow one that begins there do begin at. Two blocks are looked at side
//! by side: only then it is known where the first packet of the second one begins.

use std::arch::x86_64::{
    __m128i, _mm_add_epi8, _mm_and_si128, _mm_andnot_si128, _mm_cmpeq_epi8, _mm_cvtsi128_si32, _mm_loadu_si128,
    _mm_max_epu8, _mm_movemask_epi8, _mm_or_si128, _mm_set1_epi8, _mm_setr_epi8, _mm_setzero_si128, _mm_shuffle_epi8,
    _mm_slli_epi16, _mm_srli_epi16, _mm_subs_epu8, _mm_unpacklo_epi8,
};

use super::{LastIp, Timer, MTC, TSC};

/// Bytes at which packets are looked for, and behind them those that a packet which begins there may have.
const BLOCK_LEN: usize = 16;
const LOOKED_AT: usize = 2 * BLOCK_LEN + 16;

/// Passes over packets that are TNT (short), PAD, IP, TSC, MODE, MTC, or CYC of one byte; how many bytes. 0 where the
/// CPU cannot do this.
#[inline]
pub fn pass<T: Timer>(last_ip: &mut LastIp, timer: &mut T, bytes: &[u8]) -> usize {
    if is_x86_feature_detected!("ssse3") {
        // SAFETY: the CPU has the instructions that the function is compiled to.
        unsafe { pass_blocks(last_ip, timer, bytes) }
    } else {
        0
    }
}

/// As [`pass`].
///
/// # Safety
/// The CPU has SSSE3.
#[target_feature(enable = "ssse3")]
unsafe fn pass_blocks<T: Timer>(last_ip: &mut LastIp, timer: &mut T, bytes: &[u8]) -> usize {
    let mut at = 0;
    let mut ips = LastIps::default();
    let mut times = Times::default();
    while let Some(block) = bytes.get(at..).and_then(|rest| rest.first_chunk::<LOOKED_AT>()) {
        // SAFETY: the CPU has SSSE3.
        let packets = unsafe { packets::<T>(block) };
        ips.note(at, &packets);
        times.note(at, packets.times);
        if times.count == times.noted.len() {
            times.tell(timer, bytes);
        }
        at += packets.end;
        if packets.end < 2 * BLOCK_LEN {
            break;
        }
    }
    times.tell(timer, bytes);
    last_ip.0 = ips.apply(last_ip.0, bytes);
    at
}

/// Packets of time that the timer was not told of yet. Of some blocks at once, since whether one has any cannot be
/// foreseen.
#[derive(Default)]
struct Times {
    /// Where blocks begin, and at which of their bytes such packets do.
    noted: [(usize, u32); 8],
    count: usize,
}

impl Times {
    #[inline(always)]
    fn note(&mut self, at: usize, begins: u32) {
        if let Some(place) = self.noted.get_mut(self.count) {
            *place = (at, begins);
        }
        self.count += usize::from(begins != 0);
    }

    #[inline(always)]
    fn tell<T: Timer>(&mut self, timer: &mut T, bytes: &[u8]) {
        for &(at, mut begins) in self.noted.iter().take(self.count) {
            while begins != 0 {
                let first = at + begins.trailing_zeros() as usize;
                begins &= begins - 1;
                timer.take(bytes.get(first).copied().unwrap_or_default(), payload(bytes, first + 1));
            }
        }
        self.count = 0;
    }
}

/// The 8 bytes from `at` on.
fn payload(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// The packets that follow one another from the start of two blocks. A set bit is a byte at which one begins.
struct Packets {
    /// Where they end: beyond the blocks, or at a packet of another kind.
    end: usize,
    /// Those that the timer wants to know.
    times: u32,
    /// Those that tell an IP, by the bits of it that they tell.
    ips_16: u32,
    ips_32: u32,
    ips_48: u32,
    ips_64: u32,
}

/// # Safety
/// The CPU has SSSE3.
#[target_feature(enable = "ssse3")]
unsafe fn packets<T: Timer>(bytes: &[u8; LOOKED_AT]) -> Packets {
    let load = |at: usize| {
        debug_assert!(at + 16 <= LOOKED_AT);
        // SAFETY: all places that are asked for below have 16 bytes.
        unsafe { _mm_loadu_si128(bytes.as_ptr().add(at).cast()) }
    };
    // SAFETY: the CPU has SSSE3.
    let (a, b) = unsafe { (links::<T>(load(0), load(1)), links::<T>(load(16), load(17))) };
    let lowest = |of: __m128i| _mm_cvtsi128_si32(of) as u32;

    // The first packet of the second block begins where those of the first end, if that is not before it.
    let enter = _mm_subs_epu8(a.to, _mm_set1_epi8(16));
    let end = lowest(a.to) & 0xff;
    let begins = lowest(_mm_unpacklo_epi8(a.first, a.last)) & 0xffff;
    let then_begins = _mm_unpacklo_epi8(_mm_shuffle_epi8(b.first, enter), _mm_shuffle_epi8(b.last, enter));
    let (end, begins) = if end < 16 {
        (end, begins)
    } else {
        (16 + (lowest(_mm_shuffle_epi8(b.to, enter)) & 0xff), begins | lowest(then_begins) << 16)
    };

    let of =
        |a: __m128i, b: __m128i| (_mm_movemask_epi8(a) as u32 & 0xffff | (_mm_movemask_epi8(b) as u32) << 16) & begins;
    Packets {
        end: end as usize,
        times: of(a.times, b.times),
        ips_16: of(a.forms, b.forms),
        ips_32: of(_mm_slli_epi16(a.forms, 1), _mm_slli_epi16(b.forms, 1)),
        ips_48: of(_mm_slli_epi16(a.forms, 2), _mm_slli_epi16(b.forms, 2)),
        ips_64: of(_mm_slli_epi16(a.forms, 3), _mm_slli_epi16(b.forms, 3)),
    }
}

/// What packets that begin at each byte of a block would be.
struct Links {
    /// Where packets that follow one that begins at a byte end: beyond the block, or at a packet of another kind.
    to: __m128i,
    /// At which of the first and the last 8 bytes such packets begin.
    first: __m128i,
    last: __m128i,
    /// Whether the timer wants to know.
    times: __m128i,
    /// By [`IP_FORM_BY_HIGH`]; 0: without an IP.
    forms: __m128i,
}

/// `next`: the bytes behind each.
///
/// # Safety
/// The CPU has SSSE3.
#[target_feature(enable = "ssse3")]
unsafe fn links<T: Timer>(bytes: __m128i, next: __m128i) -> Links {
    let bits = |byte: u8| _mm_set1_epi8(byte as i8);
    let table = |t: [u8; 16]| {
        let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = t.map(|byte| byte as i8);
        _mm_setr_epi8(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)
    };

    // What a packet that begins at each byte would be, and its length: 0 for what is not passed over here.
    let low = _mm_and_si128(bytes, bits(0x0f));
    let high = _mm_and_si128(_mm_srli_epi16(bytes, 4), bits(0x0f));
    let is_ip = _mm_shuffle_epi8(table(IP_BY_LOW), low);
    let is_nine = _mm_cmpeq_epi8(low, bits(9));
    let lens = _mm_or_si128(
        _mm_shuffle_epi8(table(LEN_BY_LOW), low),
        _mm_or_si128(
            _mm_and_si128(is_ip, _mm_shuffle_epi8(table(IP_LEN_BY_HIGH), high)),
            _mm_and_si128(is_nine, _mm_shuffle_epi8(table(NINE_LEN_BY_HIGH), high)),
        ),
    );
    // A MODE whose payload is none.
    let good_leaf = _mm_cmpeq_epi8(_mm_and_si128(next, bits(0xc0)), _mm_setzero_si128());
    let bad_bits = _mm_cmpeq_epi8(_mm_and_si128(next, bits(3)), bits(3));
    let bad_mode = _mm_andnot_si128(_mm_andnot_si128(bad_bits, good_leaf), _mm_cmpeq_epi8(bytes, bits(0x99)));
    let none = _mm_or_si128(_mm_cmpeq_epi8(bytes, bits(2)), bad_mode);
    let lens = _mm_andnot_si128(none, lens);

    // At first of one packet, then of two, four, eight, sixteen.
    let mut to = _mm_add_epi8(table([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]), lens);
    let mut first = table([1, 2, 4, 8, 16, 32, 64, 128, 0, 0, 0, 0, 0, 0, 0, 0]);
    let mut last = table([0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 64, 128]);
    for _ in 0..4 {
        // A place beyond the block gets its highest bit set, which looks up 0.
        let places = _mm_add_epi8(to, bits(0x70));
        first = _mm_or_si128(first, _mm_shuffle_epi8(first, places));
        last = _mm_or_si128(last, _mm_shuffle_epi8(last, places));
        to = _mm_max_epu8(to, _mm_shuffle_epi8(to, places));
    }

    let mut times = _mm_cmpeq_epi8(bytes, bits(TSC));
    if T::ALL {
        let is_cyc = _mm_cmpeq_epi8(_mm_and_si128(bytes, bits(7)), bits(3));
        times = _mm_or_si128(times, _mm_or_si128(is_cyc, _mm_cmpeq_epi8(bytes, bits(MTC))));
    }
    Links { to, first, last, times, forms: _mm_and_si128(is_ip, _mm_shuffle_epi8(table(IP_FORM_BY_HIGH), high)) }
}

/// By the low 4 bits of a first byte: TNT, PAD and CYC are 1 long.
const LEN_BY_LOW: [u8; 16] = [1, 0, 1, 1, 1, 0, 1, 0, 1, 0, 1, 1, 1, 0, 1, 0];
/// TIP, TIP.PGE, TIP.PGD and FUP.
const IP_BY_LOW: [u8; 16] = [0, 0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0, 0];
/// By the high 4 bits, of which the upper 3 say how much of the IP there is.
const IP_LEN_BY_HIGH: [u8; 16] = [1, 1, 3, 3, 5, 5, 7, 7, 7, 7, 0, 0, 9, 9, 0, 0];
/// The highest bit is for an IP of 16 bits, the next for one of 32, of 48, of 64 (or 48 that are extended).
const IP_FORM_BY_HIGH: [u8; 16] = [0, 0, 0x80, 0x80, 0x40, 0x40, 0x10, 0x10, 0x20, 0x20, 0, 0, 0x10, 0x10, 0, 0];
/// TSC, MTC, MODE.
const NINE_LEN_BY_HIGH: [u8; 16] = [0, 8, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0];

/// Where the payloads of the last packets stand that tell so many bits of an IP; 0: there was none.
#[derive(Default)]
struct LastIps {
    bits_16: usize,
    bits_32: usize,
    bits_48: usize,
    bits_64: usize,
}

impl LastIps {
    #[inline(always)]
    fn note(&mut self, at: usize, packets: &Packets) {
        let last = |begins: u32, before: usize| {
            // One more than the highest bit that is set, 0 without one: and a payload begins one behind its packet.
            let payload = (2 * u64::from(begins) + 1).ilog2() as usize;
            if payload == 0 {
                before
            } else {
                at + payload
            }
        };
        self.bits_16 = last(packets.ips_16, self.bits_16);
        self.bits_32 = last(packets.ips_32, self.bits_32);
        self.bits_48 = last(packets.ips_48, self.bits_48);
        self.bits_64 = last(packets.ips_64, self.bits_64);
    }

    /// The last IP after all of them, `before` being that before the first.
    fn apply(&self, before: u64, bytes: &[u8]) -> u64 {
        let mut ip = before;
        let mut from = 0;
        if self.bits_64 != 0 {
            from = self.bits_64;
            ip = payload(bytes, from);
            // The packet's own byte says whether there are 48 bits only.
            if bytes.get(from - 1).is_some_and(|first| first >> 5 == 3) {
                ip = ((ip << 16) as i64 >> 16) as u64;
            }
        }
        // One that tells fewer bits only matters behind the last that tells more.
        for (at, bits) in [(self.bits_48, 48), (self.bits_32, 32), (self.bits_16, 16)] {
            if at > from {
                from = at;
                let told = (1 << bits) - 1;
                ip = ip & !told | payload(bytes, at) & told;
            }
        }
        ip
    }
}
