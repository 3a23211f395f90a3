//! The table of tracees and the one place where their stops are answered.
//!
//! Whatever way a thread stops, while its process is to stand still it is sent on to an *event-stop* (PTRACE_INTERRUPT,
//! then resume): signals are delivered, calls finished. There the kernel is in its signal path, before any user code,
//! and still does its restart of interrupted calls when the thread goes on.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Instant;

use super::faults::Watch;
use super::gate::Gates;
use super::plan::Site;
use super::procfs::Status;
use super::spawn::{Event, EventKind, Halt, Shared};
use super::{sys, Error, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Running,
    /// In an event-stop; `group` says that it is the program's own job-control stop.
    Stopped {
        group: bool,
    },
    /// A leader that ended before its threads.
    Dead,
}

#[derive(Debug, Clone)]
pub struct Thread {
    pub state: State,
    /// Valid while stopped.
    pub regs: sys::Regs,
    /// We asked for the stop that comes next, so that an interrupted call is our doing.
    pub interrupted: bool,
    /// The thread went through a job-control stop, which interrupts calls by itself.
    pub was_group_stopped: bool,
    /// The signal mask when the watch began (or the thread was first seen stopped).
    pub mask: Option<u64>,
}

impl Thread {
    pub fn running() -> Self {
        let state = State::Running;
        Thread { state, regs: sys::NO_REGS, interrupted: false, was_group_stopped: false, mask: None }
    }

    pub fn is_stopped(&self) -> bool {
        matches!(self.state, State::Stopped { .. })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Goal {
    Run,
    Stop,
}

/// A traced process.
pub struct Proc {
    pub threads: BTreeMap<i32, Thread>,
    /// How many threads are in `State::Running`.
    pub running: usize,
    pub goal: Goal,
    /// All tasks are known; new ones are reported by the kernel.
    pub complete: bool,
    /// Stop at the calls that change mappings.
    pub stepping: bool,
    /// Stands still until `resume` or the next `next_mapping_event`.
    pub held: bool,
    /// To be told once everything stands.
    pub announce: Option<Halt>,
    /// Counts the programs this process has run.
    pub generation: u32,
    /// Of the program that runs now; None where it may not be opened.
    pub mem: Option<File>,
    /// Address of a `syscall` instruction, 0 when not looked for yet.
    pub syscall_addr: u64,
    pub watch: Option<Watch>,
}

impl Proc {
    pub fn new() -> Proc {
        Proc {
            threads: BTreeMap::new(),
            running: 0,
            goal: Goal::Run,
            complete: false,
            stepping: false,
            held: false,
            announce: None,
            generation: 0,
            mem: None,
            syscall_addr: 0,
            watch: None,
        }
    }

    pub fn memory(&self, pid: i32) -> Result<BorrowedFd<'_>> {
        let none = || Error::new("not-permitted", format!("the memory of process {pid} cannot be opened"));
        self.mem.as_ref().map(AsFd::as_fd).ok_or_else(none)
    }

    pub fn set_state(&mut self, tid: i32, state: State) {
        if let Some(thread) = self.threads.get_mut(&tid) {
            let was = thread.state == State::Running;
            thread.state = state;
            self.running = self.running + usize::from(state == State::Running) - usize::from(was);
        }
    }

    pub fn add(&mut self, tid: i32) {
        if self.threads.insert(tid, Thread::running()).is_none() {
            self.running += 1;
        }
    }

    pub fn remove(&mut self, tid: i32) {
        if self.threads.remove(&tid).is_some_and(|t| t.state == State::Running) {
            self.running -= 1;
        }
    }
}

pub fn open_memory(pid: i32) -> Result<File> {
    let opened = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"));
    opened.map_err(|e| match e.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => Error::gone(pid),
        Some(libc::EACCES | libc::EPERM) => {
            Error::new("not-permitted", format!("cannot open the memory of {pid}: {e}"))
        }
        _ => Error::new("failed", format!("cannot open the memory of process {pid}: {e}")),
    })
}

/// Everything the tracing task knows. Its methods are spread over the files of this folder by subject.
pub struct Owner {
    pub(super) procs: HashMap<i32, Proc>,
    /// tid → pid of every traced thread.
    pub(super) tids: HashMap<i32, i32>,
    /// Threads to let go at their next stop.
    pub(super) leaving: HashSet<i32>,
    pub(super) launched: HashSet<i32>,
    pub(super) statuses: HashMap<i32, i32>,
    /// What undoes the changes that are in place, by pid.
    pub(super) installed: HashMap<i32, Vec<Site>>,
    pub(super) gates: Gates,
    pub(super) shared: Arc<Shared>,
    pub(super) original_mask: libc::sigset_t,
    pub(super) me: i32,
    ending: bool,
}

impl Owner {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Owner {
            procs: HashMap::new(),
            tids: HashMap::new(),
            leaving: HashSet::new(),
            launched: HashSet::new(),
            statuses: HashMap::new(),
            installed: HashMap::new(),
            gates: Gates::default(),
            shared,
            // SAFETY: plain integers, for which zero (no signal) is a value.
            original_mask: unsafe { std::mem::zeroed() },
            me: 0,
            ending: false,
        }
    }

    pub(super) fn begin(&mut self, me: i32) {
        self.me = me;
        self.shared.owner_pid.store(me, Ordering::Release);
    }

    pub(super) fn end(&mut self) {
        self.ending = true;
    }

    pub(super) fn is_ending(&self) -> bool {
        self.ending
    }

    /// The end, by wish or because the recorder died: gates closed, patches out, everything let go.
    pub(super) fn finish(&mut self) {
        self.gates.close_all();
        for (pid, sites) in std::mem::take(&mut self.installed) {
            // A target that is gone, runs another program or is patched by somebody else is left as it is.
            let _ = self.apply(pid, &sites, false);
        }
        for pid in self.procs.keys().copied().collect::<Vec<_>>() {
            let _ = self.detach(pid);
        }
    }

    pub(super) fn proc(&mut self, pid: i32) -> Result<&mut Proc> {
        self.procs.get_mut(&pid).ok_or_else(|| Error::gone(pid))
    }

    /// The next report of any tracee; None once `deadline` has passed.
    pub(super) fn next_report(&mut self, deadline: Instant) -> Option<(i32, i32)> {
        loop {
            if let Some(report) = sys::wait_any() {
                return Some(report);
            }
            if !sys::sleep_until(Some(deadline)) {
                return None;
            }
        }
    }

    /// Answer reports until `deadline`.
    pub(super) fn serve_until(&mut self, deadline: Instant) {
        while let Some((tid, status)) = self.next_report(deadline) {
            self.dispatch(tid, status);
        }
    }

    pub(super) fn dispatch(&mut self, tid: i32, status: i32) {
        if !libc::WIFSTOPPED(status) {
            return self.on_exit(tid, status);
        }
        let signal = libc::WSTOPSIG(status);
        let event = status >> 16;
        if self.leaving.contains(&tid) {
            return self.release_leaving(tid, event, signal);
        }
        let Some(pid) = self.owner_of(tid) else {
            // A new process that a target made by clone: not ours to follow.
            let _ = sys::detach(tid, if event == 0 { signal } else { 0 });
            return;
        };
        match event {
            libc::PTRACE_EVENT_STOP => self.on_event_stop(pid, tid, signal),
            libc::PTRACE_EVENT_CLONE => {
                if let Ok(child) = sys::event_message(tid) {
                    self.on_clone(pid, tid, child as i32);
                }
                self.send_on(pid, tid, 0);
            }
            libc::PTRACE_EVENT_EXEC => self.on_exec(pid, tid),
            0 if signal == libc::SIGTRAP | 0x80 => self.on_syscall_stop(pid, tid),
            0 => {
                let signal = self.on_signal(pid, tid, signal);
                if let Some(signal) = signal {
                    self.send_on(pid, tid, signal);
                }
            }
            _ => self.send_on(pid, tid, 0),
        }
    }

    /// The process that a stopped thread belongs to; a task that nobody announced yet is looked up.
    fn owner_of(&mut self, tid: i32) -> Option<i32> {
        if let Some(pid) = self.tids.get(&tid) {
            return Some(*pid);
        }
        let tgid = Status::read(tid)?.tgid;
        let pid = if self.procs.contains_key(&tgid) {
            tgid
        } else {
            // Not a thread, but in the same memory: it has to stand still with the others.
            self.procs.keys().copied().find(|pid| sys::shares_memory(*pid, tid))?
        };
        self.add_thread(pid, tid);
        Some(pid)
    }

    pub(super) fn add_thread(&mut self, pid: i32, tid: i32) {
        if let Some(proc) = self.procs.get_mut(&pid) {
            if !proc.threads.contains_key(&tid) {
                proc.add(tid);
                self.tids.insert(tid, pid);
            }
        }
    }

    fn on_clone(&mut self, pid: i32, tid: i32, child: i32) {
        // The child may have stopped, or even died, before its parent told us. A stranger's first stop sorts it out.
        if Status::read(child).is_some_and(|s| s.tgid == pid) {
            self.add_thread(pid, child);
            self.shared.push(Event { kind: EventKind::Clone, pid, tid, value: child.into() });
        }
    }

    fn on_event_stop(&mut self, pid: i32, tid: i32, signal: i32) {
        let group = signal != libc::SIGTRAP;
        let Ok(mut regs) = sys::get_regs(tid) else {
            return;
        };
        let Some(proc) = self.procs.get_mut(&pid) else {
            return;
        };
        let Some(thread) = proc.threads.get_mut(&tid) else {
            return;
        };
        if !group && thread.interrupted && !thread.was_group_stopped {
            super::stop::rewind(tid, &mut regs);
        }
        thread.regs = regs;
        thread.interrupted = false;
        thread.was_group_stopped = group;
        if thread.mask.is_none() && proc.watch.is_some() {
            thread.mask = sys::get_sigmask(tid).ok();
        }
        proc.set_state(tid, State::Stopped { group });
        if proc.goal == Goal::Run {
            self.start(pid, tid);
        } else {
            self.announce_if_still(pid);
        }
    }

    /// Let a thread that is in an event-stop run (or stay in its job-control stop).
    pub(super) fn start(&mut self, pid: i32, tid: i32) {
        let Some(proc) = self.procs.get_mut(&pid) else {
            return;
        };
        let stepping = proc.stepping;
        let Some(State::Stopped { group }) = proc.threads.get(&tid).map(|t| t.state) else {
            return;
        };
        proc.set_state(tid, State::Running);
        // A thread that dies meanwhile reports its exit.
        let _ = match (group, stepping) {
            (true, _) => sys::listen(tid),
            (false, true) => sys::cont_syscall(tid, 0),
            (false, false) => sys::cont(tid, 0),
        };
    }

    /// Resume a thread from a stop that is no event-stop; towards one where its process is to stand still.
    pub(super) fn send_on(&mut self, pid: i32, tid: i32, signal: i32) {
        let Some(proc) = self.procs.get_mut(&pid) else {
            return;
        };
        let stop = proc.goal == Goal::Stop;
        let stepping = proc.stepping;
        if let Some(thread) = proc.threads.get_mut(&tid) {
            if stop {
                thread.interrupted = sys::interrupt(tid).is_ok();
            }
        }
        // As above: death is reported.
        let _ = if stepping && !stop { sys::cont_syscall(tid, signal) } else { sys::cont(tid, signal) };
    }

    /// What to deliver for a signal-delivery-stop; None where the thread was taken care of.
    fn on_signal(&mut self, pid: i32, tid: i32, signal: i32) -> Option<i32> {
        if matches!(signal, libc::SIGSEGV | libc::SIGBUS) && self.procs.get(&pid).is_some_and(|p| p.watch.is_some()) {
            if let Some(fixed) = self.fix_fault(pid, tid, signal) {
                return fixed;
            }
        }
        // Tracing alone makes an ignored signal wake its thread; the call it was in must not show that.
        if let Ok(mut regs) = sys::get_regs(tid) {
            if super::stop::returns_eintr(&regs) && Status::read(tid).is_some_and(|s| s.ignores(signal)) {
                super::stop::rewind(tid, &mut regs);
            }
        }
        Some(signal)
    }

    fn on_exec(&mut self, pid: i32, tid: i32) {
        self.tids.retain(|_, owner| *owner != pid);
        self.tids.insert(pid, pid);
        self.installed.remove(&pid);
        let memory = open_memory(pid);
        let Some(proc) = self.procs.get_mut(&pid) else {
            return;
        };
        proc.threads.clear();
        proc.running = 0;
        proc.add(pid);
        proc.generation += 1;
        proc.syscall_addr = 0;
        proc.watch = None;
        proc.mem = memory.ok();
        if proc.stepping {
            proc.goal = Goal::Stop;
            proc.announce = Some(Halt::Exec);
        }
        self.shared.push(Event { kind: EventKind::Exec, pid, tid, value: 0 });
        self.send_on(pid, pid, 0);
    }

    pub(super) fn on_exit(&mut self, tid: i32, status: i32) {
        self.leaving.remove(&tid);
        let was_launched = self.launched.remove(&tid);
        if was_launched {
            self.statuses.insert(tid, status);
        }
        let pid = self.tids.remove(&tid);
        let mut ended = was_launched;
        if let Some(pid) = pid {
            if let Some(proc) = self.procs.get_mut(&pid) {
                proc.remove(tid);
                if tid == pid || proc.threads.is_empty() {
                    self.procs.remove(&pid);
                    self.tids.retain(|_, owner| *owner != pid);
                    self.installed.remove(&pid);
                    ended = true;
                } else {
                    self.announce_if_still(pid);
                }
            }
        }
        if ended {
            let pid = pid.unwrap_or(tid);
            self.shared.push(Event { kind: EventKind::Exit, pid, tid, value: status.into() });
            self.shared.set_halt(pid, Some(Halt::Exit));
        }
    }

    pub(super) fn announce_if_still(&mut self, pid: i32) {
        let Some(proc) = self.procs.get_mut(&pid) else {
            return;
        };
        if proc.running == 0 {
            if let Some(halt) = proc.announce.take() {
                proc.held = true;
                self.shared.set_halt(pid, Some(halt));
            }
        }
    }

    pub(super) fn read_memory(&self, pid: i32, addr: u64, buf: &mut [u8]) -> Result<()> {
        let proc = self.procs.get(&pid).ok_or_else(|| Error::gone(pid))?;
        sys::read_at(proc.memory(pid)?, addr, buf).map_err(|e| Error::os(pid, "reading the memory", e).at(addr))
    }

    pub(super) fn write_memory(&self, pid: i32, addr: u64, bytes: &[u8]) -> Result<()> {
        let proc = self.procs.get(&pid).ok_or_else(|| Error::gone(pid))?;
        sys::write_at(proc.memory(pid)?, addr, bytes).map_err(|e| Error::os(pid, "writing the memory", e).at(addr))
    }
}
