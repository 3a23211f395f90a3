//! Calls that the stop of a thread has ended, and that it is to be in again as if there had been no stop.
//!
//! Most blocking calls the kernel starts again by itself when the thread goes on (-ERESTART…), with what is left of their
//! time. Some it ends with EINTR; threads in those get the registers that they had before the call. All are resumed up to
//! the *syscall-entry stop*: whatever signal is taken on the way there gets the thread as the stop had it, so that the
//! program sees EINTR exactly where it would have seen it without us. From the entry on, no signal handler can come before
//! the kernel is in the call.
//! A thread must not be detached at the entry stop: detaching marks a signal as pending, which ends the call at once. It
//! runs on, traced, and is let go at its next stop, whatever that is. At the end of the owner there is no next stop:
//! then the thread gets a result for its call that makes the kernel start it again (ERESTARTNOHAND: unless a handler runs).
//! That leads through the program's own `syscall` instruction, as every restart of the kernel's does: a signal that is
//! taken at that instruction runs its handler before the call.

use std::time::{Duration, Instant};

use super::owner::{Owner, State};
use super::procfs::{self, Status};
use super::sys;
use super::timeouts::current_call;

/// Not in every version of the libc crate (arch/x86/entry/syscalls/syscall_64.tbl).
pub const SYS_IO_PGETEVENTS: i64 = 333;
const USER_CODE_SEGMENT: u64 = 0x33;
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// How long a detach waits for threads to be in their calls again.
const ENTRY_LIMIT: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// How often threads are looked at for those that have come into another call.
const ROUNDS: u32 = 3;
/// How often and when a thread that was let go is looked at until it sleeps.
const LOOKS: u32 = 20;
const BETWEEN_LOOKS: Duration = Duration::from_micros(50);

/// Calls that the kernel ends with EINTR, rather than restarting them, when a tracer stops the thread (signal(7), "Interruption
/// of system calls and library functions by stop signals"; io_uring_enter and fallocate from their sources; select and its
/// kind where the timeout lies in read-only memory). An EINTR of theirs means that nothing was done yet, so they can be
/// entered again. `close` is not among them, and must not be.
const ENTERED_AGAIN: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_connect,
    libc::SYS_accept,
    libc::SYS_accept4,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_sendmmsg,
    libc::SYS_recvmmsg,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_rt_sigtimedwait,
    libc::SYS_io_getevents,
    SYS_IO_PGETEVENTS,
    libc::SYS_io_uring_enter,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_select,
    libc::SYS_pselect6,
    libc::SYS_ppoll,
    libc::SYS_fallocate,
];

/// What the kernel has as the result of a call that it starts again (include/linux/errno.h): ERESTARTSYS, …NOINTR, …NOHAND,
/// ERESTART_RESTARTBLOCK.
const RESTARTS: [i64; 4] = [-512, -513, ERESTARTNOHAND, -516];
const ERESTARTNOHAND: i64 = -514;
const RESTART_SYSCALL: u64 = libc::SYS_restart_syscall as u64;
/// Calls that `restart_syscall` stands for.
const WITH_RESTART_BLOCK: [i64; 4] = [libc::SYS_nanosleep, libc::SYS_clock_nanosleep, libc::SYS_poll, libc::SYS_futex];

/// A call that a thread is to be in again.
#[derive(Debug, Clone, Copy)]
pub struct Reentry {
    number: u64,
    /// What the call returned when the stop ended it.
    result: u64,
    /// Address of the `syscall` instruction.
    addr: u64,
    /// The thread runs towards the entry.
    under_way: bool,
    /// It was asked to stop on its way, when it was let go.
    pub(super) disturbed: bool,
    stopped: Instant,
    /// None where nobody has asked yet, and for calls whose timeout is the kernel's business.
    waited: Option<Duration>,
}

pub fn may_return_eintr(call: i64) -> bool {
    ENTERED_AGAIN.contains(&call)
}

fn returns_eintr(regs: &sys::Regs) -> bool {
    regs.rax as i64 == -i64::from(libc::EINTR) && may_return_eintr(regs.orig_rax as i64)
}

fn is_restarted(regs: &sys::Regs) -> bool {
    regs.orig_rax as i64 >= 0 && RESTARTS.contains(&(regs.rax as i64))
}

fn before_call(regs: &sys::Regs) -> sys::Regs {
    sys::Regs { rax: regs.orig_rax, rip: regs.rip.wrapping_sub(2), orig_rax: u64::MAX, ..*regs }
}

/// The registers with which a thread in an event-stop goes on where the kernel does not restart its call for it: as it
/// would, but for the timeouts of nanosleep, poll and futex, which start anew.
pub fn restarted(tid: i32, regs: &sys::Regs) -> sys::Regs {
    let mut out = *regs;
    if is_restarted(regs) || returns_eintr(regs) {
        out.rip = regs.rip.wrapping_sub(2);
        out.rax = if regs.orig_rax == RESTART_SYSCALL { restarted_call(tid, out.rip) } else { regs.orig_rax };
    }
    out
}

/// The call that a thread has at `rip` where the kernel's `restart_syscall` has taken the place of its number: that is
/// in the `mov $number, %eax` before it, as every libc has it.
fn restarted_call(tid: i32, rip: u64) -> u64 {
    let mut code = [0u8; 5];
    let read = sys::read_memory(tid, rip.wrapping_sub(code.len() as u64), &mut code) == code.len();
    let [opcode, number @ ..] = code;
    let number = u32::from_le_bytes(number);
    if read && opcode == 0xb8 && WITH_RESTART_BLOCK.contains(&i64::from(number)) {
        number.into()
    } else {
        RESTART_SYSCALL
    }
}

/// Whether the end of the tracing alone could end a call of the thread: not where it sleeps in one that the kernel starts
/// again, and where it does not come to a stop nothing can be done.
fn must_be_stopped(tid: i32) -> bool {
    match procfs::run_state(tid) {
        Some('S') => current_call(tid).is_none_or(|(number, _)| may_return_eintr(number)),
        None | Some('D' | 'Z' | 'X') => false,
        Some(_) => true,
    }
}

/// A stop of any kind takes the place of the one that we have asked for, but leaves a signal marked as pending, which would
/// end a call at once: so it is asked for again.
pub fn interrupt_again(tid: i32) {
    // Only a dying thread refuses.
    let _ = sys::interrupt(tid);
}

impl Owner {
    /// At a stop that ended a call: have it begin again, and `regs` as they are then. Where the kernel does that, or is about
    /// to, nothing changes.
    pub(super) fn rewind_call(&mut self, tid: i32, regs: &mut sys::Regs) {
        if let Some(call) = self.calls.get_mut(&tid).filter(|call| call.addr == regs.rip) {
            call.under_way = false;
            call.disturbed = false;
            return;
        }
        self.calls.remove(&tid);
        let before = before_call(regs);
        let call = Reentry {
            number: regs.orig_rax,
            result: regs.rax,
            addr: before.rip,
            under_way: false,
            disturbed: false,
            stopped: Instant::now(),
            waited: None,
        };
        if is_restarted(regs) {
            self.calls.insert(tid, call);
        } else if returns_eintr(regs) && regs.cs == USER_CODE_SEGMENT {
            // A 32-bit call (`int $0x80`) has other numbers.
            let mut code = [0u8; 2];
            let is_syscall = sys::read_memory(tid, before.rip, &mut code) == code.len() && code == SYSCALL;
            if is_syscall && sys::set_regs(tid, &before).is_ok() {
                self.calls.insert(tid, call);
                *regs = before;
            }
        }
    }

    /// The thread is not to be in its call again: it gets what the call returned.
    pub(super) fn return_from_call(&mut self, tid: i32) {
        let Some(call) = self.calls.remove(&tid) else {
            return;
        };
        if let Ok(regs) = sys::get_regs(tid) {
            // Otherwise the kernel has not come to the restart yet.
            if regs.rip == call.addr {
                let rip = regs.rip.wrapping_add(2);
                // Only a dying thread refuses.
                let _ = sys::set_regs(tid, &sys::Regs { rax: call.result, orig_rax: call.number, rip, ..regs });
            }
        }
    }

    /// Have the kernel begin the call again, or end it for a signal that has a handler, as soon as the thread is let go
    /// from the event-stop that it is in.
    fn leave_call_to_kernel(&mut self, tid: i32) {
        self.settle_time(tid);
        let Some(call) = self.calls.get_mut(&tid) else {
            return;
        };
        let ended = call.result as i64 == -i64::from(libc::EINTR);
        let (stopped, waited) = (call.stopped, call.waited.unwrap_or_default());
        if ended {
            call.result = ERESTARTNOHAND as u64;
        }
        self.return_from_call(tid);
        if ended {
            self.shorten_timeout(tid, stopped, waited);
        }
    }

    /// Resume a thread that is to be in a call again, from any stop. False: there is none, and nothing was done.
    pub(super) fn resume_into_call(&mut self, tid: i32, signal: i32) -> bool {
        self.settle_time(tid);
        let Some(call) = self.calls.get_mut(&tid) else {
            return false;
        };
        call.under_way = true;
        // A thread that dies meanwhile reports its exit.
        let _ = sys::cont_syscall(tid, signal);
        true
    }

    /// At a syscall-stop: whether it is the entry that the thread was sent to. Then it may go on into the call.
    pub(super) fn has_entered_call(&mut self, tid: i32) -> bool {
        if !self.calls.get(&tid).is_some_and(|call| call.under_way) {
            return false;
        }
        if let Some((stopped, waited)) = self.calls.remove(&tid).and_then(|call| Some((call.stopped, call.waited?))) {
            self.shorten_timeout(tid, stopped, waited);
        }
        true
    }

    /// Before a thread that stands does anything else: find out how long it has been in its call.
    pub(super) fn settle_time(&mut self, tid: i32) {
        let ended =
            self.calls.get(&tid).filter(|call| call.waited.is_none() && call.result as i64 == -i64::from(libc::EINTR));
        if let Some(stopped) = ended.map(|call| call.stopped) {
            let waited = self.time_waited(tid, stopped);
            if let Some(call) = self.calls.get_mut(&tid) {
                call.waited = Some(waited);
            }
        }
    }

    /// At the stop for a signal: true where the thread was resumed into its call, of which the signal must not be seen.
    /// Otherwise the thread is as the program's handler is to find it.
    pub(super) fn keep_in_call(&mut self, tid: i32, signal: i32) -> bool {
        let Ok(mut regs) = sys::get_regs(tid) else {
            return false;
        };
        // Tracing alone makes an ignored signal wake its thread.
        let known = self.calls.contains_key(&tid);
        let ended = known || returns_eintr(&regs) || is_restarted(&regs);
        if ended && Status::read(tid).is_some_and(|s| s.ignores(signal)) {
            if !known {
                self.rewind_call(tid, &mut regs);
            }
            return self.resume_into_call(tid, signal);
        }
        self.return_from_call(tid);
        false
    }

    /// A thread that could not be let go earlier has stopped.
    pub(super) fn release_leaving(&mut self, tid: i32, event: i32, signal: i32) {
        let syscall_stop = event == 0 && signal == libc::SIGTRAP | 0x80;
        let event_stop = event == libc::PTRACE_EVENT_STOP && signal == libc::SIGTRAP;
        let disturbed = self.calls.get(&tid).is_some_and(|call| call.disturbed);
        if syscall_stop {
            if !self.has_entered_call(tid) || disturbed || self.closing {
                interrupt_again(tid);
            }
            let _ = sys::cont(tid, 0);
            return;
        }
        if event_stop {
            if let Ok(mut regs) = sys::get_regs(tid) {
                self.rewind_call(tid, &mut regs);
            }
            if self.closing {
                self.leave_call_to_kernel(tid);
            } else if self.resume_into_call(tid, 0) {
                return;
            }
        }
        let deliver = if event == 0 { signal } else { 0 };
        if deliver != 0 && self.keep_in_call(tid, signal) {
            return;
        }
        self.return_from_call(tid);
        if event == 0 {
            self.show_original_to_leaving(tid, signal);
        }
        self.leaving.remove(&tid);
        // As in `let_go`.
        let _ = sys::detach(tid, deliver);
    }

    /// End the tracing of one task, now or when it next stops.
    pub(super) fn let_go(&mut self, tid: i32, state: State) {
        self.tids.remove(&tid);
        if self.closing && state == (State::Stopped { group: false }) {
            self.leave_call_to_kernel(tid);
        }
        match state {
            State::Stopped { group: false } if self.resume_into_call(tid, 0) => {
                self.leaving.insert(tid);
            }
            State::Stopped { .. } => {
                self.return_from_call(tid);
                // Only death can be in the way, and that is not ours to report here.
                let _ = sys::detach(tid, 0);
            }
            State::Running => {
                let _ = sys::interrupt(tid);
                if let Some(call) = self.calls.get_mut(&tid) {
                    call.disturbed = true;
                }
                self.leaving.insert(tid);
            }
            State::Dead => {}
        }
    }

    /// Those that were to stay traced up to their next stop: that is now.
    ///
    /// The end of the owner would disturb no call. But while a thread is traced, an ignored signal wakes it; where that has
    /// ended its call for good, nobody would be there to have it entered again.
    pub(super) fn let_leaving_go(&mut self) {
        let deadline = Instant::now() + ENTRY_LIMIT;
        for _ in 0..ROUNDS {
            let mut done = true;
            for tid in self.leaving.iter().copied().collect::<Vec<_>>() {
                if self.leaving.contains(&tid) && must_be_stopped(tid) {
                    done = false;
                    self.let_one_go(tid, deadline);
                }
            }
            if done {
                return;
            }
        }
    }

    /// One at a time, so that no other thread that we wake gets in before this one is in its call.
    fn let_one_go(&mut self, tid: i32, deadline: Instant) {
        self.note_sleep(tid);
        // Only a dying thread refuses.
        let _ = sys::interrupt(tid);
        while self.leaving.contains(&tid) && Instant::now() < deadline {
            match self.next_report(deadline.min(Instant::now() + LOOK_AGAIN)) {
                Some((tid, status)) => self.dispatch(tid, status),
                None if !must_be_stopped(tid) => return,
                None => {}
            }
        }
        for _ in 0..LOOKS {
            if procfs::run_state(tid) != Some('R') {
                return;
            }
            std::thread::sleep(BETWEEN_LOOKS);
        }
    }

    /// Wait until all threads that were let go are in their calls again.
    pub(super) fn serve_until_in_calls(&mut self) {
        let deadline = Instant::now() + ENTRY_LIMIT;
        while self.calls.iter().any(|(tid, call)| call.under_way && self.leaving.contains(tid)) {
            match self.next_report(deadline) {
                Some((tid, status)) => self.dispatch(tid, status),
                None => return,
            }
        }
    }
}
