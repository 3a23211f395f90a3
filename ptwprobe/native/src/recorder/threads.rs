//! The threads whose hits were seen, and the hits that are held for them.

use std::collections::{HashMap, HashSet};

use super::hold::{Held, Pool};
use super::identity::Identity;

/// Beyond so many threads those without held hits are forgotten (and named again should they come back): threads that
/// come and go for days, or a target that makes tids up, must not fill our memory.
const MANY: usize = 1 << 16;

pub struct Thread {
    /// Place of the target among the targets.
    pub target: usize,
    pub pid: i32,
    pub tid: i32,
    pub kept: bool,
    /// Taken out when the thread's first hit is written.
    pub comm: Option<Vec<u8>>,
    pub held: Held,
    /// Where its last written hit happened, and when (0: none yet).
    pub last_cpu: Option<u16>,
    pub written_tsc: u64,
    /// Its last record as read: ring and time.
    order: (u16, u64),
}

impl Thread {
    /// The time of a record that came after others of this thread in ring `ring`: not before theirs. A hit in a
    /// signal handler that interrupted a stub stands behind that stub's record, and may have read the clock first.
    #[inline]
    pub fn in_order(&mut self, ring: u16, tsc: u64) -> u64 {
        let tsc = if self.order.0 == ring { tsc.max(self.order.1) } else { tsc };
        self.order = (ring, tsc);
        tsc
    }
}

/// What a thread word stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Known {
    /// Place among the threads.
    pub place: u32,
    /// False where the process stands for a thread that could not be told.
    pub certain: bool,
}

#[derive(Default)]
pub struct Threads {
    list: Vec<Thread>,
    by_word: HashMap<(usize, u64), Known>,
    by_tid: HashMap<(usize, i32), u32>,
    /// Those with held hits.
    busy: Vec<u32>,
    keep: Option<HashSet<i32>>,
    pool: Pool,
}

impl Threads {
    /// Only these tids' hits are kept; `None`: all.
    pub fn keep(&mut self, tids: Option<HashSet<i32>>) {
        for thread in &mut self.list {
            thread.kept = tids.as_ref().is_none_or(|t| t.contains(&thread.tid));
        }
        self.keep = tids;
    }

    /// The thread that target `target` calls `word`.
    pub fn find(&mut self, target: usize, identity: &mut Identity, pid: i32, word: u64) -> Known {
        if let Some(&known) = self.by_word.get(&(target, word)) {
            return known;
        }
        let named = identity.name(word);
        let list = &mut self.list;
        let keep = &self.keep;
        let place = *self.by_tid.entry((target, named.tid)).or_insert_with(|| {
            list.push(Thread {
                target,
                pid,
                tid: named.tid,
                kept: keep.as_ref().is_none_or(|t| t.contains(&named.tid)),
                comm: Some(named.comm),
                held: Held::default(),
                last_cpu: None,
                written_tsc: 0,
                order: (u16::MAX, 0),
            });
            (list.len() - 1) as u32
        });
        let known = Known { place, certain: named.certain };
        self.by_word.insert((target, word), known);
        known
    }

    /// `word` has got another meaning.
    pub fn forget_word(&mut self, target: usize, word: u64) {
        self.by_word.remove(&(target, word));
    }

    #[inline]
    pub fn get(&mut self, place: u32) -> Option<&mut Thread> {
        self.list.get_mut(place as usize)
    }

    /// Holds a hit of the thread at `place`.
    #[inline]
    pub fn hold(&mut self, place: u32, tsc: u64, event_id: u16, ring: u16, args: &[u64]) {
        let Some(thread) = self.list.get_mut(place as usize) else { return };
        if thread.held.is_empty() {
            self.busy.push(place);
            thread.held = self.pool.take();
        }
        thread.held.push(tsc, event_id, ring, args);
    }

    /// Calls `each` for every thread with held hits; those that have none left afterwards leave the list.
    pub fn for_busy(&mut self, mut each: impl FnMut(&mut Thread)) {
        self.busy.sort_unstable();
        let Threads { list, busy, pool, .. } = self;
        busy.retain(|&index| {
            let Some(thread) = list.get_mut(index as usize) else { return false };
            each(thread);
            if thread.held.is_empty() {
                pool.give_back(std::mem::take(&mut thread.held));
            }
            !thread.held.is_empty()
        });
    }

    /// Forgets idle threads where there are too many. True if places have changed: nobody may use an old one.
    pub fn prune(&mut self) -> bool {
        if self.by_word.len().max(self.list.len()) < MANY {
            return false;
        }
        self.list.retain(|thread| !thread.held.is_empty());
        self.by_word.clear();
        self.by_tid = self.list.iter().zip(0..).map(|(thread, i)| ((thread.target, thread.tid), i)).collect();
        self.busy = (0..self.list.len() as u32).collect();
        true
    }
}
