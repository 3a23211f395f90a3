//! The table of tracees: what is known of every traced process and thread.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::Instant;

use super::calls::Reentry;
use super::copies::{Copies, Parked};
use super::faults::Watch;
use super::gadgets::Gadgets;
use super::gate::Gates;
use super::lazy::Lazy;
use super::leaving::Mapped;
use super::pages::Switched;
use super::plan::Site;
use super::procfs::{self, Mapping};
use super::spawn::{Halt, Shared};
use super::timeouts::Sleep;
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
    /// Which of the signals of faults the thread blocks, as far as was seen while loads are watched.
    pub blocked: u64,
    /// Waits in its event-stop for a patch to be taken out (`copies.rs`).
    pub parked: bool,
    /// That could not be done: its next fault in a stub is told at the stub's address.
    pub told_as_is: bool,
    /// No thread of the process, but it shares the memory.
    pub sibling: bool,
    /// To stand still whatever the others do.
    pub wanted: bool,
    /// Was traced before, perhaps with other options.
    pub adopted: bool,
    /// Slept in a call when it was last looked at.
    pub resting: bool,
}

impl Thread {
    pub fn running() -> Self {
        Thread {
            state: State::Running,
            regs: sys::NO_REGS,
            interrupted: false,
            was_group_stopped: false,
            blocked: 0,
            parked: false,
            told_as_is: false,
            sibling: false,
            wanted: false,
            adopted: false,
            resting: false,
        }
    }

    pub fn is_stopped(&self) -> bool {
        matches!(self.state, State::Stopped { .. })
    }

    pub fn turn(&self) -> Turn {
        match (self.sibling, self.resting) {
            (true, _) => Turn::Siblings,
            (false, true) => Turn::Resting,
            (false, false) => Turn::Threads,
        }
    }
}

/// In which order the tasks of a process are brought to a stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Turn {
    /// However many there are, the program runs on meanwhile.
    Resting,
    Threads,
    /// Not before all threads stand: a thread in vfork waits for its child.
    Siblings,
}

impl Turn {
    pub fn next(self) -> Turn {
        match self {
            Turn::Resting => Turn::Threads,
            Turn::Threads | Turn::Siblings => Turn::Siblings,
        }
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
    /// Up to whom tasks have to stand still.
    pub turn: Turn,
    /// All tasks are known; new ones are reported by the kernel.
    pub complete: bool,
    /// Only some threads are traced: those that are borrowed for a moment.
    pub partial: bool,
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
    pub watch: Option<Watch>,
}

impl Proc {
    pub fn new() -> Proc {
        Proc {
            threads: BTreeMap::new(),
            running: 0,
            goal: Goal::Run,
            turn: Turn::Threads,
            complete: false,
            partial: false,
            stepping: false,
            held: false,
            announce: None,
            generation: 0,
            mem: None,
            watch: None,
        }
    }

    pub fn memory(&self, pid: i32) -> Result<BorrowedFd<'_>> {
        let none = || Error::new("not-permitted", format!("the memory of process {pid} cannot be opened"));
        self.mem.as_ref().map(AsFd::as_fd).ok_or_else(none)
    }

    /// Whether it stands still, or is to.
    pub fn stands(&self) -> bool {
        self.held || self.goal == Goal::Stop
    }

    /// Whether all that has to stand still now does.
    pub fn is_still(&self) -> bool {
        self.running == 0 || self.threads.values().all(|t| t.state != State::Running || t.turn() > self.turn)
    }

    /// Whether a task is on its way to a stand.
    pub fn has_to_stop(&self, tid: i32) -> bool {
        let thread = self.threads.get(&tid);
        let its_turn = self.goal == Goal::Stop && thread.is_none_or(|t| t.turn() <= self.turn);
        its_turn || thread.is_some_and(|t| t.wanted)
    }

    pub fn set_state(&mut self, tid: i32, state: State) {
        if let Some(thread) = self.threads.get_mut(&tid) {
            let was = thread.state == State::Running;
            thread.state = state;
            self.running = self.running + usize::from(state == State::Running) - usize::from(was);
        }
    }

    pub fn adopt(&mut self, tid: i32) {
        if let Some(thread) = self.threads.get_mut(&tid) {
            thread.adopted = true;
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

/// The memory of the process of any task, by its tid.
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
    /// By tid, threads that are to be in a call again.
    pub(super) calls: HashMap<i32, Reentry>,
    /// By tid, threads that slept in a call when they were to stop.
    pub(super) sleeps: HashMap<i32, Sleep>,
    pub(super) launched: HashSet<i32>,
    pub(super) statuses: HashMap<i32, i32>,
    /// What undoes the changes that are in place, by pid and address.
    pub(super) installed: HashMap<i32, BTreeMap<u64, Site>>,
    pub(super) switched: HashMap<i32, Switched>,
    pub(super) mapped: HashMap<i32, Mapped>,
    pub(super) noted: HashMap<i32, Mapped>,
    /// The threads that were in a stub, or return into one, when the last patch came out. Nobody else gets there.
    pub(super) inside: HashMap<i32, Vec<i32>>,
    /// The memory of the programs that we have mapped into. Reads fail once another program has taken a program's place.
    pub(super) programs: HashMap<i32, File>,
    pub(super) gadgets: HashMap<i32, Gadgets>,
    /// Which instructions the stubs have copies of, by pid.
    pub(super) copies: HashMap<i32, Copies>,
    pub(super) parked: Vec<Parked>,
    /// Sites that were taken out for a program's handler, by pid.
    pub(super) ended: HashMap<i32, Vec<u64>>,
    /// What is mapped where, read shortly before a stop in which it is to be known.
    pub(super) areas: HashMap<i32, Vec<Mapping>>,
    /// Of the processes that fill memory themselves, as known before the last stop for a change.
    pub(super) lazy: HashMap<i32, Lazy>,
    /// CLOCK_MONOTONIC at which the last change of code was made, while its target stood.
    pub changed_ns: u64,
    pub(super) gates: Gates,
    pub(super) shared: Arc<Shared>,
    pub(super) original_mask: libc::sigset_t,
    pub(super) me: i32,
    ending: bool,
    /// Whoever is let go now must not stay traced up to its next stop.
    pub(super) closing: bool,
}

impl Owner {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Owner {
            procs: HashMap::new(),
            tids: HashMap::new(),
            leaving: HashSet::new(),
            calls: HashMap::new(),
            sleeps: HashMap::new(),
            launched: HashSet::new(),
            statuses: HashMap::new(),
            installed: HashMap::new(),
            switched: HashMap::new(),
            mapped: HashMap::new(),
            noted: HashMap::new(),
            inside: HashMap::new(),
            programs: HashMap::new(),
            gadgets: HashMap::new(),
            copies: HashMap::new(),
            parked: Vec::new(),
            ended: HashMap::new(),
            areas: HashMap::new(),
            lazy: HashMap::new(),
            changed_ns: 0,
            gates: Gates::default(),
            shared,
            // SAFETY: plain integers, for which zero (no signal) is a value.
            original_mask: unsafe { std::mem::zeroed() },
            me: 0,
            ending: false,
            closing: false,
        }
    }

    /// When the owner has something to do though nobody asks; None: never.
    pub(super) fn due(&self) -> Option<Instant> {
        self.survey_due().into_iter().chain(self.parked_due()).min()
    }

    /// What there is to do between commands and reports.
    pub(super) fn tend(&mut self) {
        self.answer_parked();
        if self.survey_due().is_some_and(|due| due <= Instant::now()) {
            self.survey();
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
        self.take_over_noted();
        let changed: HashSet<i32> = self.installed.keys().chain(self.mapped.keys()).copied().collect();
        for pid in changed {
            self.take_out(pid);
        }
        self.closing = true;
        for pid in self.procs.keys().copied().collect::<Vec<_>>() {
            let _ = self.detach(pid);
        }
        self.let_leaving_go();
    }

    /// Find out what the calls of a thread will need, while nobody stands. What fails here is told by the calls.
    pub(super) fn prepare_calls(&mut self, pid: i32) {
        let alive = procfs::tasks(pid).unwrap_or_default().into_iter().find_map(|tid| {
            let memory = open_memory(tid).ok()?;
            Some((tid, memory))
        });
        if let Some((tid, memory)) = alive {
            let _ = self.find_gadgets(pid, tid, memory.as_fd());
            if let Ok(maps) = procfs::maps(tid) {
                self.areas.insert(pid, maps);
            }
        }
    }

    /// Nothing that was known of what runs in `pid` holds any more.
    pub(super) fn forget_program(&mut self, pid: i32) {
        self.installed.remove(&pid);
        self.switched.remove(&pid);
        self.mapped.remove(&pid);
        self.noted.remove(&pid);
        self.inside.remove(&pid);
        self.programs.remove(&pid);
        self.gadgets.remove(&pid);
        self.copies.remove(&pid);
        self.ended.remove(&pid);
        self.lazy.remove(&pid);
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

    pub(super) fn read_memory(&self, pid: i32, addr: u64, buf: &mut [u8]) -> Result<()> {
        let proc = self.procs.get(&pid).ok_or_else(|| Error::gone(pid))?;
        let error = |errno| match errno {
            libc::EIO => Error::new("unmapped", format!("process {pid} has nothing mapped at {addr:#x}")),
            _ => Error::os(pid, "reading the memory", errno),
        };
        sys::read_at(proc.memory(pid)?, addr, buf).map_err(|e| error(e).at(addr))
    }

    pub(super) fn write_memory(&self, pid: i32, addr: u64, bytes: &[u8]) -> Result<()> {
        let proc = self.procs.get(&pid).ok_or_else(|| Error::gone(pid))?;
        sys::write_at(proc.memory(pid)?, addr, bytes).map_err(|e| Error::os(pid, "writing the memory", e).at(addr))
    }
}
