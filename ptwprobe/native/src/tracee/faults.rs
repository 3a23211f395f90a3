//! Faults of our stubs' loads: the thread goes on at the fix-up, and the program never learns of the signal.

use super::dispositions::{Dispositions, SIGNALS};
use super::owner::Owner;
use super::{sys, Result};

/// Code before a load in which a thread has passed the gate already.
const GATE_TO_LOAD: u64 = 256;

/// An instruction that loads through a pointer, [start, end), and where to go on after a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    pub start: u64,
    pub end: u64,
    pub fixup: u64,
}

/// Sorted by `start`.
#[derive(Debug, Default)]
struct Loads(Vec<Load>);

impl Loads {
    fn new(mut loads: Vec<Load>) -> Loads {
        loads.sort_unstable_by_key(|l| l.start);
        Loads(loads)
    }

    fn fixup(&self, rip: u64) -> Option<u64> {
        let before = self.0.partition_point(|l| l.start <= rip).checked_sub(1)?;
        self.0.get(before).filter(|l| rip < l.end).map(|l| l.fixup)
    }

    fn is_near(&self, rip: u64) -> bool {
        let next = self.0.partition_point(|l| l.end <= rip);
        self.0.get(next).is_some_and(|l| rip.saturating_add(GATE_TO_LOAD) >= l.start)
    }
}

/// What is known of a process whose loads are watched.
pub struct Watch {
    loads: Loads,
    pub(super) dispositions: Dispositions,
}

impl Watch {
    /// A thread that stands there may be about to report a fault, which has changed its mask already.
    pub fn is_load(&self, rip: u64) -> bool {
        self.loads.fixup(rip).is_some()
    }

    pub fn is_near_load(&self, rip: u64) -> bool {
        self.loads.is_near(rip)
    }
}

impl Owner {
    /// Keep `pid` attached and running, and fix faults of `loads` from now on (they replace those of an earlier call).
    pub fn watch(&mut self, pid: i32, loads: Vec<Load>) -> Result<()> {
        let loads = Loads::new(loads);
        if let Some(watch) = self.procs.get_mut(&pid).and_then(|p| p.watch.as_mut()) {
            watch.loads = loads;
            return Ok(());
        }
        self.attach(pid)?;
        let done = self.begin_watch(pid, loads);
        self.go(pid);
        done
    }

    fn begin_watch(&mut self, pid: i32, loads: Loads) -> Result<()> {
        let dispositions = self.learn_dispositions(pid)?;
        self.proc(pid)?.watch = Some(Watch { loads, dispositions });
        Ok(())
    }

    /// Answer a fault signal. None: not one of our loads. Some(None): the thread was dealt with completely.
    /// Some(Some(signal)): send it on with that signal.
    pub(super) fn fix_fault(&mut self, pid: i32, tid: i32, signal: i32) -> Option<Option<i32>> {
        if !SIGNALS.contains(&signal) {
            return None;
        }
        let watch = self.procs.get(&pid)?.watch.as_ref()?;
        let mut regs = sys::get_regs(tid).ok()?;
        regs.rip = watch.loads.fixup(regs.rip)?;
        // A signal that somebody sent is the program's.
        if !sys::signal_info(tid).ok()?.is_from_kernel() {
            return None;
        }
        // A thread that refuses its registers is dying.
        let _ = sys::set_regs(tid, &regs);
        match self.restore_action(pid, tid, signal) {
            Ok(true) => Some(None),
            Ok(false) => Some(Some(0)),
            // Gone; or, in the middle of dying, nothing that could be repaired.
            Err(_) => Some(Some(0)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixups_by_address() {
        let load = |start, end, fixup| Load { start, end, fixup };
        let loads = Loads::new(vec![load(0x2000, 0x2003, 2), load(0x1000, 0x1004, 1)]);
        let found = [0xfff, 0x1000, 0x1003, 0x1004, 0x2002].map(|a| loads.fixup(a));
        assert_eq!(found, [None, Some(1), Some(1), None, Some(2)]);
        assert!(loads.is_near(0xfff) && loads.is_near(0x1f80) && loads.is_near(0x2002));
        assert!(!loads.is_near(0x2003) && !loads.is_near(0x1800));
    }
}
