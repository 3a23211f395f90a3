//! A position in the endless stream of a ring's bytes together with the number of the record that begins there.

use super::{MAX_ARGS, RECORD_HEADER};

const POSITION_BITS: u32 = 40;
const POSITION_MASK: u64 = (1 << POSITION_BITS) - 1;

/// Low 40 bits: byte position; high 24 bits: record count. A record of `size` bytes adds `(1 << 40) + size`, mod
/// 2^64; a carry out of the position only shifts all later counts, for everybody alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark(pub u64);

impl Mark {
    /// A mark at which a ring of `1 << ring_bits` bytes may start: any count, position a multiple of the size. Random,
    /// so that no payload word can be made to look like a mark without having seen one.
    pub fn start(random: u64, ring_bits: u32) -> Self {
        Mark(random & !((1 << ring_bits) - 1))
    }

    /// The mark after a record of `size` bytes (a multiple of 8).
    pub fn after(self, size: usize) -> Self {
        Mark(self.0.wrapping_add((1 << POSITION_BITS) + size as u64))
    }

    /// Offset in a ring of `1 << ring_bits` bytes.
    pub fn offset(self, ring_bits: u32) -> usize {
        (self.0 & ((1 << ring_bits) - 1)) as usize
    }

    /// What lies between `earlier` and this mark.
    pub fn since(self, earlier: Mark) -> Distance {
        let difference = self.0.wrapping_sub(earlier.0);
        Distance { bytes: difference & POSITION_MASK, records: difference >> POSITION_BITS }
    }
}

/// The difference of two marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Distance {
    pub bytes: u64,
    pub records: u64,
}

impl Distance {
    pub fn is_zero(self) -> bool {
        self.bytes == 0 && self.records == 0
    }

    /// Whether so many whole records can have so many bytes in a ring of `capacity` bytes.
    pub fn is_plausible(self, capacity: u64) -> bool {
        const LONGEST: u64 = (RECORD_HEADER + 8 * MAX_ARGS) as u64;
        self.bytes <= capacity
            && self.bytes.is_multiple_of(8)
            && self.records * RECORD_HEADER as u64 <= self.bytes
            && self.bytes <= self.records * LONGEST
    }
}
