//! The recorder's end of one ring.

use std::sync::atomic::Ordering;
use std::sync::Arc;

use super::memory::Mapping;
use super::*;

/// One hit as the stub left it. Nothing in it is trusted beyond its shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    pub tsc: u64,
    /// The thread's tid, or its fs base where the stub had no tid to read.
    pub thread: u64,
    pub event_id: u16,
    /// Bit i: the load of argument i faulted, its word is 0.
    pub faults: u32,
    pub args: &'a [u64],
}

/// Where a look at a ring ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Everything that was reserved when the look began has been read.
    Clear,
    /// A record that is not complete (yet).
    Hole,
    /// Enough for one look; there is more.
    Limit,
}

/// What one look at a ring gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drained {
    pub records: u64,
    pub end: End,
    /// Bytes in the ring when the look began.
    pub fill: usize,
}

/// Reads one ring; the only one who moves its tail.
#[derive(Debug)]
pub struct Reader {
    memory: Arc<RingMemory>,
    ring: u32,
    /// Our own copy: the shared tail is for the stubs to read, and the target could write it.
    tail: Mark,
    blocked: bool,
    /// The head when the hole that blocks us was first reported: what was reserved later is not part of it.
    hole_bound: Option<Mark>,
    torn: u64,
    lost_seen: u64,
    broken: bool,
    args: Box<[u64; MAX_ARGS]>,
}

/// Free space is given back to the stubs after this many bytes were read, not only at the end of a look.
const PUBLISH_EVERY: usize = 16 << 10;

/// Bytes that one look reads at most, so that what the caller keeps of it is bounded.
const LOOK_LIMIT: usize = 16 << 20;

impl Reader {
    /// The one reader of ring `ring`, from its start; `None` if there is no such ring.
    pub fn new(memory: Arc<RingMemory>, ring: u32) -> Option<Self> {
        let tail = memory.start(ring)?;
        Some(Reader {
            memory,
            ring,
            tail,
            blocked: false,
            hole_bound: None,
            torn: 0,
            lost_seen: 0,
            broken: false,
            args: Box::new([0; MAX_ARGS]),
        })
    }

    /// Reads complete records up to the first that is not, at most to the head as it is now.
    pub fn drain(&mut self, each: &mut impl FnMut(Record<'_>)) -> Drained {
        let head = self.head();
        let waiting = head.since(self.tail);
        if self.broken || !waiting.is_plausible(self.capacity()) {
            self.broken = true;
            return Drained { records: 0, end: End::Clear, fill: 0 };
        }
        let mut drained = Drained { records: 0, end: End::Clear, fill: waiting.bytes as usize };
        let mut tail = self.tail;
        let memory = Arc::clone(&self.memory);
        let Some(data) = memory.data(self.ring) else { return drained };
        let (mut read, mut published) = (0, 0);
        while tail != head {
            if read >= LOOK_LIMIT {
                drained.end = End::Limit;
                break;
            }
            let offset = tail.offset(self.memory.layout().ring_bits);
            // Acquire: the stamp is written last, so all of the record is there once it is.
            if data.word(offset).load(Ordering::Acquire) != tail.0 {
                drained.end = End::Hole;
                break;
            }
            let Some(size) = self.read(data, offset, head.since(tail), each) else {
                // Stamped, yet no record: the target's stubs did not write this. Go on after it, as after a hole.
                tail = self.resume(data, tail, head);
                continue;
            };
            tail = tail.after(size);
            drained.records += 1;
            read += size;
            if read - published >= PUBLISH_EVERY {
                self.publish(tail);
                published = read;
            }
        }
        if tail != self.tail {
            self.hole_bound = None;
        }
        self.blocked = drained.end == End::Hole;
        self.tail = tail;
        self.publish(tail);
        drained
    }

    /// The mark of the record that is not complete and that the reader waits for.
    pub fn hole(&self) -> Option<Mark> {
        (self.blocked && !self.broken).then_some(self.tail)
    }

    /// Notes how far the hole that blocks this ring can reach. To be called before the target's threads are looked
    /// at: a record reserved afterwards may belong to a thread that was looked at already, and is not passed.
    pub fn bound_hole(&mut self) {
        if self.hole().is_some() && self.hole_bound.is_none() {
            self.hole_bound = Some(self.head());
        }
    }

    /// Whether `bound_hole` was called for the hole that blocks this ring.
    pub fn is_bounded(&self) -> bool {
        self.hole_bound.is_some()
    }

    /// Gives up the records that nobody will complete, from the tail to the next complete record, and counts them as
    /// torn. Only to be called once every thread was seen outside the stubs after `bound_hole`; without a
    /// bound nothing is passed. Returns the number of records given up.
    pub fn pass_hole(&mut self) -> u64 {
        match self.hole_bound.take() {
            Some(bound) if self.hole().is_some() => self.pass_to(bound),
            _ => 0,
        }
    }

    /// As `pass_hole`, for a target in which no thread can write any more.
    pub fn pass_dead_hole(&mut self) -> u64 {
        if self.hole().is_none() {
            return 0;
        }
        self.pass_to(self.head())
    }

    /// Records given up so far.
    pub fn torn(&self) -> u64 {
        self.torn
    }

    /// Hits that found the ring full since the last call.
    pub fn take_lost(&mut self) -> u64 {
        let lost = self.memory.control_word(self.ring, CONTROL_LOST).load(Ordering::Relaxed);
        let new = counted_since(self.lost_seen, lost);
        self.lost_seen = lost;
        new
    }

    /// The control words make no sense; this ring is read no more, and its hits since are not known.
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    fn capacity(&self) -> u64 {
        self.memory.layout().data_len() as u64
    }

    fn head(&self) -> Mark {
        Mark(self.memory.control_word(self.ring, CONTROL_HEAD).load(Ordering::Acquire))
    }

    /// Release: the stubs may overwrite what lies before the tail, so all of it must have been read.
    fn publish(&self, tail: Mark) {
        self.memory.control_word(self.ring, CONTROL_TAIL).store(tail.0, Ordering::Release);
    }

    /// Hands on the stamped record at `offset` and returns its size, or `None` if it does not fit what is reserved.
    #[inline]
    fn read(
        &mut self,
        data: &Mapping,
        offset: usize,
        reserved: mark::Distance,
        each: &mut impl FnMut(Record<'_>),
    ) -> Option<usize> {
        let event = data.word(offset + RECORD_EVENT).load(Ordering::Relaxed);
        let nargs = (event >> 16 & 0xffff) as usize;
        let args = self.args.get_mut(..nargs)?;
        let size = RECORD_HEADER + 8 * nargs;
        let rest = mark::Distance {
            bytes: reserved.bytes.checked_sub(size as u64)?,
            records: reserved.records.checked_sub(1)?,
        };
        if !rest.is_plausible(reserved.bytes) {
            return None;
        }
        for (i, arg) in args.iter_mut().enumerate() {
            *arg = data.word(offset + RECORD_HEADER + 8 * i).load(Ordering::Relaxed);
        }
        each(Record {
            tsc: data.word(offset + RECORD_TSC).load(Ordering::Relaxed),
            thread: data.word(offset + RECORD_THREAD).load(Ordering::Relaxed),
            event_id: event as u16,
            faults: (event >> 32) as u32,
            args,
        });
        Some(size)
    }

    fn pass_to(&mut self, bound: Mark) -> u64 {
        if !bound.since(self.tail).is_plausible(self.capacity()) {
            self.broken = true;
            return 0;
        }
        let before = self.torn;
        let memory = Arc::clone(&self.memory);
        if let Some(data) = memory.data(self.ring) {
            let offset = self.tail.offset(memory.layout().ring_bits);
            // A record that was completed since the last look is no hole.
            if data.word(offset).load(Ordering::Acquire) != self.tail.0 {
                self.tail = self.resume(data, self.tail, bound);
                self.publish(self.tail);
            }
            self.blocked = false;
        }
        self.torn - before
    }

    /// The next mark after `from` at which a complete record stands, or `bound`; what lies between is torn.
    fn resume(&mut self, data: &Mapping, from: Mark, bound: Mark) -> Mark {
        let start = from.offset(self.memory.layout().ring_bits);
        let all = bound.since(from);
        let mut next = bound;
        for step in (RECORD_HEADER as u64..all.bytes).step_by(8) {
            let word = Mark(data.word(start + step as usize).load(Ordering::Acquire));
            let skipped = word.since(from);
            if skipped.bytes == step && skipped.is_plausible(step) && bound.since(word).is_plausible(all.bytes - step) {
                next = word;
                break;
            }
        }
        self.torn += next.since(from).records;
        next
    }
}
