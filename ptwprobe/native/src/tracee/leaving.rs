//! Leaving a target: the code is as it was, and what we mapped goes once no thread can come back to it.

use std::time::{Duration, Instant};

use super::owner::{Owner, State};
use super::plan::Site;
use super::procfs::{self, bit, Status};
use super::remote::{Arg, Borrowed, Call, Lost};
use super::scan::{Ranges, Scanner};
use super::{sys, Error, Result};

/// Far more instructions than a stub has.
const MOST_STEPS: usize = 1000;
/// Signals of the instruction itself. They must not be blocked while one is stepped: the kernel resets the handler of a
/// blocked one.
const FAULTS: [i32; 5] = [libc::SIGTRAP, libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL];
/// How often, and with what time between, the owner tries on its own when the recorder has died.
const ATTEMPTS: u32 = 20;
const BETWEEN_ATTEMPTS: Duration = Duration::from_millis(20);
/// How the names of our mappings begin in /proc/PID/maps.
const OUR_NAMES: [&str; 2] = ["/memfd:ptwprobe-", "/memfd:[uprobes-ptwrite]"];

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

    /// Whether the process still has it: it may run another program by now.
    fn is_there(&self, pid: i32) -> bool {
        let maps = procfs::maps(pid).unwrap_or_default();
        let ours = maps.iter().filter(|m| OUR_NAMES.iter().any(|name| m.name.starts_with(name)));
        ours.into_iter().any(|m| self.all().any(|(addr, _)| *addr == m.start))
    }
}

impl Owner {
    /// Remember what a target has of ours now, so that it goes even when the recorder dies.
    pub fn set_mapped(&mut self, pid: i32, mapped: Mapped) {
        if mapped == Mapped::default() {
            self.mapped.remove(&pid);
        } else {
            self.mapped.insert(pid, mapped);
        }
    }

    /// Unmap all that `set_mapped` told, unless a thread is in a stub or has a frame that leads into one: the tids of
    /// those. The caller has taken the patches out.
    pub fn unmap(&mut self, pid: i32) -> Result<Vec<i32>> {
        let Some(mapped) = self.mapped.get(&pid).cloned() else { return Ok(Vec::new()) };
        let ranges = Ranges::new(mapped.stubs.iter().map(|(addr, len)| (*addr, addr + len)).collect());
        let munmap = |(addr, len): &(u64, u64)| Call::new(libc::SYS_munmap, &[Arg::Value(*addr), Arg::Value(*len)]);
        let calls: Vec<Call> = mapped.all().map(munmap).collect();
        self.attached(pid, |owner| {
            let mut scanner = Scanner::new(pid)?;
            owner.stop_all(pid)?;
            owner.step_out(pid, &ranges)?;
            let inside = owner.standing_in(pid, &ranges, &mut scanner)?;
            if inside.is_empty() && mapped.is_there(pid) {
                let results = owner.remote_stopped(pid, &calls, &mut [])?;
                if let Some(failed) = results.last().filter(|r| **r < 0) {
                    return Err(Error::os(pid, "unmapping in the memory", -*failed as i32));
                }
            }
            if inside.is_empty() {
                owner.mapped.remove(&pid);
            }
            Ok(inside)
        })
    }

    /// The recorder died: take the patches of a target out, and what else it has of ours.
    pub(super) fn take_out(&mut self, pid: i32) {
        let sites: Vec<Site> = self.installed.get(&pid).cloned().unwrap_or_default();
        // A target that is gone, runs another program or is patched by somebody else is left as it is; one place that
        // cannot be restored (its library was unloaded, say) is not to keep the others.
        let mut out = self.apply(pid, &sites, false).is_ok();
        if !out {
            let mut alone = |site| match self.apply(pid, std::slice::from_ref(site), false) {
                Ok(_) => true,
                Err(e) => e.kind == "unmapped",
            };
            out = sites.iter().map(&mut alone).filter(|done| !done).count() == 0;
        }
        if out {
            for _ in 0..ATTEMPTS {
                match self.unmap(pid) {
                    Ok(inside) if !inside.is_empty() => self.serve_until(Instant::now() + BETWEEN_ATTEMPTS),
                    _ => break,
                }
            }
        }
    }

    /// Threads in a job-control stop do not come out of a stub by themselves: they are stepped to its end.
    fn step_out(&mut self, pid: i32, ranges: &Ranges) -> Result<()> {
        let proc = self.proc(pid)?;
        let near_load = |rip| proc.watch.as_ref().is_some_and(|w| w.is_near_load(rip));
        let inside = proc.threads.iter().filter(|(_, t)| {
            t.state == State::Stopped { group: true } && ranges.contains(t.regs.rip) && !near_load(t.regs.rip)
        });
        for tid in inside.map(|(tid, _)| *tid).collect::<Vec<_>>() {
            if let Err(Lost(status)) = self.step_thread_out(pid, tid, ranges) {
                self.on_exit(tid, status);
            }
        }
        Ok(())
    }

    fn step_thread_out(&mut self, pid: i32, tid: i32, ranges: &Ranges) -> std::result::Result<(), Lost> {
        let trap = bit(libc::SIGTRAP);
        let clear = Status::read(tid).is_some_and(|s| (s.ignored | s.pending) & trap == 0);
        let (Ok(saved), Ok(mask), true) = (sys::get_regs(tid), sys::get_sigmask(tid), clear) else {
            return Ok(());
        };
        // As everywhere: where the thread is dying calls fail, and its end is reported to the waits.
        let _ = sys::set_sigmask(tid, !FAULTS.iter().fold(0, |all, signal| all | bit(*signal)));
        let mut stepped = Borrowed { tid, saved, mask, syscall_addr: 0 };
        for _ in 0..MOST_STEPS {
            let mut code = [0u8; 2];
            let read = self.read_memory(pid, stepped.saved.rip, &mut code);
            // `pushf` would store the flag that steps.
            let pushes_flags = matches!(code, [0x9c, _] | [0x66, 0x9c]);
            if !ranges.contains(stepped.saved.rip) || read.is_err() || pushes_flags {
                break;
            }
            let _ = sys::single_step(tid);
            match stepped.wait()? {
                (0, libc::SIGTRAP) | (libc::PTRACE_EVENT_STOP, _) => {}
                // A displaced instruction of the program faults; it does so again, and is told, when the program runs.
                _ => break,
            }
            match sys::get_regs(tid) {
                Ok(regs) => stepped.saved = regs,
                Err(_) => break,
            }
        }
        let group = stepped.give_back()?;
        self.given_back(pid, &stepped, group);
        Ok(())
    }
}
