//! One record on its way from a ring to what is held for its thread: whose it is, whether it counts, when it was.

use super::hold::Held;
use super::identity::Identity;
use super::targets::Stubs;
use super::threads::{Known, Threads};
use super::Stats;
use crate::clock;
use crate::ring::Record;

pub struct Intake<'a> {
    /// Place of the target among the targets.
    pub target: usize,
    pub pid: i32,
    pub ring: u16,
    pub stubs: &'a Stubs,
    pub identity: &'a mut Identity,
    pub threads: &'a mut Threads,
    /// The thread word of the ring's last record, and what it stands for. Most records have the same.
    pub last_thread: &'a mut Option<(u64, Known)>,
    pub counted: &'a mut Stats,
    pub held_bytes: &'a mut usize,
    /// No hit of the target is older.
    pub since_tsc: u64,
    /// Some time from `since_tsc` to now.
    pub now_tsc: u64,
    /// Nothing can be written any more: count only.
    pub failed: bool,
}

impl Intake<'_> {
    #[inline]
    pub fn take(&mut self, record: Record<'_>) {
        match self.stubs.slots(record.event_id) {
            Some(slots) if slots.len() == record.args.len() + 1 => {}
            _ => return self.counted.stray += 1,
        }
        let Known { place, certain } = self.thread(record.thread);
        let tsc = self.possible(record.tsc);
        let Some(thread) = self.threads.get(place) else { return self.counted.stray += 1 };
        if !thread.kept {
            return self.counted.filtered += 1;
        }
        if self.failed {
            return self.counted.lost += 1;
        }
        self.counted.unknown_threads += u64::from(!certain);
        self.counted.faults += u64::from(record.faults.count_ones());
        self.counted.held += 1;
        *self.held_bytes += Held::cost(record.args.len());
        let tsc = thread.in_order(self.ring, tsc);
        self.threads.hold(place, tsc, record.event_id, self.ring, record.args);
    }

    #[inline]
    fn thread(&mut self, word: u64) -> Known {
        match *self.last_thread {
            Some((last, known)) if last == word => known,
            _ => {
                let known = self.threads.find(self.target, self.identity, self.pid, word);
                *self.last_thread = Some((word, known));
                known
            }
        }
    }

    /// A time that a hit read just now can have; a target that makes times up does not spoil the order of others.
    #[inline]
    fn possible(&mut self, tsc: u64) -> u64 {
        if tsc > self.now_tsc {
            self.now_tsc = clock::rdtsc();
        }
        tsc.min(self.now_tsc).max(self.since_tsc)
    }
}
