//! Starting the owner, handing it commands, and what it tells on its own accord.

use std::collections::{HashMap, VecDeque};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::{collect, orphan, sys, Error, Owner, Result};

const STACK: usize = 1 << 20;
/// Events that nobody fetches are dropped beyond this many, the oldest clone first.
const EVENTS_KEPT: usize = 4096;

type Command = Box<dyn FnOnce(&mut Owner) + Send>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// The process runs another program now; what we mapped and patched is gone.
    Exec,
    /// The process ended; the value is its wait status.
    Exit,
    /// A thread was created; the value is its tid.
    Clone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    pub kind: EventKind,
    pub pid: i32,
    pub tid: i32,
    pub value: i64,
}

/// Why a launched process stands still (or, for `Exit`, is no more).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Halt {
    Mapped,
    Exec,
    Exit,
}

/// What the owner and the others both look at.
#[derive(Default)]
pub struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    owner_ended: AtomicBool,
    pub(super) owner_pid: AtomicI32,
}

#[derive(Default)]
struct State {
    events: VecDeque<Event>,
    halts: HashMap<i32, Halt>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn push(&self, event: Event) {
        if orphan::is_known() {
            return;
        }
        let mut state = self.lock();
        if state.events.len() >= EVENTS_KEPT {
            // A program that makes threads all the time must not push out the news of its end.
            let least = state.events.iter().position(|e| e.kind == EventKind::Clone).unwrap_or(0);
            state.events.remove(least);
        }
        state.events.push_back(event);
        self.changed.notify_all();
    }

    pub fn set_halt(&self, pid: i32, halt: Option<Halt>) {
        if orphan::is_known() {
            return;
        }
        let mut state = self.lock();
        match halt {
            Some(h) => state.halts.insert(pid, h),
            None => state.halts.remove(&pid),
        };
        self.changed.notify_all();
    }

    /// Wait for `take` to find something in the state.
    fn wait<T>(&self, timeout: Duration, mut take: impl FnMut(&mut State) -> Option<T>) -> Option<T> {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        loop {
            if let Some(found) = take(&mut state) {
                return Some(found);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.owner_ended.load(Ordering::Acquire) {
                return None;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The way to the owner. Dropping it ends the owner: gates closed, patches taken out, targets let go.
pub struct Handle {
    commands: Sender<Command>,
    shared: Arc<Shared>,
    host: Mutex<Option<JoinHandle<()>>>,
    /// The process that this handle works in: a fork of it has neither the host thread nor a way to the owner.
    recorder: i32,
}

struct Start {
    owner: Owner,
    commands: Receiver<Command>,
    recorder: i32,
    ready: Sender<()>,
}

impl Handle {
    pub fn start() -> Result<Handle> {
        let shared = Arc::new(Shared::default());
        let (commands, receiver) = mpsc::channel();
        let (ready, started) = mpsc::channel();
        let owner = Owner::new(shared.clone());
        // SAFETY: reads an id.
        let recorder = unsafe { libc::getpid() };
        let start = Start { owner, commands: receiver, recorder, ready };
        let ours = shared.clone();
        let host = std::thread::Builder::new()
            .name("ptwprobe-host".into())
            .spawn(move || host(start, &ours))
            .map_err(|e| Error::new("failed", format!("cannot start the tracing thread: {e}")))?;
        let handle = Handle { commands, shared, host: Mutex::new(Some(host)), recorder };
        if started.recv().is_err() {
            handle.end();
            return Err(Error::new("failed", "cannot start the tracing task"));
        }
        Ok(handle)
    }

    /// Run `work` in the owner and wait for what it returns.
    pub fn call<T: Send + 'static>(&self, work: impl FnOnce(&mut Owner) -> Result<T> + Send + 'static) -> Result<T> {
        let ended = || Error::new("ended", "the tracing task has ended");
        if self.is_forked() {
            return Err(ended());
        }
        let (reply, answer) = mpsc::channel();
        let command = move |owner: &mut Owner| {
            let done = catch_unwind(AssertUnwindSafe(|| work(owner)));
            let done = done.unwrap_or_else(|_| Err(Error::new("failed", "the tracing task broke off a command")));
            if orphan::is_known() {
                std::mem::forget(reply);
            } else {
                // The caller may have been torn down meanwhile; then nobody wants the answer.
                let _ = reply.send(done);
            }
        };
        self.commands.send(Box::new(command)).map_err(|_| ended())?;
        self.kick();
        loop {
            match answer.recv_timeout(Duration::from_millis(100)) {
                Ok(result) => return result,
                Err(RecvTimeoutError::Disconnected) => return Err(ended()),
                // A killed owner drops nothing, so its end shows here only.
                Err(RecvTimeoutError::Timeout) if self.shared.owner_ended.load(Ordering::Acquire) => {
                    return Err(ended())
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// Events since the last call; waits up to `timeout` for the first.
    pub fn events(&self, timeout: Duration) -> Vec<Event> {
        let take = |state: &mut State| (!state.events.is_empty()).then(|| state.events.drain(..).collect());
        self.shared.wait(timeout, take).unwrap_or_default()
    }

    /// Wait until a launched process stands still.
    pub fn wait_halt(&self, pid: i32, timeout: Duration) -> Option<Halt> {
        self.shared.wait(timeout, |state| state.halts.get(&pid).copied())
    }

    /// The pid of the owner: what a target shows as its tracer.
    pub fn owner_pid(&self) -> i32 {
        self.shared.owner_pid.load(Ordering::Acquire)
    }

    fn is_forked(&self) -> bool {
        // SAFETY: reads an id.
        unsafe { libc::getpid() != self.recorder }
    }

    fn kick(&self) {
        let owner = self.owner_pid();
        if owner > 0 && !self.shared.owner_ended.load(Ordering::Acquire) {
            // SAFETY: the owner is not collected before `owner_ended` is set, so the pid is still its own.
            unsafe { libc::kill(owner, sys::KICK) };
        }
    }

    /// End the owner and wait for it.
    pub fn end(&self) {
        let host = self.host.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(host) = host.filter(|_| !self.is_forked()) {
            if self.commands.send(Box::new(Owner::end)).is_ok() {
                self.kick();
            }
            // A panic of the host has nothing to tell that `owner_ended` does not.
            let _ = host.join();
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.end();
    }
}

/// The thread that lends the owner its thread-local storage, and sleeps until the owner ends.
fn host(start: Start, shared: &Shared) {
    // SAFETY: the stack is mapped for the owner alone and unmapped after its end; `Start` lives in a box that the
    // owner takes over. While the owner runs this thread sits in waitpid, so that the thread-local storage that both
    // have (they share the thread pointer) has one user only.
    unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut before: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let mut start = start;
        start.owner.original_mask = before;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_STACK;
        let stack = libc::mmap(std::ptr::null_mut(), STACK, prot, flags, -1, 0);
        if stack != libc::MAP_FAILED {
            // The lowest page stays a guard.
            libc::mprotect(stack, 4096, libc::PROT_NONE);
            let argument = Box::into_raw(Box::new(start));
            let flags = libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES;
            let owner = libc::clone(run, stack.byte_add(STACK), flags, argument.cast());
            if owner < 0 {
                drop(Box::from_raw(argument));
            } else {
                let mut status = 0;
                while libc::waitpid(owner, &mut status, libc::__WALL) < 0 && sys::errno() == libc::EINTR {}
            }
            libc::munmap(stack, STACK);
        }
    }
    shared.owner_ended.store(true, Ordering::Release);
    shared.changed.notify_all();
}

/// What the recorder wants, as long as it lives.
fn next(commands: &Receiver<Command>) -> Option<Command> {
    (!orphan::is_known()).then(|| commands.try_recv().ok()).flatten()
}

extern "C" fn run(argument: *mut libc::c_void) -> libc::c_int {
    // SAFETY: `host` made the box for us and does not touch it again.
    let Start { mut owner, commands, recorder, ready } = *unsafe { Box::from_raw(argument.cast::<Start>()) };
    // SAFETY: each call changes this task only: its name; or reads an id.
    let me = unsafe {
        libc::prctl(libc::PR_SET_NAME, c"ptwprobe-owner".as_ptr());
        libc::getpid()
    };
    collect::prepare();
    orphan::prepare(recorder);
    owner.begin(me);
    let _ = ready.send(());
    drop(ready);
    loop {
        while let Some(command) = next(&commands) {
            command(&mut owner);
            owner.tend();
        }
        if owner.is_ending() || orphan::look() {
            break;
        }
        if let Some((tid, status)) = sys::wait_any() {
            owner.dispatch(tid, status);
        } else {
            sys::sleep_until(owner.due());
        }
        owner.tend();
    }
    owner.finish();
    if orphan::look() {
        // Dropping takes locks. SAFETY: ends this task.
        unsafe { libc::_exit(0) };
    }
    0
}
