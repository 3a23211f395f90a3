//! Tasks that share a target's memory without being threads of it (`clone` with CLONE_VM, without CLONE_THREAD).
//!
//! They execute the code that we change, so they have to stand still with the threads. Nothing in /proc lists them: every
//! process is asked (kcmp, less than 1 µs each) while the target still runs. Once it stands only younger tasks can have
//! come, made by a sibling or just before. A vfork parent stops when its child has left the memory, so that none of
//! these children is held up here.
//! Where the kernel has no kcmp, only siblings are known that were made while their maker was traced.

use std::fs;

use super::owner::{Owner, State, Thread};
use super::procfs::{self, Status};
use super::{sys, Error, Result};

/// More new tasks than this, and all of /proc is looked through again.
const MOST_NEW: i32 = 4096;

/// The pid that was given out last, in our PID namespace; 0 when it cannot be read.
fn newest_pid() -> i32 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().last().and_then(|word| word.parse().ok()).unwrap_or(0)
}

/// All processes that share the memory of the task `like`.
fn search_all(like: i32) -> Vec<i32> {
    let names = procfs::names("/proc").unwrap_or_default();
    let pids = names.iter().filter_map(|name| name.parse().ok());
    pids.filter(|pid| sys::shares_memory(like, *pid)).collect()
}

/// What was found before the stop.
struct Search {
    like: i32,
    newest: i32,
    found: Vec<i32>,
}

impl Search {
    fn new(like: i32) -> Search {
        let newest = newest_pid();
        Search { like, newest, found: search_all(like) }
    }

    /// Processes that share the memory of `like`, a task that stands; tids among them.
    fn complete(&self, like: i32) -> Vec<i32> {
        let now = newest_pid();
        let new = now.checked_sub(self.newest).filter(|n| (0..MOST_NEW).contains(n) && self.newest > 0);
        if new.is_none() || like != self.like {
            return search_all(like);
        }
        // Asked again: who is dead by now has no memory, and some kernel threads may have matched a dying task.
        let asked = self.found.iter().copied().chain(self.newest + 1..=now);
        asked.filter(|pid| sys::shares_memory(like, *pid)).collect()
    }
}

impl Owner {
    /// Bring every task that shares the memory of `pid` to an event-stop. On any error all of them run again.
    pub(super) fn stop_all(&mut self, pid: i32) -> Result<()> {
        let alive = |(tid, t): (&i32, &Thread)| (t.state != State::Dead && !t.sibling).then_some(*tid);
        let like = self.proc(pid)?.threads.iter().find_map(alive).ok_or_else(|| Error::gone(pid))?;
        let search = Search::new(like);
        loop {
            self.stop(pid)?;
            match self.seize_siblings(pid, &search) {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(e) => {
                    self.go(pid);
                    return Err(e);
                }
            }
        }
    }

    /// Seize the siblings that are not ours yet; true where there were any.
    fn seize_siblings(&mut self, pid: i32, search: &Search) -> Result<bool> {
        let threads = &self.proc(pid)?.threads;
        let stands = |tid: &i32| threads.get(tid).is_some_and(Thread::is_stopped);
        let any = threads.iter().find(|(_, t)| t.is_stopped() && !t.sibling).map(|(tid, _)| *tid);
        let like = Some(search.like).filter(stands).or(any).ok_or_else(|| Error::gone(pid))?;
        let mut found = false;
        for process in search.complete(like) {
            let Some(tgid) = Status::read(process).map(|s| s.tgid).filter(|tgid| *tgid != pid) else {
                continue;
            };
            // Gone in between: nothing to stop.
            for tid in procfs::tasks(tgid).unwrap_or_default() {
                if !self.proc(pid)?.threads.contains_key(&tid) && !procfs::is_kernels_worker(tid) {
                    found |= self.seize_sibling(pid, tid, like)?;
                }
            }
        }
        Ok(found)
    }

    fn seize_sibling(&mut self, pid: i32, tid: i32, like: i32) -> Result<bool> {
        if let Err(errno) = sys::seize(tid) {
            let Some(status) = Status::read(tid).filter(|s| !s.is_dead()) else {
                return Ok(false);
            };
            let ours = status.tracer == self.me && !self.tids.contains_key(&tid);
            if !ours {
                let why = super::attach::explain(status.tgid, &status, errno).message;
                return Err(Error::new("busy", format!("process {pid} shares its memory with {}: {why}", status.tgid)));
            }
            // Ours since its creation, or one that could not be let go earlier.
            if self.leaving.remove(&tid) {
                self.add_sibling(pid, tid);
                self.proc(pid)?.adopt(tid);
            }
        } else if !sys::shares_memory(like, tid) {
            // It has just become another program, or ended.
            self.leaving.insert(tid);
            let _ = sys::interrupt(tid);
            return Ok(false);
        }
        self.add_sibling(pid, tid);
        Ok(true)
    }

    pub(super) fn add_sibling(&mut self, pid: i32, tid: i32) {
        self.add_thread(pid, tid);
        if let Some(thread) = self.procs.get_mut(&pid).and_then(|p| p.threads.get_mut(&tid)) {
            thread.sibling = true;
        }
    }

    /// Their process is no more, or has another memory now.
    pub(super) fn let_siblings_go(&mut self, pid: i32) {
        let Some(proc) = self.procs.get_mut(&pid) else {
            return;
        };
        let siblings = proc.threads.iter().filter(|(_, t)| t.sibling).map(|(tid, t)| (*tid, t.state));
        for (tid, state) in siblings.collect::<Vec<_>>() {
            self.let_go(tid, state);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fork_does_not_share_our_memory_and_is_among_the_new_tasks() {
        let me = std::process::id() as i32;
        let before = Search::new(me);
        let child = std::process::Command::new("sleep").arg("5").spawn();
        let mut child = child.expect("sleep is there");
        let pid = child.id() as i32;
        let (newest, found) = (newest_pid(), before.complete(me));
        child.kill().and_then(|()| child.wait()).expect("our own child");
        assert!(newest >= pid || newest < before.newest);
        assert!(found.contains(&me) && !found.contains(&pid));
    }
}
