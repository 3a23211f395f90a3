//! Hits of one thread that were read from the rings and are not written yet, because a ring may still hold an earlier
//! one.

/// One held hit. `tsc` is the key of the order; the arguments stand in the words of the same [`Held`].
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    pub tsc: u64,
    first_word: u32,
    pub event_id: u16,
    /// The ring it came through: the CPU that the thread ran on.
    pub ring: u16,
    nargs: u8,
}

#[derive(Debug, Default)]
pub struct Held {
    entries: Vec<Entry>,
    words: Vec<u64>,
    unsorted: bool,
}

impl Held {
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes that a hit with `nargs` arguments takes here.
    pub fn cost(nargs: usize) -> usize {
        size_of::<Entry>() + 8 * nargs
    }

    /// At most 255 arguments, as a record has.
    pub fn push(&mut self, tsc: u64, event_id: u16, ring: u16, args: &[u64]) {
        self.unsorted |= self.entries.last().is_some_and(|last| last.tsc > tsc);
        self.entries.push(Entry { tsc, first_word: self.words.len() as u32, event_id, ring, nargs: args.len() as u8 });
        self.words.extend_from_slice(args);
    }

    /// Orders the hits by time (hits of the same time stay as they came) and returns how many are before `tsc`.
    pub fn ready(&mut self, tsc: u64) -> usize {
        if self.unsorted {
            self.entries.sort_by_key(|e| e.tsc);
            self.unsorted = false;
        }
        self.entries.partition_point(|e| e.tsc < tsc)
    }

    /// The first `count` hits with their arguments, in the order they have now.
    pub fn first(&self, count: usize) -> impl Iterator<Item = (&Entry, &[u64])> {
        self.entries.iter().take(count).map(|e| {
            let first = e.first_word as usize;
            (e, self.words.get(first..first + usize::from(e.nargs)).unwrap_or(&[]))
        })
    }

    /// Forgets the first `count` hits; returns the bytes they took.
    pub fn remove(&mut self, count: usize) -> usize {
        let removed: usize = self.entries.iter().take(count).map(|e| Self::cost(usize::from(e.nargs))).sum();
        if count >= self.entries.len() {
            self.entries.clear();
            self.words.clear();
            return removed;
        }
        // Few are left as a rule: those read after the first ring was looked at.
        let mut words = Vec::with_capacity(self.words.len());
        self.entries.drain(..count);
        for entry in &mut self.entries {
            let first = entry.first_word as usize;
            entry.first_word = words.len() as u32;
            words.extend_from_slice(self.words.get(first..first + usize::from(entry.nargs)).unwrap_or(&[]));
        }
        self.words.clear();
        self.words.extend_from_slice(&words);
        removed
    }

    fn capacity(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>() + self.words.capacity() * 8
    }
}

/// Emptied buffers for the next thread that hits a probe.
#[derive(Debug, Default)]
pub struct Pool(Vec<Held>);

impl Pool {
    const BUFFERS: usize = 64;
    const BUFFER_BYTES: usize = 4 << 20;

    pub fn take(&mut self) -> Held {
        self.0.pop().unwrap_or_default()
    }

    /// Keeps an empty buffer, unless there are many, or one burst made it large.
    pub fn give_back(&mut self, held: Held) {
        if self.0.len() < Self::BUFFERS && held.capacity() <= Self::BUFFER_BYTES {
            self.0.push(held);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(held: &Held, count: usize) -> Vec<(u64, Vec<u64>)> {
        held.first(count).map(|(e, args)| (e.tsc, args.to_vec())).collect()
    }

    #[test]
    fn hits_come_out_by_time_and_the_rest_stays() {
        let mut held = Held::default();
        held.push(30, 0x8000, 1, &[1, 2]);
        held.push(10, 0x8000, 0, &[3]);
        held.push(20, 0x8000, 0, &[]);
        held.push(10, 0x8000, 0, &[4]);
        assert_eq!(held.ready(20), 2);
        assert_eq!(listed(&held, 2), [(10, vec![3]), (10, vec![4])]);
        assert_eq!(held.remove(2), 2 * Held::cost(1));
        held.push(25, 0x8000, 0, &[5]);
        assert_eq!(held.ready(u64::MAX), 3);
        assert_eq!(listed(&held, 3), [(20, vec![]), (25, vec![5]), (30, vec![1, 2])]);
        held.remove(3);
        assert!(held.is_empty());
    }
}
