//! Bringing all threads of a process to a stand and letting them go on as if nothing had been.

use std::time::{Duration, Instant};

use super::owner::{Goal, Owner, Proc, State, Thread, Turn};
use super::procfs::{self, Status};
use super::{sys, Error, Result};

/// How long threads may take to stop before everything is let go again.
const STOP_LIMIT: Duration = Duration::from_millis(100);
/// How long those that sleep are stopped before the others.
const MOST_FIRST: Duration = Duration::from_millis(5);
const FEW: usize = 16;
/// When to look whether a thread that does not report has ended.
const SWEEP_AFTER: Duration = Duration::from_millis(3);

/// Those whose turn it is.
fn interrupt_running(proc: &mut Proc) {
    let turn = proc.turn;
    for (tid, thread) in proc.threads.iter_mut().filter(|(_, t)| t.turn() <= turn) {
        if thread.state == State::Running && !thread.interrupted {
            thread.interrupted = sys::interrupt(*tid).is_ok();
        }
    }
}

/// Who sleeps now: those are stopped first, while the others run on.
fn look_who_rests(proc: &mut Proc) {
    // Of a few threads, to look takes longer than to stop them.
    let many = proc.running > FEW;
    for (tid, thread) in proc.threads.iter_mut().filter(|(_, t)| t.state == State::Running) {
        thread.resting = many && procfs::run_state(*tid) == Some('S');
    }
}

impl Owner {
    /// Bring every task of `pid` to an event-stop. On any error all of them run again.
    pub(super) fn stop(&mut self, pid: i32) -> Result<()> {
        let proc = self.proc(pid)?;
        let generation = proc.generation;
        let known = proc.threads.len();
        let running = proc.threads.iter().filter(|(_, t)| t.state == State::Running).map(|(tid, _)| *tid);
        for tid in running.collect::<Vec<_>>() {
            self.note_sleep(tid);
        }
        self.calls.reserve(known);
        let begun = Instant::now();
        let deadline = begun + STOP_LIMIT;
        let mut sweep = begun + SWEEP_AFTER;
        let proc = self.proc(pid)?;
        look_who_rests(proc);
        proc.goal = Goal::Stop;
        proc.turn = Turn::Resting;
        interrupt_running(proc);
        loop {
            loop {
                let proc = self.proc(pid)?;
                if proc.generation != generation {
                    self.go(pid);
                    return Err(Error::new("gone", format!("process {pid} executes another program")));
                }
                if proc.is_still() {
                    if proc.running == 0 {
                        if !proc.threads.values().any(Thread::is_stopped) {
                            return Err(Error::gone(pid));
                        }
                        break;
                    }
                    proc.turn = proc.turn.next();
                    interrupt_running(proc);
                }
                if proc.turn == Turn::Resting && begun.elapsed() > MOST_FIRST {
                    // They do not get to run, perhaps for those that do.
                    proc.turn = proc.turn.next();
                    interrupt_running(proc);
                }
                match self.next_report(deadline.min(sweep)) {
                    Some((tid, status)) => self.dispatch(tid, status),
                    None if Instant::now() < deadline => {
                        sweep = Instant::now() + SWEEP_AFTER;
                        self.sweep(pid);
                    }
                    None => return Err(self.give_up(pid)),
                }
            }
            match self.find_new_tasks(pid) {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(e) => {
                    self.go(pid);
                    return Err(e);
                }
            }
        }
    }

    /// Undo a stop that did not come about.
    fn give_up(&mut self, pid: i32) -> Error {
        let stuck = self.procs.get(&pid).and_then(|p| p.threads.iter().find(|(_, t)| t.state == State::Running));
        let stuck = stuck.map_or_else(String::new, |(tid, _)| format!(": thread {tid} did not stop"));
        self.go(pid);
        let limit = STOP_LIMIT.as_millis();
        Error::new("busy", format!("process {pid} does not come to a stand within {limit} ms{stuck}"))
    }

    /// With all known tasks at a stand, seize those that appeared before the kernel told us of new ones.
    /// True where there were any.
    fn find_new_tasks(&mut self, pid: i32) -> Result<bool> {
        if self.proc(pid)?.complete {
            return Ok(false);
        }
        let found = self.seize_tasks(pid)?;
        let proc = self.proc(pid)?;
        proc.complete = !found;
        for (tid, thread) in &mut proc.threads {
            if thread.state == State::Running {
                thread.interrupted = sys::interrupt(*tid).is_ok();
            }
        }
        Ok(found)
    }

    /// Notice threads that ended without a report: a leader stays a zombie until its threads are gone.
    fn sweep(&mut self, pid: i32) {
        let Some(proc) = self.procs.get_mut(&pid) else {
            return;
        };
        let running = proc.threads.iter().filter(|(_, t)| t.state == State::Running);
        for tid in running.map(|(tid, _)| *tid).collect::<Vec<_>>() {
            match Status::read(tid) {
                Some(status) if status.is_dead() && tid == status.tgid => proc.set_state(tid, State::Dead),
                Some(_) => {}
                None => {
                    proc.remove(tid);
                    self.tids.remove(&tid);
                }
            }
        }
    }

    /// Let all threads run again, unless the process is held for `next_mapping_event`.
    pub(super) fn go(&mut self, pid: i32) {
        let Some(proc) = self.procs.get_mut(&pid) else {
            return;
        };
        if proc.held {
            return;
        }
        proc.goal = Goal::Run;
        proc.turn = Turn::Threads;
        // Those that sleep can wait, and there is more to do for those in calls. By key, since starting a thread may change
        // the table; nothing is allocated.
        for late in [false, true] {
            let mut next = 0;
            while let Some((tid, turn)) = self.next_thread(pid, next) {
                if late == (turn == Turn::Resting || self.calls.contains_key(&tid)) {
                    self.start(pid, tid);
                }
                next = tid + 1;
            }
        }
    }

    fn next_thread(&self, pid: i32, from: i32) -> Option<(i32, Turn)> {
        let (tid, thread) = self.procs.get(&pid)?.threads.range(from..).next()?;
        Some((*tid, thread.turn()))
    }

    /// Run `work` with all tasks of `pid` at a stand; a process that is not attached is attached for that time only.
    pub(super) fn stopped<T>(&mut self, pid: i32, work: impl FnOnce(&mut Owner) -> Result<T>) -> Result<T> {
        self.attached(pid, |owner| {
            owner.stop(pid)?;
            work(owner)
        })
    }

    /// Run `work` with `pid` attached; afterwards it runs on, whether `work` left it standing or not.
    pub(super) fn attached<T>(&mut self, pid: i32, work: impl FnOnce(&mut Owner) -> Result<T>) -> Result<T> {
        if self.procs.contains_key(&pid) {
            let done = work(self);
            self.go(pid);
            return done;
        }
        self.attach(pid)?;
        let done = work(self);
        match (done, self.detach(pid)) {
            (Ok(_), Err(e)) if e.kind != "gone" => Err(e),
            (done, _) => done,
        }
    }

    /// Seize every task that is not yet ours; true where there were any.
    pub(super) fn seize_tasks(&mut self, pid: i32) -> Result<bool> {
        let mut found = false;
        for tid in procfs::tasks(pid)? {
            if self.proc(pid)?.threads.contains_key(&tid) || procfs::is_kernels_worker(tid) {
                continue;
            }
            match sys::seize(tid) {
                Ok(()) => {
                    self.add_thread(pid, tid);
                    found = true;
                }
                Err(errno) => match Status::read(tid) {
                    None => {}
                    // Ours since its creation; its first stop is on its way.
                    Some(status) if status.tracer == self.me => {
                        self.add_thread(pid, tid);
                        found = true;
                    }
                    Some(status) if status.is_dead() => {}
                    Some(status) => return Err(super::attach::explain(pid, &status, errno)),
                },
            }
        }
        Ok(found)
    }
}
