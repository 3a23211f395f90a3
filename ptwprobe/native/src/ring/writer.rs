//! The stub's end of a ring in Rust: the same protocol, step by step. Only for tests, which need a writer without a
//! patched program; what a stub does is in its assembly template.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use super::memory::Mapping;
use super::*;
use crate::clock;

/// A target's view of the rings.
#[derive(Debug)]
pub struct Writer {
    layout: Layout,
    control: Mapping,
    data: Vec<Mapping>,
}

/// A reserved record that is not complete yet.
#[derive(Debug, Clone, Copy)]
pub struct Reservation {
    pub ring: u32,
    pub mark: Mark,
}

impl Writer {
    pub fn map(fd: BorrowedFd<'_>, layout: Layout) -> Result<Self, RingError> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let control = Mapping::repeated(fd, 0, layout.control_len(), 1, prot)?;
        let data = (0..layout.rings)
            .map(|ring| Mapping::repeated(fd, layout.data_offset(ring), layout.data_len(), 2, prot))
            .collect::<Result<_, _>>()?;
        Ok(Writer { layout, control, data })
    }

    /// Reserves a record, or counts the hit as lost: `None`.
    pub fn reserve(&self, ring: u32, nargs: usize) -> Option<Reservation> {
        if ring >= self.layout.rings {
            self.control.word(HEADER_LOST_NO_RING).fetch_add(1, Ordering::SeqCst);
            return None;
        }
        let size = RECORD_HEADER + 8 * nargs;
        let head = self.field(ring, CONTROL_HEAD);
        loop {
            let old = Mark(head.load(Ordering::SeqCst));
            let tail = Mark(self.field(ring, CONTROL_TAIL).load(Ordering::SeqCst));
            if !has_room(old, tail, size, self.layout.data_len()) {
                // The tail may have passed an old head while this thread slept: full is only what still is the head.
                if head.load(Ordering::SeqCst) != old.0 {
                    continue;
                }
                self.field(ring, CONTROL_LOST).fetch_add(1, Ordering::SeqCst);
                return None;
            }
            if head.compare_exchange(old.0, old.after(size).0, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
                return Some(Reservation { ring, mark: old });
            }
        }
    }

    /// Writes everything but the stamp.
    pub fn fill(&self, at: Reservation, tsc: u64, thread: u64, event_id: u16, faults: u32, args: &[u64]) {
        let event = u64::from(event_id) | (args.len() as u64) << 16 | u64::from(faults) << 32;
        self.record_word(at, RECORD_TSC).store(tsc, Ordering::Relaxed);
        self.record_word(at, RECORD_THREAD).store(thread, Ordering::Relaxed);
        self.record_word(at, RECORD_EVENT).store(event, Ordering::Relaxed);
        for (i, arg) in args.iter().enumerate() {
            self.record_word(at, RECORD_HEADER + 8 * i).store(*arg, Ordering::Relaxed);
        }
    }

    /// Completes the record.
    pub fn stamp(&self, at: Reservation) {
        self.record_word(at, 0).store(at.mark.0, Ordering::Release);
    }

    /// One whole record, as a stub writes it; false if it was counted as lost. `tsc`: now, if `None`.
    pub fn write(&self, ring: u32, thread: u64, event_id: u16, faults: u32, tsc: Option<u64>, args: &[u64]) -> bool {
        let Some(at) = self.reserve(ring, args.len()) else { return false };
        self.fill(at, tsc.unwrap_or_else(clock::rdtsc), thread, event_id, faults, args);
        self.stamp(at);
        true
    }

    /// `count` records with the arguments (i, !i), `per_second` of them or (0) as fast as it goes; how many were lost.
    pub fn write_many(&self, ring: u32, tid: u64, event_id: u16, count: u64, per_second: u64) -> u64 {
        const BATCH: u64 = 1000;
        let start = Instant::now();
        let mut lost = 0;
        for i in 0..count {
            lost += u64::from(!self.write(ring, tid, event_id, 0, None, &[i, !i]));
            if per_second > 0 && i % BATCH == 0 {
                let due = Duration::from_nanos((u128::from(i) * 1_000_000_000 / u128::from(per_second)) as u64);
                thread::sleep(due.saturating_sub(start.elapsed()));
            }
        }
        lost
    }

    /// A control word of ring `ring`, which must exist.
    pub fn field(&self, ring: u32, field: usize) -> &AtomicU64 {
        self.control.word(self.layout.control_offset(ring) + field)
    }

    /// Word at `field` bytes of a reserved record.
    pub fn record_word(&self, at: Reservation, field: usize) -> &AtomicU64 {
        self.data[at.ring as usize].word(at.mark.offset(self.layout.ring_bits) + field)
    }
}

/// The stub's room check, in 32 bits as it does it.
pub(super) fn has_room(head: Mark, tail: Mark, size: usize, capacity: usize) -> bool {
    head.0.wrapping_sub(tail.0) as u32 as usize <= capacity - size
}
