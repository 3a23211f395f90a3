//! A bounded copy of the newest hits, for who shows them while they are recorded.

use std::collections::VecDeque;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TapHit {
    /// CLOCK_MONOTONIC.
    pub ns: u64,
    pub pid: i32,
    pub tid: i32,
    pub cpu: i32,
    pub event_id: u16,
    pub args: Vec<u64>,
}

/// Never blocks: when it is full, the oldest hits go.
#[derive(Debug)]
pub struct Tap {
    hits: VecDeque<TapHit>,
    capacity: usize,
}

impl Tap {
    pub fn new(capacity: usize) -> Self {
        Tap { hits: VecDeque::new(), capacity: capacity.max(1) }
    }

    /// `hit` without its arguments; the buffer of a hit that goes is used again.
    pub fn push(&mut self, mut hit: TapHit, args: &[u64]) {
        if self.hits.len() >= self.capacity {
            if let Some(oldest) = self.hits.pop_front() {
                hit.args = oldest.args;
                hit.args.clear();
            }
        }
        hit.args.extend_from_slice(args);
        self.hits.push_back(hit);
    }

    /// The oldest `max` hits that are there, by time.
    pub fn take(&mut self, max: usize) -> Vec<TapHit> {
        // Hits come thread by thread; a round's hits are ordered here.
        self.hits.make_contiguous().sort_by_key(|hit| hit.ns);
        let count = max.min(self.hits.len());
        self.hits.drain(..count).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_hits_go_when_it_is_full() {
        let mut tap = Tap::new(2);
        for ns in [3, 1, 2] {
            tap.push(TapHit { ns, pid: 1, tid: 1, cpu: 0, event_id: 0x8000, args: Vec::new() }, &[ns]);
        }
        let taken: Vec<_> = tap.take(10).into_iter().map(|h| (h.ns, h.args)).collect();
        assert_eq!(taken, [(1, vec![1]), (2, vec![2])]);
        assert_eq!(tap.take(10), []);
    }
}
