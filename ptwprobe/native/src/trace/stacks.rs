//! Call stacks of threads, as their calls and returns tell them.

use std::collections::HashMap;

use crate::flow::{Branch, BranchKind};

/// Frames that are kept of a thread: of deeper recursion the innermost ones.
const MAX_DEPTH: usize = 1 << 12;
const MAX_THREADS: usize = 1 << 16;
/// No instruction is longer.
const MAX_INSTRUCTION: u64 = 15;

/// See the module. What was called before the trace began is not known.
#[derive(Debug, Default)]
pub struct Stacks {
    threads: HashMap<u32, Stack>,
}

/// A thread's, outermost first: the addresses of the calls.
#[derive(Debug, Default)]
struct Stack {
    calls: Vec<u64>,
    /// Frames that were dropped at the outer end.
    dropped: usize,
}

impl Stacks {
    /// Takes a branch of thread `tid`; how deep in calls it is: that of the caller for a call, as for its return.
    pub fn branch(&mut self, tid: Option<u32>, branch: &Branch) -> usize {
        let Some(stack) = self.stack(tid) else { return 0 };
        match branch.kind {
            BranchKind::Call | BranchKind::IndirectCall => stack.push(branch.from),
            BranchKind::Syscall | BranchKind::Interrupt if branch.to != 0 => stack.push(branch.from),
            BranchKind::Return | BranchKind::FarReturn => {
                stack.pop(branch.to);
                stack.depth()
            }
            _ => stack.depth(),
        }
    }

    /// How deep in calls thread `tid` is.
    #[must_use]
    pub fn depth(&self, tid: Option<u32>) -> usize {
        tid.and_then(|tid| self.threads.get(&tid)).map_or(0, Stack::depth)
    }

    /// What the thread did is not known any more.
    pub fn lost(&mut self, tid: Option<u32>) {
        match tid {
            Some(tid) => {
                self.threads.remove(&tid);
            }
            None => self.threads.clear(),
        }
    }

    /// The addresses of the calls that thread `tid` is in, innermost first.
    pub fn calls(&self, tid: Option<u32>) -> impl Iterator<Item = u64> + '_ {
        tid.and_then(|tid| self.threads.get(&tid)).into_iter().flat_map(|stack| stack.calls.iter().rev().copied())
    }

    fn stack(&mut self, tid: Option<u32>) -> Option<&mut Stack> {
        let tid = tid?;
        if self.threads.len() >= MAX_THREADS && !self.threads.contains_key(&tid) {
            return None;
        }
        Some(self.threads.entry(tid).or_default())
    }
}

impl Stack {
    fn depth(&self) -> usize {
        self.calls.len() + self.dropped
    }

    fn push(&mut self, call: u64) -> usize {
        let depth = self.depth();
        if self.calls.len() >= MAX_DEPTH {
            let half = MAX_DEPTH / 2;
            self.calls.drain(..half);
            self.dropped += half;
        }
        self.calls.push(call);
        depth
    }

    /// A return to `to` ends the call before it, and all that were made inside of that one (a `longjmp`). One that no
    /// call led to ends none: a jump by `ret`, or the caller is from before the trace.
    fn pop(&mut self, to: u64) {
        let fits = |&call: &u64| to.wrapping_sub(call) <= MAX_INSTRUCTION;
        if let Some(at) = self.calls.iter().rposition(fits) {
            self.calls.truncate(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn go(stacks: &mut Stacks, from: u64, to: u64, kind: BranchKind) -> usize {
        stacks.branch(Some(1), &Branch::new(from, to, kind))
    }

    fn calls(stacks: &Stacks) -> Vec<u64> {
        stacks.calls(Some(1)).collect()
    }

    #[test]
    fn a_call_and_its_return_are_equally_deep() {
        let mut stacks = Stacks::default();
        assert_eq!(go(&mut stacks, 0x100, 0x200, BranchKind::Call), 0);
        assert_eq!(go(&mut stacks, 0x210, 0x300, BranchKind::IndirectCall), 1);
        assert_eq!(calls(&stacks), [0x210, 0x100]);
        assert_eq!(go(&mut stacks, 0x310, 0x212, BranchKind::Return), 1);
        assert_eq!(go(&mut stacks, 0x220, 0x105, BranchKind::Return), 0);
        assert!(calls(&stacks).is_empty());
    }

    #[test]
    fn what_leaves_several_calls_at_once_is_followed_and_jumps_by_ret_are_not() {
        let mut stacks = Stacks::default();
        for from in [0x100, 0x200, 0x300] {
            go(&mut stacks, from, from + 0x100, BranchKind::Call);
        }
        assert_eq!(go(&mut stacks, 0x410, 0x9000, BranchKind::Return), 3);
        assert_eq!(go(&mut stacks, 0x9010, 0x105, BranchKind::Return), 0);
        assert_eq!(go(&mut stacks, 0x110, 0x5000, BranchKind::Return), 0);
    }

    #[test]
    fn deep_recursion_is_bounded_and_losses_forget() {
        let mut stacks = Stacks::default();
        for _ in 0..3 * MAX_DEPTH {
            go(&mut stacks, 0x100, 0x90, BranchKind::Call);
        }
        assert!(calls(&stacks).len() <= MAX_DEPTH);
        assert_eq!(go(&mut stacks, 0x100, 0x90, BranchKind::Call), 3 * MAX_DEPTH);
        stacks.lost(Some(1));
        assert!(calls(&stacks).is_empty());
    }
}
