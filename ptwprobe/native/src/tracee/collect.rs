//! Reports of tracees that are collected while we are inside a call that may wait for one of them.
//!
//! A thread that executes a program waits, with a lock of its process held, until the other threads are gone; one that we
//! trace is gone only when we have collected its death. Seizing one more thread of that process waits for the lock: both
//! would wait for ever. (`de_thread`, fs/exec.c; `ptrace_attach`, kernel/ptrace.c.) So a SIGCHLD is let in meanwhile, and
//! its handler collects what there is (deaths cannot be told from stops before) and keeps it for the next `wait`; the
//! kernel then goes on with the call.

use std::cell::Cell;

use super::sys;

/// More are left where they are: a program of more threads that executes another one just now would be the only loser.
const MOST: usize = 8192;

struct Reports {
    /// (tid, wait status), in the order of their coming.
    kept: [Cell<(i32, i32)>; MOST],
    count: Cell<usize>,
}

thread_local! {
    // In the storage of the owner's host thread, which does not use it. No destructor, no allocation: a handler touches it.
    static REPORTS: Reports = const { Reports { kept: [const { Cell::new((0, 0)) }; MOST], count: Cell::new(0) } };
}

/// Once in the owner, before the first of the others: its handler of SIGCHLD, a signal that it has blocked.
pub fn prepare() {
    REPORTS.with(|reports| reports.count.set(0));
    // SAFETY: `sigaction` is plain data for which zero is a value; the handler only calls what may be called in one.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_child as extern "C" fn(libc::c_int) as usize;
        libc::sigfillset(&mut action.sa_mask);
        libc::sigaction(libc::SIGCHLD, &action, std::ptr::null_mut());
    }
}

extern "C" fn on_child(_signal: libc::c_int) {
    // SAFETY: the errno of the interrupted code, which shares our thread-local storage.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let saved = unsafe { *errno };
    collect();
    // SAFETY: as above.
    unsafe { *errno = saved };
}

fn collect() {
    REPORTS.with(|reports| {
        while let Some(place) = reports.kept.get(reports.count.get()) {
            let Some(report) = sys::wait_for_report(-1) else {
                return;
            };
            place.set(report);
            reports.count.set(reports.count.get() + 1);
        }
    });
}

/// Do a call that may wait for a process that waits for us.
pub fn while_collecting<T>(call: impl FnOnce() -> T) -> T {
    // SAFETY: an integer array for which zero is a value; the mask is this task's alone.
    unsafe {
        let mut child: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut child);
        libc::sigaddset(&mut child, libc::SIGCHLD);
        libc::sigprocmask(libc::SIG_UNBLOCK, &child, std::ptr::null_mut());
        // The signals of those that have died before may have been taken.
        collect();
        let done = call();
        let errno = sys::errno();
        libc::sigprocmask(libc::SIG_BLOCK, &child, std::ptr::null_mut());
        *libc::__errno_location() = errno;
        done
    }
}

/// A report that was collected, of `tid` or, with -1, of anybody.
pub fn take(tid: i32) -> Option<(i32, i32)> {
    REPORTS.with(|reports| {
        let count = reports.count.get();
        let kept = reports.kept.get(..count)?;
        let at = kept.iter().position(|report| tid == -1 || report.get().0 == tid)?;
        let found = kept.get(at)?.get();
        for (to, from) in kept.iter().skip(at).zip(kept.iter().skip(at + 1)) {
            to.set(from.get());
        }
        reports.count.set(count - 1);
        Some(found)
    })
}
