//! Taking a process under our hand and letting it go.

use std::fs::{self, File};
use std::time::{Duration, Instant};

use super::owner::{open_memory, Owner, Proc, Turn};
use super::procfs::Status;
use super::{sys, Error, Result};

/// How often a detach waits, 1 ms each, for threads to leave the neighbourhood of a load that may still fault.
const LOAD_ROUNDS: u32 = 50;

impl Owner {
    /// Seize all threads of `pid`; they run on. Nothing happens to a process that is attached already.
    pub fn attach(&mut self, pid: i32) -> Result<()> {
        if self.procs.contains_key(&pid) {
            return Ok(());
        }
        let status = Status::read(pid).ok_or_else(|| Error::gone(pid))?;
        if let Some(other) = self.tids.get(&pid) {
            return Err(Error::new(
                "busy",
                format!("process {pid} shares the memory of process {other}, which is traced"),
            ));
        }
        if status.tgid != pid {
            return Err(Error::new("gone", format!("{pid} is a thread of process {}", status.tgid)));
        }
        if status.tracer != 0 && status.tracer != self.me {
            return Err(explain(pid, &status, libc::EPERM));
        }
        // Threads that we could not let go when we were here last: they are still ours.
        let mut back = Vec::new();
        self.leaving.retain(|tid| {
            let status = Status::read(*tid).filter(|s| s.tracer == self.me);
            let is_back = status.as_ref().is_some_and(|s| s.tgid == pid);
            if is_back {
                back.push(*tid);
            }
            status.is_some() && !is_back
        });
        self.procs.insert(pid, Proc::new());
        for tid in back {
            self.add_thread(pid, tid);
            self.proc(pid)?.adopt(tid);
        }
        let seized = loop {
            match self.seize_tasks(pid) {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(e) => break Err(e),
            }
        };
        // Only now, when an exec would be told: what was opened before could be another program's memory, even another
        // process's (a vfork child's, up to its exec).
        let seized = seized.and_then(|()| self.open_memory_of(pid));
        let empty = self.procs.get(&pid).is_none_or(|p| p.threads.is_empty());
        match seized {
            _ if empty => {
                self.procs.remove(&pid);
                seized.and(Err(Error::gone(pid)))
            }
            Ok(memory) => {
                self.proc(pid)?.mem = Some(memory);
                Ok(())
            }
            Err(e) => {
                let _ = self.detach(pid);
                Err(e)
            }
        }
    }

    /// Through the first thread that still has memory.
    fn open_memory_of(&mut self, pid: i32) -> Result<File> {
        let mut result = Err(Error::gone(pid));
        for tid in self.proc(pid)?.threads.keys() {
            result = open_memory(*tid);
            if result.is_ok() {
                break;
            }
        }
        result
    }

    /// Let all threads go. One that does not stop now is let go at its next stop. Nothing happens to a process that is
    /// not attached.
    pub fn detach(&mut self, pid: i32) -> Result<()> {
        let Some(proc) = self.procs.get_mut(&pid) else { return Ok(()) };
        proc.held = false;
        proc.stepping = false;
        proc.announce = None;
        let mut stopped = self.stop_clear_of_loads(pid);
        // Taking out what a parked thread waits for lets the others run for a moment.
        for _ in 0..LOAD_ROUNDS {
            if stopped.is_err() || !self.answer_parked_of(pid) {
                break;
            }
            stopped = self.stop_clear_of_loads(pid);
        }
        let Some(proc) = self.procs.remove(&pid) else {
            return Err(Error::gone(pid));
        };
        // Those that sleep come last, as in `go`.
        for late in [false, true] {
            for (tid, thread) in &proc.threads {
                let sleeps = thread.turn() == Turn::Resting || self.calls.contains_key(tid);
                if sleeps == late && self.tids.contains_key(tid) {
                    self.let_go(*tid, thread.state);
                }
            }
        }
        self.serve_until_in_calls();
        match stopped {
            // Too slow to wait for; `leaving` has the rest.
            Err(e) if e.kind == "busy" => Ok(()),
            other => other,
        }
    }

    /// Stop at a moment when no thread is about to do a load whose fault only we can hide.
    fn stop_clear_of_loads(&mut self, pid: i32) -> Result<()> {
        for _ in 0..LOAD_ROUNDS {
            self.stop(pid)?;
            let proc = self.proc(pid)?;
            let Some(watch) = proc.watch.as_ref() else {
                return Ok(());
            };
            if proc.threads.values().all(|t| !watch.is_near_load(t.regs.rip)) {
                return Ok(());
            }
            self.go(pid);
            self.serve_until(Instant::now() + Duration::from_millis(1));
        }
        self.stop(pid)
    }
}

/// Why a process cannot be attached.
pub fn explain(pid: i32, status: &Status, errno: sys::Errno) -> Error {
    let name = &status.name;
    if status.is_dead() {
        return Error::new("gone", format!("process {pid} ({name}) has ended"));
    }
    if errno != libc::EPERM {
        return Error::os(pid, "attaching to a thread", errno);
    }
    let refuse = |why: String| Error::new("not-permitted", format!("cannot attach to process {pid} ({name}): {why}"));
    if status.tracer != 0 {
        let tracer = Status::read(status.tracer).map_or_else(|| "?".to_owned(), |s| s.name);
        return refuse(format!("process {} ({tracer}) traces it", status.tracer));
    }
    if !status.has_memory {
        return refuse("it is a kernel thread".into());
    }
    // SAFETY: reads an id.
    let uid = unsafe { libc::geteuid() };
    if uid != 0 && uid != status.uid {
        return refuse(format!("it belongs to user {}, we are user {uid}", status.uid));
    }
    // SAFETY: reads an id.
    if pid == unsafe { libc::getppid() } {
        return refuse("it is the process that asks".into());
    }
    match fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").as_deref().map(str::trim) {
        Ok("0") | Err(_) => refuse("the kernel does not permit it (other capabilities, or not dumpable)".into()),
        Ok(scope) => refuse(format!("/proc/sys/kernel/yama/ptrace_scope is {scope}: be root, or set it to 0")),
    }
}
