//! One change of a target's code: a finished plan, checked and written while all threads stand still, or not at all.
//!
//! Order: all old bytes are as planned; no thread, restart point or signal frame is inside a window, or the thread can be
//! moved exactly; threads are moved; code is switched by the page (`pages`), and every site that is in no such page is
//! written by one write; everything is read back. What is large is made before the target stands: plan, calls, buffers.

use std::time::{Duration, Instant};

use super::owner::{Owner, Thread};
use super::pages::{did_not_take, Exchanges, Switch};
use super::scan::{Ranges, Scanner, Words};
use super::standing::{Standing, Terms};
use super::{copies, sys, Error, Result};
use crate::clock::monotonic_ns;

const ATTEMPTS: u32 = 20;
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(1);
const LONGEST_WRITE: usize = 32;
const PAGE: u64 = 4096;

/// One place that changes: `old` becomes `new` at `addr`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    pub addr: u64,
    pub old: Vec<u8>,
    pub new: Vec<u8>,
    /// Length of the displaced instructions; no thread may be strictly inside while the change is made.
    pub window_len: u64,
    /// (offset in the window, address of the copy) of each displaced instruction.
    pub moves: Vec<(u64, u64)>,
}

/// All that is changed at once, or not at all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Change {
    /// Those in a range of `switches` change with it, the others are written.
    pub sites: Vec<Site>,
    pub switches: Vec<Switch>,
    /// What somebody else has written into a copy of ours, by address: written into the file's pages when they are back.
    pub carried: Vec<(u64, Vec<u8>)>,
}

impl Site {
    fn inverse(&self) -> Site {
        Site { old: self.new.clone(), new: self.old.clone(), moves: Vec::new(), ..self.clone() }
    }

    fn is_inside(&self, addr: u64) -> bool {
        addr > self.addr && addr - self.addr < self.window_len
    }

    /// Whether an instruction behind the first is displaced: where the first one faults, the program's handler may skip
    /// it and go on there.
    fn may_be_left_inside(&self) -> bool {
        self.moves.len() > 1
    }

    fn check(&self) -> Result<()> {
        let invalid =
            |why: &str| Err(Error::new("invalid", format!("change at {:#x}: {why}", self.addr)).at(self.addr));
        if self.old.len() != self.new.len() || self.new.is_empty() || self.new.len() > LONGEST_WRITE {
            return invalid("old and new bytes do not match in length, or are too many");
        }
        Ok(())
    }

    fn check_write(&self) -> Result<()> {
        if self.addr % PAGE + self.new.len() as u64 > PAGE {
            let why = format!("change at {:#x}: the bytes lie in two pages, so the write could tear", self.addr);
            return Err(Error::new("invalid", why).at(self.addr));
        }
        Ok(())
    }
}

/// Why the change cannot be made now.
#[derive(Clone, Copy)]
enum Obstacle {
    Thread { tid: i32, rip: u64 },
    RestartPoint { tid: i32, rip: u64 },
    Stack { tid: i32, addr: u64, word: u64 },
}

impl Obstacle {
    fn error(self, pid: i32) -> Error {
        let (what, addr) = match self {
            Obstacle::Thread { tid, rip } => (format!("thread {tid} stays at {rip:#x}, inside the window"), rip),
            Obstacle::RestartPoint { tid, rip } => {
                (format!("thread {tid} is in a system call that starts again inside the window, before {rip:#x}"), rip)
            }
            Obstacle::Stack { tid, addr, word } => {
                (format!("the stack of thread {tid} holds {word:#x}, inside the window, at {addr:#x}"), word)
            }
        };
        Error::new("busy", format!("process {pid}: {what}")).at(addr)
    }
}

/// A site whose bytes are not what the plan says.
struct Mismatch {
    addr: u64,
    found: [u8; LONGEST_WRITE],
}

struct Plan<'a> {
    /// Sorted by address; windows do not overlap.
    sites: Vec<&'a Site>,
    /// Those that are compared one by one: not in an exchanged page, or in one whose content is not.
    compared: Vec<&'a Site>,
    /// Those that no exchange changes.
    written: Vec<&'a Site>,
    exchanges: Exchanges,
    windows: Ranges,
    words: Words,
    scanner: Scanner,
    moves: Vec<(i32, u64)>,
}

impl<'a> Plan<'a> {
    fn new(pid: i32, change: &'a Change, terms: &Terms) -> Result<Self> {
        let words = if terms.all_words { Words::All } else { Words::SignalFrames };
        let mut sorted: Vec<&Site> = change.sites.iter().collect();
        sorted.sort_unstable_by_key(|s| s.addr);
        for (i, site) in sorted.iter().enumerate() {
            site.check()?;
            if sorted.get(i + 1).is_some_and(|next| next.addr - site.addr < site.window_len.max(site.new.len() as u64))
            {
                return Err(Error::new("invalid", "two changes overlap").at(site.addr));
            }
        }
        let frames_only = words == Words::SignalFrames;
        let start = |s: &Site| s.addr + u64::from(!(frames_only && s.may_be_left_inside()));
        let windows = Ranges::new(sorted.iter().map(|s| (start(s), s.addr + s.window_len)).collect());
        let exchanges = Exchanges::new(change, &sorted)?;
        let compared = sorted.iter().copied().filter(|s| !exchanges.verify_site(s)).collect();
        let written: Vec<&Site> = sorted.iter().copied().filter(|s| !exchanges.hold(s)).collect();
        written.iter().try_for_each(|site| site.check_write())?;
        let scanner = Scanner::new(pid)?;
        Ok(Plan { sites: sorted, compared, written, exchanges, windows, words, scanner, moves: Vec::new() })
    }

    fn site_around(&self, addr: u64) -> Option<&'a Site> {
        let before = self.sites.partition_point(|s| s.addr < addr).checked_sub(1)?;
        self.sites.get(before).copied().filter(|s| s.is_inside(addr))
    }

    /// Collect the moves that make all windows free.
    fn clear(&mut self, threads: &std::collections::BTreeMap<i32, Thread>) -> std::result::Result<(), Obstacle> {
        self.moves.clear();
        for (&tid, thread) in threads.iter().filter(|(_, t)| t.is_stopped()) {
            let rip = thread.regs.rip;
            let in_call = thread.regs.orig_rax as i64 >= 0;
            if in_call && (self.site_around(rip.wrapping_sub(2)).is_some() || self.site_around(rip).is_some()) {
                return Err(Obstacle::RestartPoint { tid, rip });
            }
            if let Some(site) = self.site_around(rip) {
                let copy = site.moves.iter().find(|(offset, _)| site.addr + offset == rip);
                let Some((_, copy)) = copy.filter(|_| self.moves.len() < self.moves.capacity()) else {
                    return Err(Obstacle::Thread { tid, rip });
                };
                self.moves.push((tid, *copy));
            }
            let may_be_skipped = |s: &Site| s.addr == rip && s.may_be_left_inside();
            if self.sites.iter().any(|s| may_be_skipped(s)) && copies::has_fault_due(tid) {
                return Err(Obstacle::Thread { tid, rip });
            }
            if let Some((addr, word)) = self.scanner.find(tid, thread.regs.rsp, &self.windows, self.words) {
                return Err(Obstacle::Stack { tid, addr, word });
            }
        }
        Ok(())
    }
}

impl Owner {
    /// Make the change; returns the ns that the target stood still for it.
    pub fn apply(&mut self, pid: i32, change: &Change, terms: &Terms) -> Result<u64> {
        let mut plan = Plan::new(pid, change, terms)?;
        let mut standing = self.prepare_standing(pid, &plan.sites, terms)?;
        let stopped_at = self.attached(pid, |owner| {
            let stopped_at = owner.make_change(pid, &mut plan, &mut standing)?;
            if terms.release {
                owner.detach(pid)?;
            }
            Ok(stopped_at)
        });
        self.areas.remove(&pid);
        let stopped_at = stopped_at?;
        let stood = stopped_at.elapsed();
        self.remember_copies(pid, &change.sites);
        self.note_exchanges(pid, &plan.exchanges);
        let installed = self.installed.entry(pid).or_default();
        for site in &change.sites {
            // Back to what it was, or one more.
            if installed.get(&site.addr).is_some_and(|i| i.new == site.new) {
                installed.remove(&site.addr);
            } else {
                installed.insert(site.addr, site.inverse());
            }
        }
        Ok(u64::try_from(stood.as_nanos()).unwrap_or(u64::MAX))
    }

    /// Take over the changes that somebody else made: `sites` undo them, and are made when we end or die. `switched`:
    /// (address aside, start, length) of the ranges of pages among them.
    pub fn adopt(&mut self, pid: i32, sites: Vec<Site>, switched: &[(u64, u64, u64)]) {
        self.installed.insert(pid, sites.into_iter().map(|site| (site.addr, site)).collect());
        self.switched.insert(pid, switched.iter().map(|(aside, start, len)| (*aside, (*start, *len))).collect());
    }

    /// Leaves the target standing where the change was made; returns when it came to a stand.
    fn make_change(&mut self, pid: i32, plan: &mut Plan<'_>, standing: &mut Standing) -> Result<Instant> {
        let mut obstacle = None;
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                self.go(pid);
                self.serve_until(Instant::now() + BETWEEN_ATTEMPTS);
            }
            plan.moves.reserve(self.proc(pid)?.threads.len() + 64);
            let begun = Instant::now();
            self.stop_all(pid)?;
            self.check_standing(pid, standing)?;
            self.verify(pid, plan)?;
            match plan.clear(&self.proc(pid)?.threads) {
                Ok(()) => {
                    self.write(pid, plan)?;
                    self.changed_ns = monotonic_ns();
                    return self.look_standing(pid, standing).map(|()| begun);
                }
                Err(found) => obstacle = Some(found),
            }
        }
        Err(obstacle.map_or_else(|| Error::gone(pid), |o| o.error(pid)))
    }

    /// Whether everything is as planned.
    fn verify(&self, pid: i32, plan: &mut Plan<'_>) -> Result<()> {
        if let Err(mismatch) = self.compare(pid, &plan.compared, |site| &site.old)? {
            return Err(foreign(pid, plan, &mismatch));
        }
        let Err(addr) = self.verify_pages(pid, &mut plan.exchanges)? else { return Ok(()) };
        if let Err(mismatch) = self.compare(pid, &plan.sites, |site| &site.old)? {
            return Err(foreign(pid, plan, &mismatch));
        }
        Err(Error::new("changed", format!("process {pid}: the code at {addr:#x} is not what it was")).at(addr))
    }

    fn compare(
        &self,
        pid: i32,
        sites: &[&Site],
        bytes: impl Fn(&Site) -> &[u8],
    ) -> Result<std::result::Result<(), Mismatch>> {
        for site in sites {
            let mut found = [0u8; LONGEST_WRITE];
            let want = bytes(site);
            if let Some(got) = found.get_mut(..want.len()) {
                self.read_memory(pid, site.addr, got)?;
                if got != want {
                    return Ok(Err(Mismatch { addr: site.addr, found }));
                }
            }
        }
        Ok(Ok(()))
    }

    fn write(&mut self, pid: i32, plan: &mut Plan<'_>) -> Result<()> {
        let proc = self.proc(pid)?;
        // Where the change fails after all, threads stay in the copies: those lead back to the code by themselves.
        for (tid, rip) in &plan.moves {
            if let Some(thread) = proc.threads.get_mut(tid) {
                let back = thread.regs.rip;
                thread.regs.rip = *rip;
                if let Err(errno) = sys::set_regs(*tid, &thread.regs) {
                    // Only a dying thread refuses; it will never run in either place.
                    thread.regs.rip = back;
                    if errno != libc::ESRCH {
                        return Err(Error::os(pid, "moving a thread", errno));
                    }
                }
            }
        }
        self.exchange_pages(pid, &mut plan.exchanges)?;
        let written = self.write_sites(pid, plan);
        if written.is_err() {
            self.undo_exchange(pid, &plan.exchanges);
        }
        written
    }

    fn write_sites(&mut self, pid: i32, plan: &Plan<'_>) -> Result<()> {
        let proc = self.proc(pid)?;
        for (written, site) in plan.written.iter().enumerate() {
            if let Err(errno) = sys::write_at(proc.memory(pid)?, site.addr, &site.new) {
                for done in plan.written.iter().take(written) {
                    // The page was writable a moment ago; where it no longer is, the process is dying.
                    let _ = sys::write_at(proc.memory(pid)?, done.addr, &done.old);
                }
                return Err(Error::os(pid, "writing the code", errno).at(site.addr));
            }
        }
        match self.compare(pid, &plan.written, |site| &site.new)? {
            Ok(()) => Ok(()),
            Err(mismatch) => {
                for site in &plan.written {
                    self.write_memory(pid, site.addr, &site.old)?;
                }
                Err(Error::new("failed", did_not_take(pid)).at(mismatch.addr))
            }
        }
    }
}

fn foreign(pid: i32, plan: &Plan<'_>, mismatch: &Mismatch) -> Error {
    let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>().join(" ");
    let site = plan.sites.iter().find(|s| s.addr == mismatch.addr);
    let (want, len) = site.map_or((String::new(), 0), |s| (hex(&s.old), s.old.len()));
    let found = hex(mismatch.found.get(..len).unwrap_or_default());
    let addr = mismatch.addr;
    Error::new("foreign-probe", format!("process {pid} has {found} at {addr:#x} where {want} is expected")).at(addr)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(addr: u64, len: u64) -> Site {
        Site { addr, old: vec![0x90; 5], new: vec![0xe9; 5], window_len: len, moves: vec![(1, 0x9000)] }
    }

    #[test]
    fn windows_are_strict_and_found_by_address() {
        let pid = std::process::id() as i32;
        let change = Change { sites: vec![site(0x2000, 7), site(0x1000, 5)], ..Change::default() };
        let plan = Plan::new(pid, &change, &Terms::default()).expect("valid");
        assert!(plan.site_around(0x1000).is_none() && plan.site_around(0x1005).is_none());
        assert_eq!(plan.site_around(0x1004).map(|s| s.addr), Some(0x1000));
        assert_eq!(plan.site_around(0x2006).map(|s| s.addr), Some(0x2000));
    }

    #[test]
    fn refuses_what_could_tear_or_overlaps() {
        let pid = std::process::id() as i32;
        let kind = |sites: &[Site]| {
            let change = Change { sites: sites.to_vec(), ..Change::default() };
            Plan::new(pid, &change, &Terms::default()).err().map(|e| e.kind)
        };
        assert_eq!(kind(&[site(0x1ffc, 5)]), Some("invalid"));
        assert_eq!(kind(&[site(0x1000, 9), site(0x1008, 5)]), Some("invalid"));
        assert_eq!(kind(&[site(0x1000, 8), site(0x1008, 5)]), None);
    }
}
