//! Whose code a stream shows at a time.

use std::sync::Arc;

use super::code::Code;

/// Who runs. What is not known is `None`; its space then has no code.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// Index into `Spaces`.
    pub space: u32,
    pub pid: Option<u32>,
    pub tid: Option<u32>,
}

/// The address spaces of a trace. 0 is one without any code, and stands for every index that is not there.
pub trait Spaces: Send + Sync {
    fn space(&self, index: u32) -> &dyn Code;
}

impl<S: Spaces + ?Sized> Spaces for &S {
    fn space(&self, index: u32) -> &dyn Code {
        (**self).space(index)
    }
}

impl<S: Spaces + ?Sized> Spaces for Arc<S> {
    fn space(&self, index: u32) -> &dyn Code {
        (**self).space(index)
    }
}

/// The contexts of one stream by time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    first: Context,
    /// (TSC at which it begins, context), sorted.
    changes: Vec<(u64, Context)>,
}

impl Schedule {
    /// One context for all times.
    #[must_use]
    pub fn constant(context: Context) -> Self {
        Self { first: context, changes: Vec::new() }
    }

    /// From `tsc` on it is `context`; what was said of later times is dropped.
    pub fn push(&mut self, tsc: u64, context: Context) {
        while self.changes.last().is_some_and(|&(later, _)| later >= tsc) {
            self.changes.pop();
        }
        if self.changes.last().map_or(self.first, |&(_, before)| before) != context {
            self.changes.push((tsc, context));
        }
    }

    /// The context at `tsc`.
    #[must_use]
    pub fn at(&self, tsc: u64) -> Context {
        self.during(tsc).0
    }

    /// The context at `tsc`, and the TSC of the next change (`u64::MAX`: none).
    #[must_use]
    pub fn during(&self, tsc: u64) -> (Context, u64) {
        let next = self.changes.partition_point(|&(begin, _)| begin <= tsc);
        let context = next.checked_sub(1).and_then(|last| self.changes.get(last)).map_or(self.first, |&(_, c)| c);
        (context, self.changes.get(next).map_or(u64::MAX, |&(begin, _)| begin))
    }

    /// All changes, in order of time.
    #[must_use]
    pub fn changes(&self) -> &[(u64, Context)] {
        &self.changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pid(pid: u32) -> Context {
        Context { space: pid, pid: Some(pid), tid: Some(pid) }
    }

    #[test]
    fn a_context_holds_from_its_time_to_the_next() {
        let mut schedule = Schedule::constant(pid(1));
        assert_eq!(schedule.during(u64::MAX), (pid(1), u64::MAX));
        schedule.push(10, pid(2));
        schedule.push(20, pid(2));
        schedule.push(30, pid(3));
        assert_eq!(schedule.changes(), [(10, pid(2)), (30, pid(3))]);
        assert_eq!(schedule.during(9), (pid(1), 10));
        assert_eq!(schedule.during(10), (pid(2), 30));
        assert_eq!(schedule.during(30), (pid(3), u64::MAX));
    }

    #[test]
    fn what_is_said_last_of_a_time_counts() {
        let mut schedule = Schedule::default();
        schedule.push(10, pid(2));
        schedule.push(10, pid(3));
        assert_eq!(schedule.changes(), [(10, pid(3))]);
        schedule.push(5, Context::default());
        assert!(schedule.changes().is_empty());
    }
}
