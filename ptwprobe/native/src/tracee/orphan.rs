//! What the owner does at once when the recorder has died, wherever it is.
//!
//! Any lock may then be held by a thread that was killed: those of the allocator, of channels and of `Shared`. So memory
//! comes from elsewhere, nobody is told anything any more, and an alarm ends a cleaning-up that hangs, after which the
//! kernel lets the targets go.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use super::sys;
use crate::heap;

/// Comes at the death of a thread of the recorder that has children: ours is the host, which lives as long as the process.
const DEATH: libc::c_int = libc::SIGUSR2;
/// For cleaning up.
const MOST_SECONDS: u32 = 8;

static RECORDER: AtomicI32 = AtomicI32::new(0);
static DIED: AtomicBool = AtomicBool::new(false);

/// Once in each owner: from now on the death of `recorder`, its parent, is noticed.
pub fn prepare(recorder: i32) {
    RECORDER.store(recorder, Ordering::Release);
    // SAFETY: each call changes this task only (the table of signals is its own); `sigaction` and `sigset_t` are plain data
    // for which zero is a value; the handler only calls what may be called in one.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_death as extern "C" fn(libc::c_int) as usize;
        action.sa_flags = libc::SA_RESTART;
        libc::sigfillset(&mut action.sa_mask);
        libc::sigaction(DEATH, &action, std::ptr::null_mut());
        libc::signal(libc::SIGALRM, libc::SIG_DFL);
        let mut let_in: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut let_in);
        libc::sigaddset(&mut let_in, DEATH);
        libc::sigaddset(&mut let_in, libc::SIGALRM);
        libc::sigprocmask(libc::SIG_UNBLOCK, &let_in, std::ptr::null_mut());
        libc::prctl(libc::PR_SET_PDEATHSIG, DEATH);
    }
    look();
}

/// Whether the recorder has died.
pub fn look() -> bool {
    // SAFETY: reads an id.
    let alone = unsafe { libc::getppid() } != RECORDER.load(Ordering::Acquire);
    if alone && !DIED.swap(true, Ordering::AcqRel) {
        heap::leave_system();
        // SAFETY: a timer of this task.
        unsafe { libc::alarm(MOST_SECONDS) };
    }
    alone
}

/// Same, as far as it was noticed; for those that are not the owner, too.
pub fn is_known() -> bool {
    DIED.load(Ordering::Acquire)
}

extern "C" fn on_death(_signal: libc::c_int) {
    if look() {
        // The owner may be about to sleep. SAFETY: a signal to ourselves that is blocked.
        unsafe { libc::kill(libc::getpid(), sys::KICK) };
    }
}
