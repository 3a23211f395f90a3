//! Goes through the batches of one stream: branches, marks and changes of time in their order.

use crate::flow::{Batch, Branch, Mark};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Branch(Branch),
    Mark(Mark),
    /// [`Cursor::tsc`] is another from here on.
    Time,
    /// The batch is at its end.
    Empty,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Cursor {
    batch: Option<Batch>,
    tsc: u64,
    branch: usize,
    mark: usize,
    time: usize,
    /// Branches up to the next mark or time.
    free: usize,
}

impl Cursor {
    /// The time of what comes next; 0 before the first.
    #[must_use]
    pub fn tsc(&self) -> u64 {
        self.tsc
    }

    pub fn refill(&mut self, batch: Batch) {
        (self.branch, self.mark, self.time, self.free) = (0, 0, 0, 0);
        self.batch = Some(batch);
    }

    /// The batch that was gone through.
    pub fn used(&mut self) -> Option<Batch> {
        self.batch.take()
    }

    /// Takes the time that a batch begins with.
    pub fn first_time(&mut self) {
        let Some(batch) = &self.batch else { return };
        let time = batch.times.first().copied();
        let mark = batch.marks.first().map(|mark| (mark.at, mark.tsc)).filter(|&(_, tsc)| tsc != 0);
        if let Some((_, tsc)) = time.into_iter().chain(mark).min() {
            self.tsc = tsc;
        }
    }

    #[inline]
    pub fn step(&mut self) -> Step {
        let Some(batch) = &self.batch else { return Step::Empty };
        if self.free > 0 {
            if let Some(&branch) = batch.branches.get(self.branch) {
                self.branch += 1;
                self.free -= 1;
                return Step::Branch(branch);
            }
        }
        let due = |at: Option<u32>| at.filter(|&at| at as usize <= self.branch);
        let time = batch.times.get(self.time);
        let mark = batch.marks.get(self.mark);
        let time_due = due(time.map(|&(at, _)| at));
        let mark_due = due(mark.map(|mark| mark.at));
        // A mark tells its own time; what came before a change of it comes first.
        if let (Some(_), Some(&(_, tsc))) = (time_due, time) {
            let earlier = mark.filter(|mark| mark_due.is_some() && mark.tsc != 0 && mark.tsc < tsc);
            if earlier.is_none() {
                self.time += 1;
                let changed = self.tsc != tsc;
                self.tsc = tsc;
                return if changed { Step::Time } else { self.step() };
            }
        }
        if let (Some(_), Some(&mark)) = (mark_due, mark) {
            if mark.tsc != 0 && mark.tsc != self.tsc {
                self.tsc = mark.tsc;
                return Step::Time;
            }
            self.mark += 1;
            return Step::Mark(mark);
        }
        let next = [time.map(|&(at, _)| at), mark.map(|mark| mark.at)].into_iter().flatten().min();
        let end = next.map_or(batch.branches.len(), |at| (at as usize).min(batch.branches.len()));
        self.free = end.saturating_sub(self.branch);
        if self.free == 0 {
            return Step::Empty;
        }
        self.step()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::{BranchKind, What};

    fn batch(branches: u64, times: &[(u32, u64)], marks: &[(u32, u64)]) -> Batch {
        let mark = |&(at, tsc): &(u32, u64)| Mark { at, tsc, offset: 0, what: What::Overflow };
        Batch {
            branches: (0..branches).map(|at| Branch::new(at, 0, BranchKind::Jump)).collect(),
            times: times.to_vec(),
            marks: marks.iter().map(mark).collect(),
        }
    }

    fn told(batch: Batch) -> String {
        let mut cursor = Cursor::default();
        cursor.refill(batch);
        let mut out = String::new();
        loop {
            out += &match cursor.step() {
                Step::Branch(branch) => format!("{} ", branch.from),
                Step::Mark(mark) => format!("m{} ", mark.tsc),
                Step::Time => format!("t{} ", cursor.tsc()),
                Step::Empty => return out,
            };
        }
    }

    #[test]
    fn all_comes_in_its_order() {
        assert_eq!(told(batch(3, &[(0, 10), (2, 20)], &[(1, 10), (2, 15), (3, 20)])), "t10 0 m10 1 t15 m15 t20 2 m20 ");
        assert_eq!(told(batch(0, &[(0, 10)], &[(0, 5), (0, 10)])), "t5 m5 t10 m10 ");
        assert_eq!(told(batch(1, &[], &[(0, 5), (1, 0)])), "t5 m5 0 m0 ");
        assert_eq!(told(batch(2, &[], &[])), "0 1 ");
        assert_eq!(told(Batch::default()), "");
    }
}
