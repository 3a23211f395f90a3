//! What is left of a relative timeout when a call is entered again.
//!
//! How long a thread has been in its call nobody tells, but /proc/TID/sched has when it last ran: read before the stop and in
//! it, the difference is the time that it has slept in this call, if it has slept there once (its count of voluntary
//! switches tells) and on one CPU (their clocks differ). That clock is slower than ours by what interrupts and a hypervisor
//! took. So the timeout is shortened by no more than has passed: a call may end late, never early.
//! The shorter timeout goes into the argument register, or below the red zone with the register pointing there, where
//! nothing reads that register after the call. Elsewhere the timeout starts over.

use std::fs::File;
use std::io::{Cursor, Read, Write};
use std::time::{Duration, Instant};

use iced_x86::Register;

use super::calls::SYS_IO_PGETEVENTS;
use super::owner::Owner;
use super::sys;
use crate::x86::is_dead;

const RED_ZONE: u64 = 128;
/// After a system call, as far as its use of registers is looked at.
const CODE: usize = 512;
/// CLOCK_MONOTONIC may be adjusted by up to 500 ppm against the scheduler's clock (adjtimex(2)).
const SLACK: u32 = 1000;
/// Stacks of goroutines: below what is used may be another's memory.
const GO_HEAP: std::ops::Range<u64> = 0xc0_0000_0000..0xe0_0000_0000;
/// linux/io_uring.h
const IORING_ENTER_EXT_ARG: u64 = 1 << 3;
const IORING_ENTER_ABS_TIMER: u64 = 1 << 5;
const IORING_ENTER_EXT_ARG_REG: u64 = 1 << 6;
/// Bytes of `struct io_uring_getevents_arg`; the last of its three words points to the timeout.
const URING_ARGUMENT: usize = 24;

/// A thread that sleeps in a call with a timeout.
#[derive(Debug, Clone, Copy)]
pub struct Sleep {
    seen: Instant,
    last_ran: Duration,
    switches: u64,
    cpu: i32,
}

/// Which argument of a call is its timeout, and of what kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Timeout {
    Milliseconds(Argument),
    Timespec(Argument),
    Timeval(Argument),
    /// The fifth argument points to a structure with a pointer to a timespec.
    Uring,
}

/// By its place, from 0.
type Argument = usize;

const REGISTERS: [Register; 6] =
    [Register::RDI, Register::RSI, Register::RDX, Register::R10, Register::R8, Register::R9];

impl Timeout {
    /// None for calls without one, or with one that is infinite or absolute.
    fn of(number: i64, args: &[u64; 6]) -> Option<Timeout> {
        let timeout = match number {
            libc::SYS_epoll_wait | libc::SYS_epoll_pwait => Timeout::Milliseconds(3),
            libc::SYS_epoll_pwait2 | libc::SYS_semtimedop => Timeout::Timespec(3),
            libc::SYS_rt_sigtimedwait | libc::SYS_ppoll => Timeout::Timespec(2),
            libc::SYS_io_getevents | SYS_IO_PGETEVENTS | libc::SYS_pselect6 => Timeout::Timespec(4),
            libc::SYS_select => Timeout::Timeval(4),
            libc::SYS_io_uring_enter => {
                let flags = args[3];
                let relative = flags & (IORING_ENTER_ABS_TIMER | IORING_ENTER_EXT_ARG_REG) == 0;
                return (flags & IORING_ENTER_EXT_ARG != 0 && relative && args[5] as usize == URING_ARGUMENT)
                    .then_some(Timeout::Uring);
            }
            _ => return None,
        };
        let value = args.get(timeout.argument())?;
        match timeout {
            Timeout::Milliseconds(_) => (*value as i32 > 0).then_some(timeout),
            _ => (*value != 0).then_some(timeout),
        }
    }

    fn argument(self) -> Argument {
        match self {
            Timeout::Milliseconds(argument) | Timeout::Timespec(argument) | Timeout::Timeval(argument) => argument,
            Timeout::Uring => 4,
        }
    }

    /// Its length, as the thread's arguments have it.
    fn read(self, tid: i32, args: &[u64; 6]) -> Option<Duration> {
        let value = *args.get(self.argument())?;
        let (address, unit) = match self {
            Timeout::Milliseconds(_) => return u64::try_from(value as i32).ok().map(Duration::from_millis),
            Timeout::Timespec(_) => (value, 1),
            Timeout::Timeval(_) => (value, 1000),
            Timeout::Uring => match read_words::<3>(tid, value)? {
                [_, _, 0] => return None,
                [_, _, address] => (address, 1),
            },
        };
        let [seconds, fraction] = read_words::<2>(tid, address)?;
        let nanoseconds = fraction.checked_mul(unit).filter(|ns| *ns < 1_000_000_000)?;
        // A negative or huge number of seconds is an error, or for good.
        (seconds < 1 << 40).then(|| Duration::new(seconds, nanoseconds as u32))
    }

    /// Have `left` in the place of what the registers of the thread say.
    fn write(self, tid: i32, regs: &mut sys::Regs, left: Duration) -> bool {
        let parts = match self {
            Timeout::Milliseconds(_) => {
                regs.r10 = left.as_nanos().div_ceil(1_000_000) as u64;
                return true;
            }
            Timeout::Timeval(_) => [left.as_secs(), u64::from(left.subsec_nanos().div_ceil(1000))],
            _ => [left.as_secs(), u64::from(left.subsec_nanos())],
        };
        let place = regs.rsp.wrapping_sub(RED_ZONE + 64) & !15;
        let mut words = [parts[0], parts[1], 0, 0, 0];
        let mut pointer = place;
        if self == Timeout::Uring {
            let Some([mask, sizes, _]) = read_words::<3>(tid, regs.r8) else { return false };
            pointer = place + 16;
            words = [parts[0], parts[1], mask, sizes, place];
        }
        if GO_HEAP.contains(&regs.rsp) || !sys::write_memory(tid, place, words.map(u64::to_le_bytes).as_flattened()) {
            return false;
        }
        match self.argument() {
            2 => regs.rdx = pointer,
            3 => regs.r10 = pointer,
            _ => regs.r8 = pointer,
        }
        true
    }
}

fn arguments(regs: &sys::Regs) -> [u64; 6] {
    [regs.rdi, regs.rsi, regs.rdx, regs.r10, regs.r8, regs.r9]
}

fn read_words<const N: usize>(tid: i32, addr: u64) -> Option<[u64; N]> {
    let mut words = [[0u8; 8]; N];
    let bytes = words.as_flattened_mut();
    (sys::read_memory(tid, addr, bytes) == bytes.len()).then(|| words.map(u64::from_le_bytes))
}

/// A file of /proc/TID, without allocating.
fn read_proc<'a>(tid: i32, name: &str, buffer: &'a mut [u8]) -> Option<&'a str> {
    let mut path = [0u8; 64];
    let mut cursor = Cursor::new(path.as_mut_slice());
    write!(cursor, "/proc/{tid}/task/{tid}/{name}").ok()?;
    let len = usize::try_from(cursor.position()).ok()?;
    let mut file = File::open(std::str::from_utf8(path.get(..len)?).ok()?).ok()?;
    let mut filled = 0;
    while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match file.read(rest).ok()? {
            0 => break,
            n => filled += n,
        }
    }
    std::str::from_utf8(buffer.get(..filled)?).ok()
}

/// When a thread last ran, by the clock of its CPU, and how often it has given up the CPU (kernel/sched/debug.c).
fn schedule(tid: i32) -> Option<(Duration, u64)> {
    parse_schedule(read_proc(tid, "sched", &mut [0; 4096])?)
}

fn parse_schedule(text: &str) -> Option<(Duration, u64)> {
    let field = |name: &str| {
        let line =
            text.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', ':'])))?;
        line.rsplit(' ').next()
    };
    let (ms, ns) = field("se.exec_start")?.split_once('.')?;
    let last_ran = Duration::from_millis(ms.parse().ok()?) + Duration::from_nanos(ns.parse().ok()?);
    Some((last_ran, field("nr_voluntary_switches")?.parse().ok()?))
}

/// State and CPU of a thread: fields 3 and 39 of proc_pid_stat(5).
fn state(tid: i32) -> Option<(char, i32)> {
    let mut buffer = [0; 1024];
    let text = read_proc(tid, "stat", &mut buffer)?;
    let mut fields = text.get(text.rfind(')')? + 2..)?.split(' ');
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(35)?.parse().ok()?))
}

/// The call that a thread is in (proc_pid_syscall(5)).
pub fn current_call(tid: i32) -> Option<(i64, [u64; 6])> {
    let mut buffer = [0; 256];
    let text = read_proc(tid, "syscall", &mut buffer)?;
    let mut words = text.split_whitespace();
    let number = words.next()?.parse().ok()?;
    let mut args = [0; 6];
    for arg in &mut args {
        *arg = u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok()?;
    }
    Some((number, args))
}

impl Owner {
    /// Before a thread is stopped: what will tell how long it has been in its call.
    pub(super) fn note_sleep(&mut self, tid: i32) {
        self.sleeps.remove(&tid);
        let timed = current_call(tid).is_some_and(|(number, args)| Timeout::of(number, &args).is_some());
        if !timed {
            return;
        }
        let Some(('S', cpu)) = state(tid) else { return };
        let Some((last_ran, switches)) = schedule(tid) else { return };
        // Asleep now, so that whatever else it does before the stop adds to its switches. A thread that is moved to another
        // CPU in its sleep (it stays in its CPU's queue for a while) has last run at 0.
        if last_ran.is_zero() || state(tid) != Some(('S', cpu)) {
            return;
        }
        self.sleeps.insert(tid, Sleep { seen: Instant::now(), last_ran, switches, cpu });
    }

    /// For a thread that has been in an event-stop since `stopped` and in no other stop yet: how long it had been in its
    /// call, at least.
    pub(super) fn time_waited(&mut self, tid: i32, stopped: Instant) -> Duration {
        let Some(sleep) = self.sleeps.remove(&tid) else { return Duration::ZERO };
        // First the CPU: if the thread is moved now, it has last run at 0.
        let same_cpu = state(tid).is_some_and(|(_, cpu)| cpu == sleep.cpu);
        let Some((last_ran, _)) = schedule(tid).filter(|(_, switches)| *switches == sleep.switches + 1) else {
            return Duration::ZERO;
        };
        let slept = if same_cpu { last_ran.saturating_sub(sleep.last_ran) } else { Duration::ZERO };
        (slept - slept / SLACK).max(stopped.duration_since(sleep.seen))
    }

    /// For a thread at the entry of a call that a stop had ended at `stopped`.
    pub(super) fn shorten_timeout(&self, tid: i32, stopped: Instant, waited: Duration) {
        let Ok(mut regs) = sys::get_regs(tid) else { return };
        let args = arguments(&regs);
        let Some(timeout) = Timeout::of(regs.orig_rax as i64, &args) else { return };
        let Some(whole) = timeout.read(tid, &args) else { return };
        let mut code = [0u8; CODE];
        let known = sys::read_memory(tid, regs.rip, &mut code);
        let register = REGISTERS.get(timeout.argument());
        let dead = register.is_some_and(|r| is_dead(code.get(..known).unwrap_or_default(), regs.rip, *r));
        let left = whole.saturating_sub(waited).saturating_sub(stopped.elapsed());
        if dead && timeout.write(tid, &mut regs, left) {
            // Only a dying thread refuses.
            let _ = sys::set_regs(tid, &regs);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_of_calls() {
        let at = |place: usize, value| std::array::from_fn(|i| if i == place { value } else { 0 });
        assert_eq!(Timeout::of(libc::SYS_epoll_wait, &at(3, 5)), Some(Timeout::Milliseconds(3)));
        assert_eq!(Timeout::of(libc::SYS_epoll_wait, &at(3, u64::from(u32::MAX))), None);
        assert_eq!(Timeout::of(libc::SYS_epoll_pwait2, &at(3, 0)), None);
        assert_eq!(Timeout::of(libc::SYS_read, &at(2, 5)), None);
        let uring = |flags| Timeout::of(libc::SYS_io_uring_enter, &[1, 0, 1, flags, 2, URING_ARGUMENT as u64]);
        assert_eq!((uring(9), uring(1), uring(0x29)), (Some(Timeout::Uring), None, None));
    }

    #[test]
    fn lengths_of_timeouts() {
        let pid = std::process::id() as i32;
        let read = |timeout: Timeout, place: usize, value| {
            timeout.read(pid, &std::array::from_fn(|i| if i == place { value } else { 0 }))
        };
        let time = [3u64, 500_000];
        let addr = time.as_ptr() as u64;
        assert_eq!(read(Timeout::Milliseconds(3), 3, 1500), Some(Duration::from_millis(1500)));
        assert_eq!(read(Timeout::Timespec(2), 2, addr), Some(Duration::new(3, 500_000)));
        assert_eq!(read(Timeout::Timeval(4), 4, addr), Some(Duration::new(3, 500_000_000)));
        let argument = [0u64, 0, addr];
        assert_eq!(read(Timeout::Uring, 4, argument.as_ptr() as u64), Some(Duration::new(3, 500_000)));
        assert_eq!(read(Timeout::Timespec(2), 2, 8), None);
        let negative = [u64::MAX, 0];
        assert_eq!(read(Timeout::Timespec(2), 2, negative.as_ptr() as u64), None);
    }

    #[test]
    fn the_scheduler_tells_when_a_thread_ran() {
        let text =
            "x (1, #threads: 1)\nse.exec_start   :      12465453.804931\nnr_switches : 7\nnr_voluntary_switches : 5\n";
        assert_eq!(parse_schedule(text), Some((Duration::new(12465, 453_804_931), 5)));
        assert_eq!(parse_schedule("se.exec_start : x"), None);
        let pid = std::process::id() as i32;
        assert!(state(pid).is_some_and(|(state, cpu)| state.is_ascii_uppercase() && cpu >= 0));
    }
}
