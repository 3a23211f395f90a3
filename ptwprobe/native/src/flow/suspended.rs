//! Interrupts in code that nothing is known of: where the walk was when they came, and goes on later.

/// Places that are kept: of threads that were interrupted in such code and have not gone on.
const MAX_PLACES: usize = 64;

/// An interrupt, and whose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    pub ip: u64,
    pub space: u32,
    pub tid: Option<u32>,
}

/// See the module. Of one stream, across its pieces.
#[derive(Clone, Debug, Default)]
pub struct Suspended {
    /// The oldest first; with each the address that the walk had reached.
    places: Vec<(At, u64)>,
}

impl Suspended {
    pub fn clear(&mut self) {
        self.places.clear();
    }

    pub fn push(&mut self, at: At, reached: u64) {
        self.places.retain(|&(other, _)| other != at);
        self.places.push((at, reached));
        self.bound();
    }

    /// Where the walk was when this interrupt came; it is over.
    pub fn take(&mut self, at: At) -> Option<u64> {
        let index = self.places.iter().rposition(|&(other, _)| other == at)?;
        Some(self.places.remove(index).1)
    }

    /// Puts what was so `earlier` before it.
    pub fn follow(&mut self, earlier: &Self) {
        let mut places = earlier.places.clone();
        places.retain(|&(old, _)| self.places.iter().all(|&(new, _)| new != old));
        places.append(&mut self.places);
        self.places = places;
        self.bound();
    }

    /// What is so behind a piece that had `self` before it. `left`: what it knows of, and whether that is all.
    pub fn after(&self, (mut left, all): (Self, bool)) -> Self {
        if !all {
            left.follow(self);
        }
        left
    }

    fn bound(&mut self) {
        let surplus = self.places.len().saturating_sub(MAX_PLACES);
        self.places.drain(..surplus);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ip: u64, tid: u32) -> At {
        At { ip, space: 1, tid: Some(tid) }
    }

    #[test]
    fn threads_interrupted_at_one_place_go_on_where_each_was() {
        let mut suspended = Suspended::default();
        suspended.push(at(1, 1), 10);
        suspended.push(at(1, 2), 20);
        assert_eq!(suspended.take(at(1, 3)), None);
        assert_eq!(suspended.take(at(1, 1)), Some(10));
        assert_eq!(suspended.take(at(1, 1)), None);
        assert_eq!(suspended.take(at(1, 2)), Some(20));
    }

    #[test]
    fn what_came_later_counts_and_the_oldest_goes() {
        let (mut earlier, mut later) = (Suspended::default(), Suspended::default());
        earlier.push(at(1, 1), 10);
        earlier.push(at(2, 1), 11);
        later.push(at(1, 1), 20);
        later.follow(&earlier);
        assert_eq!((later.take(at(1, 1)), later.take(at(2, 1))), (Some(20), Some(11)));
        (0..100).for_each(|ip| earlier.push(at(ip, 9), ip));
        assert_eq!((earlier.take(at(35, 9)), earlier.take(at(36, 9))), (None, Some(36)));
    }
}
