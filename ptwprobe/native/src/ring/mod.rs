//! The shared-memory ring: how hits leave a process where no Intel PT records them.
//!
//! One sealed memfd per target, mapped by the target's stubs (which write) and by the recorder (which reads):
//!
//! | file offset | what |
//! |---|---|
//! | 0 | header: magic, version, rings, ring_bits; `lost_no_ring`; load gate; recorder |
//! | 0x1000 + i * 0x100 | control of ring i: head (stubs), lost (stubs), tail (reader), each in its own cache line |
//! | `control_len` + (i << ring_bits) | data of ring i, mapped twice in a row on both sides: a record is contiguous |
//!
//! Head, tail and the stamp of a record are *marks* ([`Mark`]): a position and a record count in one word, so that one
//! compare-exchange reserves and counts, and the number of records in any stretch is the difference of two marks.
//! A record is `stamp, tsc, thread, event_id | nargs << 16 | faults << 32, args...`, 8 bytes each. The stamp is the
//! record's own mark and is written last: what an earlier lap left there is another mark, so the reader need not
//! clear what it read. The ring does not wait: full means that the stub adds one to `lost`.
//!
//! Every hit is read, lost (counted by the stub) or torn (its thread died between reservation and stamp; counted by
//! the reader from the marks), exactly. The target is not trusted: whatever it writes, the reader stays within the
//! mapping, and a target can spoil no trace but its own.

mod mark;
mod memory;
mod reader;
#[cfg(test)]
mod tests;
mod writer;

pub use mark::Mark;
pub use memory::{RingError, RingMemory};
pub use reader::{Drained, End, Reader, Record};
pub use writer::{Reservation, Writer};

/// "PTWRING1", little-endian.
pub const MAGIC: u64 = u64::from_le_bytes(*b"PTWRING1");
pub const VERSION: u32 = 1;

/// Offsets in the header page.
pub const HEADER_MAGIC: usize = 0x00;
pub const HEADER_VERSION: usize = 0x08;
pub const HEADER_RINGS: usize = 0x0c;
pub const HEADER_RING_BITS: usize = 0x10;
/// u64, counted up by stubs on a CPU that has no ring.
pub const HEADER_LOST_NO_RING: usize = 0x40;
/// u32, a robust futex: the tid of the thread that catches faults of stub loads, 0 where nobody does.
pub const HEADER_LOAD_GATE: usize = 0x80;
/// u32, a robust futex: the tid of the recorder's tracing task, 0 or marked as dead where nobody records any more.
pub const HEADER_RECORDER: usize = 0xc0;

/// File offset of the first ring's control block, and the size of each, in bytes.
pub const CONTROL_START: usize = 0x1000;
pub const CONTROL_SIZE: usize = 0x100;
/// Offsets in a control block; all u64.
pub const CONTROL_HEAD: usize = 0x00;
pub const CONTROL_LOST: usize = 0x40;
pub const CONTROL_TAIL: usize = 0x80;

/// Bytes of a record before its arguments, and offsets of its fields.
pub const RECORD_HEADER: usize = 32;
pub const RECORD_TSC: usize = 8;
pub const RECORD_THREAD: usize = 16;
pub const RECORD_EVENT: usize = 24;
pub const MAX_ARGS: usize = 255;

/// A CPU number in `TSC_AUX` has 12 bits.
pub const MAX_RINGS: u32 = 0x1000;
/// A ring holds at least one record of any size, and its positions fit the stub's 32-bit room check.
pub const RING_BITS: std::ops::RangeInclusive<u32> = 12..=30;

const PAGE: usize = 0x1000;

/// How far one of the stubs' counters has moved between two looks. More than a machine can count in that time, or
/// backwards, is the target's own doing and counts as nothing.
pub(crate) fn counted_since(before: u64, now: u64) -> u64 {
    const MOST: u64 = 1 << 40;
    Some(now.wrapping_sub(before)).filter(|new| *new <= MOST).unwrap_or(0)
}

/// The sizes that follow from the number of rings and their size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    pub rings: u32,
    pub ring_bits: u32,
}

impl Layout {
    /// `None` if a number is out of range.
    pub fn new(rings: u32, ring_bits: u32) -> Option<Self> {
        let fits = (1..=MAX_RINGS).contains(&rings) && RING_BITS.contains(&ring_bits);
        fits.then_some(Layout { rings, ring_bits })
    }

    /// Bytes of header and control blocks, whole pages.
    pub fn control_len(self) -> usize {
        (CONTROL_START + self.rings as usize * CONTROL_SIZE).next_multiple_of(PAGE)
    }

    /// Bytes of one ring's data.
    pub fn data_len(self) -> usize {
        1 << self.ring_bits
    }

    /// Bytes of the whole file.
    pub fn total_len(self) -> usize {
        self.control_len() + (self.rings as usize) * self.data_len()
    }

    /// File offset of ring `ring`'s control block.
    pub(crate) fn control_offset(self, ring: u32) -> usize {
        CONTROL_START + ring as usize * CONTROL_SIZE
    }

    /// File offset of ring `ring`'s data.
    pub(crate) fn data_offset(self, ring: u32) -> usize {
        self.control_len() + ring as usize * self.data_len()
    }
}
