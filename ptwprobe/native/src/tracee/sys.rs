//! The system calls of tracing, one thin function each. Failures are errno values; "no such process" (ESRCH) is told
//! apart by the callers, since a tracee may die at any moment.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Instant;

use libc::{c_int, c_long, c_uint, c_void};

use super::collect;

pub type Regs = libc::user_regs_struct;
/// An errno value.
pub type Errno = i32;

/// Children are traced from their first instruction on: one that shares the memory (vfork) executes our stubs, and its
/// faults have to be caught like a thread's; one that does not is let go at its first stop.
pub const OPTIONS: c_int = libc::PTRACE_O_TRACESYSGOOD
    | libc::PTRACE_O_TRACECLONE
    | libc::PTRACE_O_TRACEFORK
    | libc::PTRACE_O_TRACEVFORK
    | libc::PTRACE_O_TRACEEXEC;
pub const OPTIONS_ALONE: c_int = libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACEEXEC;
/// `PTRACE_O_SUSPEND_SECCOMP`, linux/ptrace.h.
pub const SUSPEND_SECCOMP: c_int = 1 << 21;
/// linux/elf.h
const NT_X86_XSTATE: usize = 0x202;
const PTRACE_GETSIGMASK: c_uint = 0x420a;
const PTRACE_SETSIGMASK: c_uint = 0x420b;
const PTRACE_GET_RSEQ_CONFIGURATION: c_uint = 0x420f;
const PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG: c_uint = 0x4211;
/// The signal that wakes the owner for a command; it is blocked there, so none is lost.
pub const KICK: c_int = libc::SIGUSR1;

pub fn errno() -> Errno {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

fn check(ret: c_long) -> Result<(), Errno> {
    if ret < 0 {
        Err(errno())
    } else {
        Ok(())
    }
}

fn request(req: c_uint, tid: i32, addr: usize, data: usize) -> Result<(), Errno> {
    // SAFETY: only requests whose `data` is a number, or a pointer that the caller below keeps valid, come here.
    check(unsafe { libc::ptrace(req, tid, addr as *mut c_void, data as *mut c_void) })
}

pub fn seize(tid: i32) -> Result<(), Errno> {
    collect::while_collecting(|| request(libc::PTRACE_SEIZE, tid, 0, OPTIONS as usize))
}

/// Trace a thread but nobody that it creates.
pub fn seize_alone(tid: i32) -> Result<(), Errno> {
    collect::while_collecting(|| request(libc::PTRACE_SEIZE, tid, 0, OPTIONS_ALONE as usize))
}

pub fn set_options(tid: i32, options: c_int) -> Result<(), Errno> {
    request(libc::PTRACE_SETOPTIONS, tid, 0, options as usize)
}

pub fn interrupt(tid: i32) -> Result<(), Errno> {
    request(libc::PTRACE_INTERRUPT, tid, 0, 0)
}

/// Leave a tracee in its group-stop: it stays stopped, but a SIGCONT reaches it.
pub fn listen(tid: i32) -> Result<(), Errno> {
    request(libc::PTRACE_LISTEN, tid, 0, 0)
}

pub fn cont(tid: i32, signal: i32) -> Result<(), Errno> {
    request(libc::PTRACE_CONT, tid, 0, signal as usize)
}

/// Resume up to the next entry into or exit from a system call.
pub fn cont_syscall(tid: i32, signal: i32) -> Result<(), Errno> {
    request(libc::PTRACE_SYSCALL, tid, 0, signal as usize)
}

pub fn detach(tid: i32, signal: i32) -> Result<(), Errno> {
    request(libc::PTRACE_DETACH, tid, 0, signal as usize)
}

pub const NO_REGS: Regs = {
    // SAFETY: plain integers, for which zero is a value.
    unsafe { std::mem::zeroed() }
};

pub fn get_regs(tid: i32) -> Result<Regs, Errno> {
    let mut regs = NO_REGS;
    request(libc::PTRACE_GETREGS, tid, 0, &raw mut regs as usize)?;
    Ok(regs)
}

pub fn set_regs(tid: i32, regs: &Regs) -> Result<(), Errno> {
    request(libc::PTRACE_SETREGS, tid, 0, std::ptr::from_ref(regs) as usize)
}

/// The vector state as XSAVE stores it, in as many bytes of `state` as are returned.
pub fn get_xstate(tid: i32, state: &mut [u8]) -> Result<usize, Errno> {
    let mut vec = libc::iovec { iov_base: state.as_mut_ptr().cast(), iov_len: state.len() };
    request(libc::PTRACE_GETREGSET, tid, NT_X86_XSTATE, &raw mut vec as usize)?;
    Ok(vec.iov_len)
}

/// The signal mask that the thread has outside of calls that lend it another one.
pub fn get_sigmask(tid: i32) -> Result<u64, Errno> {
    let mut mask = 0u64;
    request(PTRACE_GETSIGMASK, tid, 8, &raw mut mask as usize)?;
    Ok(mask)
}

pub fn set_sigmask(tid: i32, mask: u64) -> Result<(), Errno> {
    request(PTRACE_SETSIGMASK, tid, 8, &raw const mask as usize)
}

pub fn event_message(tid: i32) -> Result<u64, Errno> {
    let mut value = 0u64;
    request(libc::PTRACE_GETEVENTMSG, tid, 0, &raw mut value as usize)?;
    Ok(value)
}

/// A `siginfo_t`: number, errno and code (4 bytes each, then 4 of padding); for faults, an address.
#[derive(Debug, Clone, Copy)]
pub struct SignalInfo([u64; 16]);

impl SignalInfo {
    pub fn code(&self) -> i32 {
        self.0[1] as i32
    }

    /// What somebody sent has a code of 0 or less (sigaction(2)).
    pub fn is_from_kernel(&self) -> bool {
        self.code() > 0
    }

    pub fn addr(&self) -> u64 {
        self.0[2]
    }

    pub fn set_addr(&mut self, addr: u64) {
        self.0[2] = addr;
    }
}

/// Of the signal that a thread is stopped for.
pub fn signal_info(tid: i32) -> Result<SignalInfo, Errno> {
    let mut info = SignalInfo([0; 16]);
    request(libc::PTRACE_GETSIGINFO, tid, 0, info.0.as_mut_ptr() as usize)?;
    Ok(info)
}

pub fn set_signal_info(tid: i32, info: &SignalInfo) -> Result<(), Errno> {
    request(libc::PTRACE_SETSIGINFO, tid, 0, info.0.as_ptr() as usize)
}

/// Whether a syscall-stop is the exit of the call (`PTRACE_GET_SYSCALL_INFO`, op 2).
pub fn is_syscall_exit(tid: i32) -> Result<bool, Errno> {
    let mut info = [0u8; 88];
    request(libc::PTRACE_GET_SYSCALL_INFO as c_uint, tid, info.len(), info.as_mut_ptr() as usize)?;
    Ok(info[0] == 2)
}

/// Address of the thread's `struct rseq` in the target; None where it has none or the kernel cannot tell.
pub fn rseq_address(tid: i32) -> Option<u64> {
    let mut config = [0u64; 3];
    request(PTRACE_GET_RSEQ_CONFIGURATION, tid, size_of_val(&config), config.as_mut_ptr() as usize).ok()?;
    (config[0] != 0).then_some(config[0])
}

/// Whether the thread has its system calls dispatched to user space (prctl PR_SET_SYSCALL_USER_DISPATCH).
pub fn dispatches_syscalls(tid: i32) -> bool {
    let mut config = [0u64; 4];
    let size = size_of_val(&config);
    request(PTRACE_GET_SYSCALL_USER_DISPATCH_CONFIG, tid, size, config.as_mut_ptr() as usize).is_ok() && config[0] != 0
}

/// A reported change of any tracee or child of the calling process: (tid, wait status).
pub fn wait_any() -> Option<(i32, i32)> {
    wait_for(-1)
}

/// Same for one tid.
pub fn wait_for(tid: i32) -> Option<(i32, i32)> {
    collect::take(tid).or_else(|| wait_for_report(tid))
}

/// Same from the kernel; for a signal handler, too.
pub fn wait_for_report(tid: i32) -> Option<(i32, i32)> {
    let mut status = 0;
    // SAFETY: `status` is a valid place for the status.
    let got = unsafe { libc::waitpid(tid, &mut status, libc::WNOHANG | libc::__WALL | libc::__WNOTHREAD) };
    (got > 0).then_some((got, status))
}

/// Sleep until a tracee reports, a kick comes or `deadline` passes (None: never). False: the deadline passed.
///
/// SIGCHLD and KICK are blocked in the owner and taken here, so that nothing slips by between a look and the sleep.
pub fn sleep_until(deadline: Option<Instant>) -> bool {
    // SAFETY: an integer array, for which zero is a value; the calls below only read and fill what they are given.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGCHLD);
        libc::sigaddset(&mut set, KICK);
        let left = match deadline {
            None => {
                libc::sigwaitinfo(&set, std::ptr::null_mut());
                return true;
            }
            Some(at) => at.saturating_duration_since(Instant::now()),
        };
        let time = libc::timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        libc::sigtimedwait(&set, std::ptr::null_mut(), &time) >= 0 || errno() != libc::EAGAIN
    }
}

/// Whether two processes share their memory (kcmp KCMP_VM).
pub fn shares_memory(a: i32, b: i32) -> bool {
    // SAFETY: numbers only.
    unsafe { libc::syscall(libc::SYS_kcmp, a, b, 1, 0, 0) == 0 }
}

pub fn read_at(file: BorrowedFd<'_>, addr: u64, buf: &mut [u8]) -> Result<(), Errno> {
    // SAFETY: `buf` is valid for its length.
    let got = unsafe { libc::pread(file.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len(), addr as i64) };
    match usize::try_from(got) {
        Ok(n) if n == buf.len() => Ok(()),
        Ok(_) => Err(libc::EIO),
        Err(_) => Err(errno()),
    }
}

/// Whether the program whose /proc/PID/mem `file` is still runs. Once it has ended or been replaced a read is at its end
/// (proc_pid_mem(5), `mem_rw` in fs/proc/base.c). That `addr` cannot be read says nothing: pages of a file that is not
/// that long yet, as a new memfd of ours, cannot.
pub fn has_memory(file: BorrowedFd<'_>, addr: u64) -> bool {
    let mut byte = 0u8;
    // SAFETY: `byte` is valid for its length.
    unsafe { libc::pread(file.as_raw_fd(), (&raw mut byte).cast(), 1, addr as i64) != 0 }
}

/// One write, never split: what does not go in at once is an error.
pub fn write_at(file: BorrowedFd<'_>, addr: u64, bytes: &[u8]) -> Result<(), Errno> {
    // SAFETY: `bytes` is valid for its length.
    let got = unsafe { libc::pwrite(file.as_raw_fd(), bytes.as_ptr().cast(), bytes.len(), addr as i64) };
    match usize::try_from(got) {
        Ok(n) if n == bytes.len() => Ok(()),
        Ok(_) => Err(libc::EIO),
        Err(_) => Err(errno()),
    }
}

/// Up to `buf.len()` bytes of another process at `addr`; the count that is readable in a row.
pub fn read_memory(pid: i32, addr: u64, buf: &mut [u8]) -> usize {
    let local = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
    let remote = libc::iovec { iov_base: addr as *mut c_void, iov_len: buf.len() };
    // SAFETY: `local` describes `buf`; the remote side is checked by the kernel.
    let got = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
    usize::try_from(got).unwrap_or(0)
}

/// All of `bytes` to `addr` of another process, where it may be written by the process itself.
pub fn write_memory(pid: i32, addr: u64, bytes: &[u8]) -> bool {
    let local = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: addr as *mut c_void, iov_len: bytes.len() };
    // SAFETY: `local` describes `bytes`, which is only read; the remote side is checked by the kernel.
    let put = unsafe { libc::process_vm_writev(pid, &local, 1, &remote, 1, 0) };
    usize::try_from(put) == Ok(bytes.len())
}
