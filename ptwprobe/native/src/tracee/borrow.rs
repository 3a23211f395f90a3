//! Taking one thread of a target for a moment, while all others run on.
//!
//! Preferred is a thread that runs the program's own code; next, one in a call that starts again as if nothing had been.
//! A process that is not attached is not attached for this either: only that thread is traced.

use std::fs;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::owner::{open_memory, Owner, Proc, State};
use super::procfs::{self, Status};
use super::{sys, Error, Result};

/// How long to look for a thread that comes to a stop.
const LIMIT: Duration = Duration::from_millis(300);
/// How long a thread is waited for before one more is asked; one that runs may have to wait for a CPU itself.
const PATIENCE: Duration = Duration::from_millis(2);
/// Same where only this thread will do.
pub(super) const LONG_PATIENCE: Duration = Duration::from_millis(100);
/// So many threads are asked what they do before the best of them is taken.
const MOST_ASKED: usize = 256;
/// Running threads that are enough to choose from.
const ENOUGH: usize = 4;
const USER_CODE_SEGMENT: u64 = 0x33;

/// Calls that the kernel starts again, with what is left of their time, after a stop (signal(7)).
const RESTARTED: &[i64] = &[
    libc::SYS_futex,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_select,
    libc::SYS_pselect6,
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_pause,
    libc::SYS_rt_sigsuspend,
];
/// Of the costs below: a thread that stands by job control, or does not react to anything.
const LAST: u32 = 4;

/// How much a stop would mean to a thread now, 0 for one that runs; None where there is no such thread, or it is none of
/// the program's own.
fn cost(tid: i32) -> Option<u32> {
    if procfs::is_kernels_worker(tid) {
        return None;
    }
    // proc_pid_syscall(5)
    let call = fs::read_to_string(format!("/proc/{tid}/syscall")).ok()?;
    let mut words = call.split_whitespace();
    let number = match words.next()? {
        "running" => return Some(0),
        number => number.parse::<i64>().ok()?,
    };
    match procfs::run_state(tid)? {
        'S' if RESTARTED.contains(&number) => Some(1),
        'S' | 'R' if !super::calls::may_return_eintr(number) => Some(2),
        'S' | 'R' => Some(3),
        'Z' | 'X' => None,
        _ => Some(LAST),
    }
}

/// The threads of a process, the best to borrow first.
fn candidates(pid: i32) -> Result<Vec<i32>> {
    let mut ranked = Vec::new();
    let mut running = 0;
    for tid in procfs::tasks(pid)?.into_iter().take(MOST_ASKED) {
        let Some(cost) = cost(tid) else { continue };
        ranked.push((cost, tid));
        running += usize::from(cost == 0);
        if running >= ENOUGH {
            break;
        }
    }
    ranked.sort_unstable();
    Ok(ranked.into_iter().map(|(_, tid)| tid).collect())
}

impl Owner {
    /// Run `work` with one thread of `pid`, whose tid it is told, in an event-stop; it runs on afterwards. Where the
    /// process stands still already, one of its threads is taken.
    pub(super) fn with_one<T>(&mut self, pid: i32, work: impl FnOnce(&mut Owner, i32) -> Result<T>) -> Result<T> {
        if self.procs.get(&pid).is_some_and(Proc::stands) {
            let tid = self.pick(pid)?;
            return work(self, tid);
        }
        let partial = !self.procs.contains_key(&pid);
        if partial {
            self.may_trace(pid)?;
        }
        self.prepare_calls(pid);
        let done = self.take_one(pid, partial).and_then(|tid| work(self, tid));
        self.give_threads_back(pid, partial);
        done
    }

    /// Run `work` with this thread of `pid` in an event-stop. None where it is gone; "busy" where it does not stop within
    /// `patience`.
    pub(super) fn with_thread<T>(
        &mut self,
        pid: i32,
        tid: i32,
        patience: Duration,
        work: impl FnOnce(&mut Owner) -> Result<T>,
    ) -> Result<Option<T>> {
        let partial = !self.procs.contains_key(&pid);
        self.prepare_calls(pid);
        let asked = self.ask_to_stop(pid, tid, partial);
        let taken = asked.and_then(|asked| if asked { self.wait_for_one(pid, patience) } else { Ok(None) });
        let done = match taken {
            Ok(Some(_)) => work(self).map(Some),
            Ok(None) if Status::read(tid).is_none_or(|s| s.is_dead() || s.tgid != pid) => Ok(None),
            Ok(None) => Err(Error::new("busy", format!("thread {tid} of process {pid} does not stop"))),
            Err(e) => Err(e),
        };
        self.give_threads_back(pid, partial);
        done
    }

    /// Whether `pid` is a process that can be traced, as far as can be seen before.
    fn may_trace(&self, pid: i32) -> Result<()> {
        let status = Status::read(pid).ok_or_else(|| Error::gone(pid))?;
        if status.tgid != pid {
            return Err(Error::new("gone", format!("{pid} is a thread of process {}", status.tgid)));
        }
        if let Some(other) = self.tids.get(&pid) {
            let why = format!("process {pid} shares the memory of process {other}, which is traced");
            return Err(Error::new("busy", why));
        }
        Ok(())
    }

    /// The first thread that stops, of those that are asked in turn.
    fn take_one(&mut self, pid: i32, partial: bool) -> Result<i32> {
        let deadline = Instant::now() + LIMIT;
        while Instant::now() < deadline {
            let candidates = candidates(pid)?;
            if candidates.is_empty() && Status::read(pid).is_none_or(|s| s.is_dead()) {
                return Err(Error::gone(pid));
            }
            for tid in candidates {
                if self.ask_to_stop(pid, tid, partial)? {
                    if let Some(tid) = self.wait_for_one(pid, PATIENCE)? {
                        return Ok(tid);
                    }
                }
                if Instant::now() >= deadline {
                    break;
                }
            }
        }
        if Status::read(pid).is_none_or(|s| s.is_dead()) {
            return Err(Error::gone(pid));
        }
        let limit = LIMIT.as_millis();
        Err(Error::new("busy", format!("no thread of process {pid} stopped within {limit} ms")))
    }

    /// Send a thread to an event-stop. False where there is no such thread.
    fn ask_to_stop(&mut self, pid: i32, tid: i32, partial: bool) -> Result<bool> {
        let known = self.procs.get(&pid).is_some_and(|p| p.threads.contains_key(&tid));
        if partial && !known && !self.trace_one(pid, tid)? {
            return Ok(false);
        }
        let thread = self.procs.get_mut(&pid).and_then(|p| p.threads.get_mut(&tid));
        let Some(thread) = thread.filter(|t| !t.sibling && t.state != State::Dead) else {
            return Ok(false);
        };
        thread.wanted = true;
        if thread.state == State::Running {
            self.note_sleep(tid);
        }
        let thread = self.procs.get_mut(&pid).and_then(|p| p.threads.get_mut(&tid));
        if let Some(thread) = thread.filter(|t| t.state == State::Running) {
            thread.interrupted = sys::interrupt(tid).is_ok();
        }
        Ok(true)
    }

    /// One of the threads that were asked to stop, once it stands. None: all are gone, or `patience` is at an end.
    fn wait_for_one(&mut self, pid: i32, patience: Duration) -> Result<Option<i32>> {
        let deadline = Instant::now() + patience;
        let generation = self.proc(pid)?.generation;
        let tid = loop {
            let Some(proc) = self.procs.get(&pid) else {
                return Ok(None);
            };
            if proc.generation != generation {
                return Err(Error::new("gone", format!("process {pid} executes another program")));
            }
            let mut wanted = proc.threads.iter().filter(|(_, t)| t.wanted);
            if let Some((tid, _)) = wanted.clone().find(|(_, t)| t.is_stopped()) {
                break *tid;
            }
            if wanted.next().is_none() {
                return Ok(None);
            }
            match self.next_report(deadline) {
                Some((tid, status)) => self.dispatch(tid, status),
                None => return Ok(None),
            }
        };
        let proc = self.proc(pid)?;
        if proc.threads.get(&tid).is_none_or(|t| t.regs.cs != USER_CODE_SEGMENT) {
            return Err(Error::new("unsupported", format!("process {pid} is not in 64-bit code")));
        }
        if proc.mem.is_none() {
            proc.mem = Some(open_memory(tid)?);
        }
        self.is_same_program(pid)?;
        Ok(Some(tid))
    }

    /// Trace `tid`, and nobody else, of a process that is not attached. False where it is gone.
    fn trace_one(&mut self, pid: i32, tid: i32) -> Result<bool> {
        let adopted = self.leaving.remove(&tid);
        if !adopted {
            if let Err(errno) = sys::seize_alone(tid) {
                return match Status::read(tid) {
                    None => Ok(false),
                    Some(status) if status.tracer == self.me => Ok(false),
                    Some(status) if status.is_dead() => Ok(false),
                    Some(status) => Err(super::attach::explain(pid, &status, errno)),
                };
            }
        }
        if Status::read(tid).is_none_or(|s| s.tgid != pid) {
            // Gone, and the number is somebody else's now.
            self.let_go(tid, State::Running);
            return Ok(false);
        }
        let proc = self.procs.entry(pid).or_insert_with(Proc::new);
        proc.partial = true;
        self.add_thread(pid, tid);
        if adopted {
            self.proc(pid)?.adopt(tid);
        }
        Ok(true)
    }

    /// All borrowed threads, also those that did not come to a stop, are the program's own again.
    fn give_threads_back(&mut self, pid: i32, partial: bool) {
        self.areas.remove(&pid);
        let Some(proc) = self.procs.get_mut(&pid) else {
            return;
        };
        let wanted =
            proc.threads.iter_mut().filter_map(|(tid, t)| std::mem::take(&mut t.wanted).then_some((*tid, t.state)));
        let wanted: Vec<(i32, State)> = wanted.collect();
        if !partial {
            for (tid, state) in wanted {
                if matches!(state, State::Stopped { .. }) {
                    self.start(pid, tid);
                }
            }
            return;
        }
        if let Some(proc) = self.procs.remove(&pid) {
            if let Some(memory) = proc.mem {
                self.programs.entry(pid).or_insert(memory);
            }
            for (tid, thread) in proc.threads {
                self.let_go(tid, thread.state);
            }
        }
    }

    /// Raises "gone" where the program into which we mapped has been replaced since. Its memory must be open.
    pub(super) fn is_same_program(&self, pid: i32) -> Result<()> {
        let (Some(memory), Some(mapped)) = (self.programs.get(&pid), self.mapped.get(&pid)) else {
            return Ok(());
        };
        match mapped.first() {
            Some(addr) if !sys::has_memory(memory.as_fd(), addr) => {
                Err(Error::new("gone", format!("process {pid} executes another program")))
            }
            _ => Ok(()),
        }
    }
}
