//! Drains the rings of the targets into a session's perf.data.
//!
//! One thread owns everything and works in rounds (`rounds.rs`): it looks at every ring, holds what it read per thread
//! (`hold.rs`) until no ring can still give an earlier hit, and writes it as PT packets (`emit.rs`). Everybody else
//! sends it jobs, which it does between two rounds; so nothing here is locked, and no caller can slow a round down.
//! The targets are never waited for and never made to wait.

mod emit;
mod hold;
mod identity;
mod intake;
mod output;
mod rounds;
mod tap;
mod targets;
#[cfg(test)]
mod tests;
mod threads;

use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use std::{fmt, io};

pub use rounds::{Core, Hole};
pub use tap::TapHit;
pub use targets::FIRST_EVENT_ID;

use crate::clock::TimeConv;

/// What was counted so far. Every hit that a target made is in one of `hits`, `held`, `lost`, `torn`, `filtered`,
/// `stray`, or still in a ring; at the end `held` is 0.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stats {
    /// Written.
    pub hits: u64,
    /// No room in the ring, no ring for the CPU, or not written because the output failed.
    pub lost: u64,
    /// Begun by a thread that did not finish.
    pub torn: u64,
    /// Argument words whose load faulted; their value is 0.
    pub faults: u64,
    /// Of threads that are not kept.
    pub filtered: u64,
    /// Records of no known event, or with another number of arguments than it has.
    pub stray: u64,
    /// Hits whose thread could not be told; their process stands for it.
    pub unknown_threads: u64,
    /// Hits written with a later time than theirs, because a ring was blocked too long to wait for it.
    pub late: u64,
    /// Rings that are not read any more because their control words were overwritten.
    pub broken_rings: u64,
    /// Bytes of perf.data.
    pub bytes: u64,
    /// Read, but not written yet.
    pub held: u64,
    pub error: Option<OutputError>,
}

/// Why the recording stopped. `kind` is a stable word: "disk-full" or "write-error".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutputError {
    pub kind: &'static str,
    pub message: String,
}

#[derive(Debug)]
pub enum RecorderError {
    /// perf.data could not be made.
    Create(io::Error),
    /// No target has this pid, or one that was not dropped has it already.
    UnknownTarget(i32),
    DuplicateTarget(i32),
    /// Event ids of user-space probes go from 0x8000 up, and have at most 255 arguments.
    Event {
        event_id: u16,
        nargs: usize,
    },
    /// A stub has one address for each word of its event, header first.
    Stub {
        event_id: u16,
        slots: usize,
    },
    /// The recorder has been stopped.
    Stopped,
}

impl RecorderError {
    /// A stable word for it.
    pub fn kind(&self) -> &'static str {
        match self {
            RecorderError::Create(error) => output_error_kind(error),
            RecorderError::UnknownTarget(_) => "unknown-target",
            RecorderError::DuplicateTarget(_) => "duplicate-target",
            RecorderError::Event { .. } | RecorderError::Stub { .. } => "bad-event",
            RecorderError::Stopped => "stopped",
        }
    }
}

impl fmt::Display for RecorderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RecorderError::Create(error) => write!(f, "perf.data cannot be made: {error}"),
            RecorderError::UnknownTarget(pid) => write!(f, "process {pid} is not recorded"),
            RecorderError::DuplicateTarget(pid) => write!(f, "process {pid} is recorded already"),
            RecorderError::Event { event_id, nargs } => {
                write!(f, "event {event_id:#x} with {nargs} arguments: ids go from 0x8000 up, arguments to 255")
            }
            RecorderError::Stub { event_id, slots } => {
                write!(f, "{slots} slot addresses do not fit event {event_id:#x}, or it is not known")
            }
            RecorderError::Stopped => write!(f, "the recorder has been stopped"),
        }
    }
}

impl std::error::Error for RecorderError {}

fn output_error_kind(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => "disk-full",
        _ => "write-error",
    }
}

type Job = Box<dyn FnOnce(&mut Core) + Send>;

/// What is left of the thread: final counts, clock factors, rate of the counter in Hz.
type Ended = (Stats, TimeConv, u64);

/// The handle of the recorder's thread. Dropping it ends the recording as `stop` does.
pub struct Recorder {
    /// `None` once it was stopped.
    jobs: Mutex<Option<Sender<Job>>>,
    thread: Mutex<Option<JoinHandle<Ended>>>,
    ended: Mutex<Ended>,
}

impl Recorder {
    /// Makes the file `perf_data` (which must not exist) and starts the thread; rings are looked at from `start` on.
    pub fn create(perf_data: &Path, command_line: Vec<String>) -> Result<Self, RecorderError> {
        let core = Core::create(perf_data, command_line).map_err(RecorderError::Create)?;
        let ended = (core.stats(), core.conv(), core.tsc_hz());
        let (jobs, inbox) = mpsc::channel();
        let thread = thread::Builder::new()
            .name("ptwprobe-ring".into())
            .spawn(move || work(core, &inbox))
            .map_err(RecorderError::Create)?;
        Ok(Recorder { jobs: Mutex::new(Some(jobs)), thread: Mutex::new(Some(thread)), ended: Mutex::new(ended) })
    }

    /// Does `job` between two rounds and waits for its result.
    pub fn call<R, F>(&self, job: F) -> Result<R, RecorderError>
    where
        R: Send + 'static,
        F: FnOnce(&mut Core) -> R + Send + 'static,
    {
        let (answer, result) = mpsc::sync_channel(1);
        let job: Job = Box::new(move |core| drop(answer.send(job(core))));
        let jobs = lock(&self.jobs).clone().ok_or(RecorderError::Stopped)?;
        jobs.send(job).map_err(|_| RecorderError::Stopped)?;
        result.recv().map_err(|_| RecorderError::Stopped)
    }

    /// What was counted so far, or in all once it was stopped.
    pub fn stats(&self) -> Stats {
        self.call(|core| core.stats()).unwrap_or_else(|_| lock(&self.ended).0.clone())
    }

    /// The clock's factors and the rate of the counter in Hz; the final ones once it was stopped.
    pub fn clock(&self) -> (TimeConv, u64) {
        self.call(|core| (core.conv(), core.tsc_hz())).unwrap_or_else(|_| {
            let ended = lock(&self.ended);
            (ended.1, ended.2)
        })
    }

    /// Reads all rings to their end, writes everything, ends the file and the thread.
    pub fn stop(&self) -> Stats {
        *lock(&self.jobs) = None;
        let mut thread = lock(&self.thread);
        if let Some(Ok(ended)) = thread.take().map(JoinHandle::join) {
            *lock(&self.ended) = ended;
        }
        lock(&self.ended).0.clone()
    }
}

/// Nothing is left half done under these locks, so one that a panic let go is as good as any.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The thread: jobs and rounds in turn, until the last sender is gone.
fn work(mut core: Core, inbox: &Receiver<Job>) -> Ended {
    raise_priority();
    let mut wait = Duration::ZERO;
    loop {
        match inbox.recv_timeout(wait) {
            Ok(job) => {
                job(&mut core);
                // A caller that asks without pause must not keep the rings from being read.
                if !core.is_due() {
                    wait = core.until_due();
                    continue;
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return core.finish(),
        }
        wait = core.round();
    }
}

/// A reader that waits for the CPU behind its own targets loses hits: the lowest real-time priority, which needs a
/// privilege, else a better nice value, else as it is. It sleeps between rounds, so it cannot keep a CPU to itself.
fn raise_priority() {
    const NICE: i32 = -10;
    let lowest = libc::sched_param { sched_priority: 1 };
    // SAFETY: 0 is the calling thread in both; `lowest` outlives the call, no other memory is involved.
    unsafe {
        if libc::sched_setscheduler(0, libc::SCHED_RR | libc::SCHED_RESET_ON_FORK, &lowest) != 0 {
            libc::setpriority(libc::PRIO_PROCESS, 0, NICE);
        }
    }
}
