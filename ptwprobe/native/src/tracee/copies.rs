//! Faults of the program's own instructions, executed as copies in our stubs: the program is to see the original address.
//!
//! Before a handler runs, or a core is written, the thread is put to where the instruction was. A handler that returns
//! executes it again, or goes on behind it. Where the window has no other instruction, both are right. Else the program could
//! land inside the jump: there the signal is dropped, the thread waits (it is *parked*), the patch is taken out, and
//! then the thread executes the original, which raises the same signal again as if we had never been.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::owner::{Owner, State};
use super::plan::{Change, Site};
use super::procfs::{bit, Status};
use super::standing::Terms;
use super::sys;

/// Signals of an instruction itself that it raises again when it is executed again.
const FAULTS: [i32; 4] = [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL];
/// How long taking a patch out is tried. After that the signal is told as it is, at the copy's address.
const PATIENCE: Duration = Duration::from_secs(1);
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(5);

/// Where an instruction was before it was displaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Original {
    site: u64,
    offset: u64,
    /// The window has no other instruction, so that none begins inside the jump.
    alone: bool,
}

/// Address of a copy → its original. Kept as long as the stubs are mapped, whether the patch is in or not.
#[derive(Debug, Default)]
pub struct Copies(BTreeMap<u64, Original>);

impl Copies {
    fn add(&mut self, site: &Site) {
        for (offset, copy) in &site.moves {
            self.0.insert(*copy, Original { site: site.addr, offset: *offset, alone: site.moves.len() == 1 });
        }
    }
}

/// A thread that waits for a patch to be taken out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parked {
    pub pid: i32,
    pub tid: i32,
    since: Instant,
}

impl Owner {
    pub(super) fn remember_copies(&mut self, pid: i32, sites: &[Site]) {
        let copies = self.copies.entry(pid).or_default();
        sites.iter().for_each(|site| copies.add(site));
    }

    fn original(&self, pid: i32, rip: u64) -> Option<Original> {
        self.copies.get(&pid)?.0.get(&rip).copied()
    }

    fn is_installed(&self, pid: i32, site: u64) -> bool {
        self.installed.get(&pid).is_some_and(|sites| sites.contains_key(&site))
    }

    /// Same as the memory has it: a change that is being made is not in the table yet.
    fn is_patched(&self, pid: i32, site: u64) -> bool {
        let Some(undo) = self.installed.get(&pid).and_then(|sites| sites.get(&site)) else {
            return false;
        };
        let mut found = vec![0; undo.old.len()];
        self.read_memory(pid, site, &mut found).is_ok() && found == undo.old
    }

    /// Answer the signal of a displaced instruction. None: it is none. Some(None): the thread was dealt with completely.
    /// Some(Some(signal)): send it on with that signal.
    pub(super) fn show_original(&mut self, pid: i32, tid: i32, signal: i32) -> Option<Option<i32>> {
        let (original, regs, info) = self.fault_of_copy(pid, tid, signal)?;
        if !original.alone && self.is_installed(pid, original.site) {
            let proc = self.procs.get_mut(&pid)?;
            // A process that is attached for a moment only sees all other faults as they are.
            let stays = proc.watch.is_some();
            let thread = proc.threads.get_mut(&tid)?;
            if thread.told_as_is || !stays {
                return None;
            }
            thread.parked = true;
            self.send_on(pid, tid, 0);
            return Some(None);
        }
        move_back(tid, original, regs, info);
        Some(Some(signal))
    }

    /// Same for a thread that is being let go at this stop: nothing can be taken out for it any more.
    pub(super) fn show_original_to_leaving(&self, tid: i32, signal: i32) {
        let pid = Status::read(tid).map_or(0, |s| s.tgid);
        if let Some((original, regs, info)) = self.fault_of_copy(pid, tid, signal) {
            if original.alone || !self.is_installed(pid, original.site) {
                move_back(tid, original, regs, info);
            }
        }
    }

    fn fault_of_copy(&self, pid: i32, tid: i32, signal: i32) -> Option<(Original, sys::Regs, sys::SignalInfo)> {
        if !FAULTS.contains(&signal) || !self.copies.contains_key(&pid) {
            return None;
        }
        let regs = sys::get_regs(tid).ok()?;
        let original = self.original(pid, regs.rip)?;
        let info = sys::signal_info(tid).ok().filter(sys::SignalInfo::is_from_kernel)?;
        // Advice about bad memory somewhere, at whatever instruction.
        let advice = signal == libc::SIGBUS && info.code() == libc::BUS_MCEERR_AO;
        (!advice).then_some((original, regs, info))
    }

    /// A parked thread has come to its event-stop.
    pub(super) fn park(&mut self, pid: i32, tid: i32) {
        if !self.parked.iter().any(|p| p.tid == tid) {
            self.parked.push(Parked { pid, tid, since: Instant::now() });
        }
    }

    /// When to try again to take out what parked threads wait for.
    pub(super) fn parked_due(&self) -> Option<Instant> {
        (!self.parked.is_empty()).then(|| Instant::now() + BETWEEN_ATTEMPTS)
    }

    /// Take out what parked threads wait for, and let them run. Not from within a change: it makes changes itself.
    pub(super) fn answer_parked(&mut self) {
        for parked in std::mem::take(&mut self.parked) {
            self.answer(parked);
        }
    }

    /// Same for the threads of one process, which is about to be let go.
    pub(super) fn answer_parked_of(&mut self, pid: i32) -> bool {
        let (mine, others) = std::mem::take(&mut self.parked).into_iter().partition(|p| p.pid == pid);
        self.parked = others;
        let mine: Vec<Parked> = mine;
        let any = !mine.is_empty();
        mine.into_iter().for_each(|parked| self.answer(parked));
        any
    }

    fn answer(&mut self, parked: Parked) {
        let Parked { pid, tid, since } = parked;
        let Some(thread) = self.procs.get(&pid).and_then(|p| p.threads.get(&tid)).filter(|t| t.parked) else {
            return;
        };
        if !thread.is_stopped() {
            return;
        }
        let rip = thread.regs.rip;
        let original = self.original(pid, rip);
        if let Some(original) = original.filter(|o| self.is_patched(pid, o.site)) {
            match self.end_site(pid, original.site) {
                Ok(()) => {}
                Err(e) if e.kind == "busy" && since.elapsed() < PATIENCE => return self.parked.push(parked),
                Err(_) => return self.unpark(pid, tid, None),
            }
        }
        self.unpark(pid, tid, original.map(|o| o.site + o.offset));
    }

    /// Take the patch at `addr` out for good.
    fn end_site(&mut self, pid: i32, addr: u64) -> super::Result<()> {
        let site = self.installed.get(&pid).and_then(|sites| sites.get(&addr)).cloned();
        let Some(site) = site else { return Ok(()) };
        // Also where it is in a page of ours: the byte is written into that.
        let change = Change { sites: vec![site], ..Change::default() };
        self.apply(pid, &change, &Terms::default())?;
        self.ended.entry(pid).or_default().push(addr);
        Ok(())
    }

    /// Let a parked thread run: at `rip`, or (None) where it is, to be told its signal there.
    fn unpark(&mut self, pid: i32, tid: i32, rip: Option<u64>) {
        let Some(proc) = self.procs.get_mut(&pid) else { return };
        let Some(thread) = proc.threads.get_mut(&tid) else { return };
        thread.parked = false;
        thread.told_as_is = rip.is_none();
        if let Some(rip) = rip {
            thread.regs.rip = rip;
            // Only a dying thread refuses; it will never run in either place.
            let _ = sys::set_regs(tid, &thread.regs);
        }
        if matches!(thread.state, State::Stopped { .. }) && !proc.has_to_stop(tid) && !proc.held {
            self.start(pid, tid);
        }
    }

    /// Addresses of the patches that had to be taken out, once each.
    pub fn take_ended(&mut self, pid: i32) -> Vec<u64> {
        self.ended.remove(&pid).unwrap_or_default()
    }
}

/// Whether a signal of the instruction that the thread stands at is on its way.
pub fn has_fault_due(tid: i32) -> bool {
    let faults = FAULTS.iter().fold(0, |all, signal| all | bit(*signal));
    Status::read(tid).is_some_and(|s| s.pending & faults != 0)
}

/// Put a thread that is stopped for its fault to the original instruction; what the signal tells goes along.
fn move_back(tid: i32, original: Original, mut regs: sys::Regs, mut info: sys::SignalInfo) {
    let copy = regs.rip;
    regs.rip = original.site + original.offset;
    // Where these fail the thread is dying.
    let _ = sys::set_regs(tid, &regs);
    // The address of SIGFPE and SIGILL is the instruction's, that of the others is the data's.
    if info.addr() == copy {
        info.set_addr(regs.rip);
        let _ = sys::set_signal_info(tid, &info);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_lead_to_their_originals() {
        let site = |addr, moves| Site { addr, old: vec![0x90], new: vec![0xcc], window_len: 7, moves };
        let mut copies = Copies::default();
        copies.add(&site(0x1000, vec![(0, 0x9010), (3, 0x9013)]));
        copies.add(&site(0x2000, Vec::new()));
        copies.add(&site(0x3000, vec![(0, 0x9020)]));
        assert_eq!(copies.0.get(&0x9013), Some(&Original { site: 0x1000, offset: 3, alone: false }));
        assert_eq!(copies.0.get(&0x9020), Some(&Original { site: 0x3000, offset: 0, alone: true }));
        assert_eq!((copies.0.get(&0x9011), copies.0.len()), (None, 3));
    }
}
