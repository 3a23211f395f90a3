//! Leaving a target: the code is as it was, and what we mapped goes once no thread can come back to it.

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::borrow::LONG_PATIENCE;
use super::owner::{open_memory, Owner, State};
use super::pages::{Exchange, Switch};
use super::plan::{Change, Site};
use super::procfs;
use super::remote::{wait_for_stop, Arg, Call};
use super::scan::{Ranges, Scanner};
use super::standing::Terms;
use super::{sys, Error, Result};

/// How long, and how often, a thread in a job-control stop is let run out of a stub.
const RUN: Duration = Duration::from_micros(3);
const MOST_RUNS: u32 = 100;
/// How often, and with what time between, the owner tries on its own when the recorder has died.
const ATTEMPTS: u32 = 20;
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(20);
/// How the names of our mappings begin in /proc/PID/maps.
const OUR_NAMES: [&str; 2] = ["/memfd:ptwprobe-", "/memfd:[uprobes-ptwrite]"];

const RING_NAME: &str = "/memfd:ptwprobe-ring";

/// The descriptors of a process that lead to a memfd with a name of ours.
fn files_of_ours(pid: i32) -> Vec<u64> {
    let names = procfs::names(&format!("/proc/{pid}/fd")).unwrap_or_default();
    let is_ours = |name: &String| {
        std::fs::read_link(format!("/proc/{pid}/fd/{name}")).is_ok_and(|link| {
            let link = link.to_string_lossy();
            OUR_NAMES.iter().any(|ours| link.starts_with(ours))
        })
    };
    names.into_iter().filter(is_ours).filter_map(|name| name.parse().ok()).collect()
}

/// What a target has of ours, as (address, length).
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Mapped {
    /// Code, which threads may be in.
    pub stubs: Vec<(u64, u64)>,
    /// Data, which only the stubs refer to.
    pub data: Vec<(u64, u64)>,
}

impl Mapped {
    fn all(&self) -> impl Iterator<Item = &(u64, u64)> {
        self.stubs.iter().chain(&self.data)
    }

    /// What goes in one call each, and so at once whenever we die: a page without a name is known, by whoever comes
    /// later, from a neighbour that has one.
    fn pieces(&self) -> Vec<(u64, u64)> {
        let mut all: Vec<(u64, u64)> = self.all().copied().collect();
        all.sort_unstable();
        all.dedup_by(|next, before| {
            let joins = before.0 + before.1 == next.0;
            before.1 += if joins { next.1 } else { 0 };
            joins
        });
        all
    }

    pub fn ranges(&self) -> Ranges {
        Ranges::new(self.stubs.iter().map(|(addr, len)| (*addr, addr + len)).collect())
    }

    /// An address at which it has something.
    pub fn first(&self) -> Option<u64> {
        self.all().next().map(|(addr, _)| *addr)
    }

    /// Whether the process still has it: it may run another program by now.
    pub(super) fn is_there(&self, pid: i32) -> bool {
        let maps = procfs::maps(pid).unwrap_or_default();
        let ours = maps.iter().filter(|m| OUR_NAMES.iter().any(|name| m.name.starts_with(name)));
        ours.into_iter().any(|m| self.all().any(|(addr, _)| *addr == m.start))
    }
}

impl Owner {
    /// Remember what a target has of ours now, so that it goes even when the recorder dies. `fresh`: it was mapped just now,
    /// so that nobody can be in there before a patch is in.
    pub fn set_mapped(&mut self, pid: i32, mapped: Mapped, fresh: bool) {
        self.noted.remove(&pid);
        if mapped == Mapped::default() {
            self.mapped.remove(&pid);
            self.inside.remove(&pid);
            self.programs.remove(&pid);
            self.gadgets.remove(&pid);
            self.copies.remove(&pid);
        } else {
            let unpatched = self.installed.get(&pid).is_none_or(BTreeMap::is_empty);
            let known = !self.mapped.contains_key(&pid) || self.inside.contains_key(&pid);
            self.mapped.insert(pid, mapped);
            if fresh && unpatched && known {
                self.inside.entry(pid).or_default();
            } else {
                self.inside.remove(&pid);
            }
        }
    }

    /// What calls in the target have mapped, up to the next `set_mapped`: the recorder may die before it can tell.
    pub(super) fn note_mapped(&mut self, pid: i32, calls: &[Call], results: &[i64]) {
        for (call, result) in calls.iter().zip(results) {
            let [addr, Arg::Value(len), Arg::Value(prot), Arg::Value(flags), ..] = call.args else { continue };
            let worked = !(-4095..0).contains(result);
            // Over what was mapped before, or not at a place of its own.
            let fixed = flags & libc::MAP_FIXED as u64 != 0;
            if call.number == libc::SYS_mmap && worked && !fixed {
                let noted = self.noted.entry(pid).or_default();
                let is_code = prot & libc::PROT_EXEC as u64 != 0;
                let list = if is_code { &mut noted.stubs } else { &mut noted.data };
                list.push((*result as u64, len));
            } else if let (libc::SYS_munmap, Arg::Value(addr), true) = (call.number, addr, worked) {
                if let Some(noted) = self.noted.get_mut(&pid) {
                    noted.stubs.retain(|(start, _)| *start != addr);
                    noted.data.retain(|(start, _)| *start != addr);
                }
            }
        }
    }

    /// The recorder died: what was noted is all that will ever be told of it.
    pub(super) fn take_over_noted(&mut self) {
        for (pid, noted) in self.noted.drain() {
            let mapped = self.mapped.entry(pid).or_default();
            mapped.stubs.extend(noted.stubs);
            mapped.data.extend(noted.data);
            self.inside.remove(&pid);
        }
    }

    /// Unmap all that `set_mapped` told, unless a thread is in a stub or has a frame that leads into one: the tids of
    /// those. The caller has taken the patches out, so that who is outside stays there: only those that were inside when
    /// the last patch came out are looked at again, one by one.
    pub fn unmap(&mut self, pid: i32) -> Result<Vec<i32>> {
        let Some(mapped) = self.mapped.get(&pid).cloned() else { return Ok(Vec::new()) };
        let ranges = mapped.ranges();
        // Tasks that only share the memory are not stopped one by one.
        let own = |tid: &i32| procfs::Status::read(*tid).is_none_or(|s| s.tgid == pid);
        let inside = match self.inside.get(&pid).filter(|known| known.iter().all(own)).cloned() {
            Some(known) => self.still_inside(pid, known, &ranges)?,
            None => self.attached(pid, |owner| {
                let mut scanner = Scanner::new(pid)?;
                owner.stop_all(pid)?;
                owner.look_inside(pid, &ranges, &mut scanner)
            })?,
        };
        self.inside.insert(pid, inside.clone());
        if !inside.is_empty() {
            return Ok(inside);
        }
        let munmap = |(addr, len): &(u64, u64)| Call::new(libc::SYS_munmap, &[Arg::Value(*addr), Arg::Value(*len)]);
        let calls: Vec<Call> = mapped.pieces().iter().map(munmap).collect();
        self.with_one(pid, |owner, tid| {
            if !mapped.is_there(tid) {
                return Ok(());
            }
            let results = owner.remote_on(pid, tid, &calls, &mut [])?;
            match results.last().filter(|r| **r < 0) {
                Some(failed) => Err(Error::os(pid, "unmapping in the memory", -*failed as i32)),
                None => Ok(()),
            }
        })?;
        self.mapped.remove(&pid);
        self.inside.remove(&pid);
        self.copies.remove(&pid);
        Ok(inside)
    }

    /// Close the files that a call of ours has opened in the target and that the call for closing them did not reach:
    /// how many. Those of a process that records others are its own.
    pub fn close_files(&mut self, pid: i32) -> Result<usize> {
        if procfs::maps(pid)?.iter().any(|m| m.name.starts_with(RING_NAME)) || files_of_ours(pid).is_empty() {
            return Ok(0);
        }
        self.attached(pid, |owner| {
            // The program may close and open files itself: what is open is looked at while it stands.
            owner.stop_all(pid)?;
            let close = |fd: &u64| Call::new(libc::SYS_close, &[Arg::Value(*fd)]);
            let calls: Vec<Call> = files_of_ours(pid).iter().map(close).collect();
            owner.remote_stopped(pid, &calls, &mut []).map(|results| results.len())
        })
    }

    /// With everything at a stand and no patch in: who is in a stub, or will return into one.
    pub(super) fn look_inside(&mut self, pid: i32, ranges: &Ranges, scanner: &mut Scanner) -> Result<Vec<i32>> {
        let proc = self.proc(pid)?;
        let standing = proc.threads.iter().filter(|(_, t)| t.state == State::Stopped { group: true });
        for tid in standing.map(|(tid, _)| *tid).collect::<Vec<_>>() {
            self.run_out(pid, tid, ranges);
        }
        self.standing_in(pid, ranges, scanner)
    }

    fn still_inside(&mut self, pid: i32, known: Vec<i32>, ranges: &Ranges) -> Result<Vec<i32>> {
        let mut inside = Vec::new();
        for tid in known {
            let look = |owner: &mut Owner| {
                let mut scanner = Scanner::new(tid)?;
                owner.run_out(pid, tid, ranges);
                Ok(owner.stands_in(pid, tid, ranges, &mut scanner))
            };
            match self.with_thread(pid, tid, LONG_PATIENCE, look) {
                Ok(Some(false) | None) => {}
                Ok(Some(true)) => inside.push(tid),
                Err(e) if e.kind == "busy" => inside.push(tid),
                Err(e) => return Err(e),
            }
        }
        Ok(inside)
    }

    /// The recorder died: take the patches of a target out, and what else it has of ours.
    pub(super) fn take_out(&mut self, pid: i32) {
        // As with all of this: a target that cannot be had is left as it is.
        if self.try_often(|owner| owner.restore(pid).map(|()| true)).is_err() {
            return;
        }
        let _ = self.try_often(|owner| owner.unmap(pid).map(|inside| inside.is_empty()));
        let _ = self.close_files(pid);
    }

    /// Do `work` until it is done (true), or fails for another reason than that the target is busy.
    fn try_often(&mut self, mut work: impl FnMut(&mut Owner) -> Result<bool>) -> Result<bool> {
        let mut done = work(self);
        for _ in 1..ATTEMPTS {
            match &done {
                Ok(true) => break,
                Err(e) if e.kind != "busy" => break,
                _ => self.serve_until(Instant::now() + BETWEEN_ATTEMPTS),
            }
            done = work(self);
        }
        done
    }

    /// A target that is gone, runs another program or is patched by somebody else is left as it is; one place that cannot
    /// be restored (its library was unloaded, say) is not to keep the others.
    fn restore(&mut self, pid: i32) -> Result<()> {
        let parts = self.parts_to_undo(pid);
        let all = Change {
            sites: parts.iter().flat_map(|part| part.sites.clone()).collect(),
            switches: parts.iter().flat_map(|part| part.switches.clone()).collect(),
            carried: Vec::new(),
        };
        if parts.is_empty() {
            return Ok(());
        }
        match self.apply(pid, &all, &Terms::default()) {
            Ok(_) => return Ok(()),
            Err(e) if e.kind == "busy" => return Err(e),
            Err(_) => {}
        }
        let mut done = Ok(());
        for part in self.parts_to_undo(pid) {
            match self.apply(pid, &part, &Terms::default()) {
                Err(e) if e.kind != "unmapped" => done = Err(e),
                _ => {}
            }
        }
        done
    }

    /// What is still changed: every switched range with its sites, and every site that was written.
    fn parts_to_undo(&self, pid: i32) -> Vec<Change> {
        let memory = open_memory(pid).ok();
        // Bytes that are as they were, or not there, are those of an object that was unloaded, and perhaps loaded again.
        let is_changed = |site: &Site| {
            let mut found = vec![0; site.new.len()];
            let read = memory.as_ref().is_some_and(|m| sys::read_at(m.as_fd(), site.addr, &mut found).is_ok());
            read && found != site.new
        };
        let sites = self.installed.get(&pid).into_iter().flat_map(|sites| sites.values());
        let mut sites: Vec<Site> = sites.filter(|s| is_changed(s)).cloned().collect();
        let mut parts = Vec::new();
        for (aside, (start, len)) in self.switched.get(&pid).into_iter().flatten() {
            let (aside, start, len) = (*aside, *start, *len);
            let mut switch =
                Switch { start, len, content: Vec::new(), exchange: Exchange::Restore { aside, scratch: None } };
            let (inside, others) = sites.into_iter().partition(|site| switch.holds(site));
            sites = others;
            if Vec::is_empty(&inside) {
                switch.exchange = Exchange::Abandon { aside };
            }
            parts.push(Change { sites: inside, switches: vec![switch], carried: Vec::new() });
        }
        parts.extend(sites.into_iter().map(|site| Change { sites: vec![site], ..Change::default() }));
        parts
    }

    /// A thread in a job-control stop does not come out of a stub by itself. It is let run, without system calls, for the
    /// microseconds that it needs: stepping it would end in its death if ours came first (the trap becomes a signal).
    fn run_out(&mut self, pid: i32, tid: i32, ranges: &Ranges) {
        for _ in 0..MOST_RUNS {
            let Some(proc) = self.procs.get_mut(&pid) else { return };
            let near_load = |rip| proc.watch.as_ref().is_some_and(|w| w.is_near_load(rip));
            let standing = proc.threads.get(&tid).filter(|t| t.state == State::Stopped { group: true });
            let Some(rip) = standing.map(|t| t.regs.rip).filter(|rip| ranges.contains(*rip)) else { return };
            if near_load(rip) {
                return;
            }
            proc.set_state(tid, State::Running);
            let begun = Instant::now();
            // As everywhere: where the thread is dying calls fail, and its end is reported to the waits.
            let _ = sys::cont_syscall(tid, 0);
            while begun.elapsed() < RUN {
                std::hint::spin_loop();
            }
            let _ = sys::interrupt(tid);
            while self.procs.get(&pid).and_then(|p| p.threads.get(&tid)).is_some_and(|t| t.state == State::Running) {
                match wait_for_stop(tid) {
                    Ok((0, signal)) if signal == libc::SIGTRAP | 0x80 => skip_call(tid),
                    Ok((event, signal)) => self.dispatch(tid, event << 16 | signal << 8 | 0x7f),
                    Err(lost) => self.on_lost(pid, tid, &lost),
                }
            }
        }
    }
}

/// Have a thread that is about to enter a call stop before it instead.
fn skip_call(tid: i32) {
    if let Ok(mut regs) = sys::get_regs(tid) {
        regs.rax = regs.orig_rax;
        regs.rip = regs.rip.wrapping_sub(2);
        regs.orig_rax = u64::MAX;
        let _ = sys::set_regs(tid, &regs);
    }
    let _ = sys::interrupt(tid);
    let _ = sys::cont(tid, 0);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_go_in_one_call() {
        let mapped = Mapped { stubs: vec![(0x9000, 0x1000)], data: vec![(0x3000, 0x1000), (0x1000, 0x2000)] };
        assert_eq!(mapped.pieces(), [(0x1000, 0x3000), (0x9000, 0x1000)]);
    }
}
