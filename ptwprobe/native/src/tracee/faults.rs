//! Faults of our stubs' loads: the thread goes on at the fix-up, and the program never learns of the signal.

use std::time::Duration;

use super::owner::Owner;
use super::procfs::{bit, Status};
use super::remote::{Arg, Call};
use super::{sys, Error, Result};

/// Code before a load in which a thread has passed the gate already.
const GATE_TO_LOAD: u64 = 256;
const SIGNALS: [i32; 2] = [libc::SIGSEGV, libc::SIGBUS];
/// `struct kernel_sigaction`: handler, flags, restorer, mask.
const SIGACTION: usize = 32;

/// An instruction that loads through a pointer, [start, end), and where to go on after a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    pub start: u64,
    pub end: u64,
    pub fixup: u64,
}

/// What is known of a process whose loads are watched.
pub struct Watch {
    /// Sorted by `start`.
    loads: Vec<Load>,
    /// What the program does on SIGSEGV and SIGBUS, as it was when the watch began.
    actions: [[u8; SIGACTION]; 2],
}

impl Watch {
    fn fixup(&self, rip: u64) -> Option<u64> {
        let before = self.loads.partition_point(|l| l.start <= rip).checked_sub(1)?;
        self.loads.get(before).filter(|l| rip < l.end).map(|l| l.fixup)
    }

    pub fn is_near_load(&self, rip: u64) -> bool {
        let next = self.loads.partition_point(|l| l.end <= rip);
        self.loads.get(next).is_some_and(|l| rip.saturating_add(GATE_TO_LOAD) >= l.start)
    }
}

impl Owner {
    /// Keep `pid` attached and running, and fix faults of `loads` from now on (they replace those of an earlier call).
    pub fn watch(&mut self, pid: i32, mut loads: Vec<Load>) -> Result<()> {
        loads.sort_unstable_by_key(|l| l.start);
        if let Some(watch) = self.procs.get_mut(&pid).and_then(|p| p.watch.as_mut()) {
            watch.loads = loads;
            return Ok(());
        }
        self.attach(pid)?;
        let done = self.begin_watch(pid, loads);
        self.go(pid);
        done
    }

    fn begin_watch(&mut self, pid: i32, loads: Vec<Load>) -> Result<()> {
        let mut scratch = [0u8; 2 * SIGACTION];
        let ask = |(i, signal): (usize, &i32)| {
            let at = Arg::Scratch((i * SIGACTION) as u64);
            Call::new(libc::SYS_rt_sigaction, &[Arg::Value(*signal as u64), Arg::Value(0), at, Arg::Value(8)])
        };
        let calls: Vec<Call> = SIGNALS.iter().enumerate().map(ask).collect();
        self.remote(pid, &calls, &mut scratch)?;
        let mut actions = [[0u8; SIGACTION]; 2];
        actions.as_flattened_mut().copy_from_slice(&scratch);
        self.stop(pid)?;
        let proc = self.proc(pid)?;
        for (tid, thread) in &mut proc.threads {
            thread.mask = sys::get_sigmask(*tid).ok();
        }
        proc.watch = Some(Watch { loads, actions });
        Ok(())
    }

    /// Answer a fault signal. None: not one of our loads. Some(None): the thread was dealt with completely.
    /// Some(Some(signal)): send it on with that signal.
    pub(super) fn fix_fault(&mut self, pid: i32, tid: i32, signal: i32) -> Option<Option<i32>> {
        // A signal that somebody sent has a code of 0 or less (sigaction(2)) and is the program's.
        if sys::signal_code(tid).ok()? <= 0 {
            return None;
        }
        let mut regs = sys::get_regs(tid).ok()?;
        regs.rip = self.procs.get(&pid)?.watch.as_ref()?.fixup(regs.rip)?;
        // A thread that refuses its registers is dying.
        let _ = sys::set_regs(tid, &regs);
        // The kernel resets a fault signal that was ignored or blocked; one that still has a handler is untouched.
        let status = Status::read(tid)?;
        if (status.caught | status.ignored) & bit(signal) != 0 {
            return Some(Some(0));
        }
        match self.restore_action(pid, tid, signal) {
            Ok(true) => Some(None),
            Ok(false) => Some(Some(0)),
            // Gone; or, in the middle of dying, nothing that could be repaired.
            Err(_) => Some(Some(0)),
        }
    }

    /// Give the program back what it had for a signal. False where there was nothing to restore.
    fn restore_action(&mut self, pid: i32, tid: i32, signal: i32) -> Result<bool> {
        let proc = self.procs.get_mut(&pid).ok_or_else(|| Error::gone(pid))?;
        let slot = usize::from(signal == libc::SIGBUS);
        let action = proc.watch.as_ref().and_then(|w| w.actions.get(slot)).copied().unwrap_or_default();
        let blocked = proc.threads.get(&tid).and_then(|t| t.mask).filter(|mask| mask & bit(signal) != 0);
        let default = action.iter().take(8).all(|b| *b == 0);
        if let Some(mask) = blocked {
            sys::set_sigmask(tid, mask).map_err(|e| Error::os(pid, "restoring a signal mask", e))?;
        }
        if default {
            return Ok(false);
        }
        let number = Arg::Value(signal as u64);
        let set = Call::new(libc::SYS_rt_sigaction, &[number, Arg::Scratch(0), Arg::Value(0), Arg::Value(8)]);
        let mut scratch = action;
        self.remote_on(pid, tid, &[set], &mut scratch)?;
        if self.proc(pid)?.has_to_stop(tid) {
            self.announce_if_still(pid);
        } else {
            self.start(pid, tid);
        }
        Ok(true)
    }

    /// Answer reports for a while: what a caller does between closing a gate and letting go.
    pub fn linger(&mut self, time: Duration) {
        self.serve_until(std::time::Instant::now() + time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixups_by_address() {
        let loads = vec![Load { start: 0x1000, end: 0x1004, fixup: 1 }, Load { start: 0x2000, end: 0x2003, fixup: 2 }];
        let watch = Watch { loads, actions: Default::default() };
        assert_eq!(
            [0xfff, 0x1000, 0x1003, 0x1004, 0x2002].map(|a| watch.fixup(a)),
            [None, Some(1), Some(1), None, Some(2)]
        );
        assert!(watch.is_near_load(0xfff) && watch.is_near_load(0x1f80) && watch.is_near_load(0x2002));
        assert!(!watch.is_near_load(0x2003) && !watch.is_near_load(0x1800));
    }
}
