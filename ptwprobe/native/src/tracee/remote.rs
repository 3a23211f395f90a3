//! System calls executed by a thread of the target, through a `syscall` instruction that the target already has.
//!
//! The borrowed thread is in an event-stop. Its registers are replaced, it runs from there into the call and out of it
//! (two syscall-stops), and is then sent to a new event-stop before it executes anything else; only there does it get its
//! registers back, `orig_rax` included, so that the kernel still restarts a call that our stop interrupted. All its signals are
//! blocked meanwhile, and no trap is raised.
//! Should we be killed on the way, the thread goes on by a signal frame (`frame`): the frame is there before the registers,
//! the registers before the mask, and at the end the mask before the registers.

use std::fs::File;
use std::ops::Range;
use std::os::fd::IntoRawFd;
use std::time::{Duration, Instant};

use super::frame::Frame;
use super::gadgets::Gadgets;
use super::lazy::Lazy;
use super::owner::{Owner, Proc, State};
use super::procfs::{self, Mapping, Status};
use super::{calls, sys, Error, Result};

const USER_CODE_SEGMENT: u64 = 0x33;
const PAGE: u64 = 4096;
const FAILURES: Range<i64> = -4095..0;
/// A thread that runs is not kept from it for longer than these take.
const CALLS_AT_ONCE: usize = 6;
/// How long that thread is waited for until it makes the next; a busy machine may let it wait for a CPU.
const PATIENCE: Duration = Duration::from_millis(500);
const SPIN: Duration = Duration::from_micros(40);
const STACK_ALIGN: usize = 16;
/// Of the vector state of a thread, in bytes; AMX takes 11 KiB.
const MOST_XSTATE: usize = 16 << 10;
/// linux/prctl.h
const PR_TSC_SIGSEGV: i32 = 2;

/// An argument of a remote call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arg {
    Value(u64),
    /// The result of an earlier call of the same batch, plus a number.
    Result {
        index: usize,
        add: u64,
    },
    /// An address in the scratch bytes of the batch, by offset.
    Scratch(u64),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    pub number: i64,
    pub args: [Arg; 6],
}

impl Call {
    pub fn new(number: i64, args: &[Arg]) -> Call {
        let mut all = [Arg::Value(0); 6];
        all.iter_mut().zip(args).for_each(|(to, from)| *to = *from);
        Call { number, args: all }
    }
}

/// No call of the target: the descriptor that is its argument is opened here, and the result is ours (the recorder and
/// the owner share their files). So a memfd is in the target's table only while its thread is borrowed.
pub const OPEN_HERE: i64 = -1;

fn open_here(tid: i32, descriptor: u64) -> i64 {
    let opened = File::options().read(true).write(true).open(format!("/proc/{tid}/fd/{descriptor}"));
    opened.map_or_else(|e| -i64::from(e.raw_os_error().unwrap_or(libc::EIO)), |file| file.into_raw_fd().into())
}

/// What `Owner::ask` found.
#[derive(Debug, Clone, Copy)]
pub struct Asked {
    pub tid: i32,
    pub fs_base: u64,
    pub may_read_tsc: bool,
}

/// How a borrowed thread was lost: it ended with this wait status; none for a first thread that is reported only once
/// all others have been.
pub(super) struct Lost(pub(super) Option<i32>);

/// How often a thread that does not report is looked at.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// A thread that executes calls for us.
struct Borrowed {
    tid: i32,
    saved: sys::Regs,
    mask: u64,
    /// Of a `syscall` instruction.
    syscall_addr: u64,
    /// What takes the thread back without us, where there is room for it.
    frame: Option<Laid>,
}

/// A frame in the thread's stack, and above `addr`, which is below it, the scratch bytes.
struct Laid {
    addr: u64,
    frame: u64,
    before: Vec<u8>,
}

impl Borrowed {
    fn prepare(&self, number: i64, args: [u64; 6]) {
        let mut regs = self.saved;
        regs.rip = self.syscall_addr;
        if let Some(laid) = &self.frame {
            regs.rsp = laid.frame;
        }
        regs.rax = number as u64;
        regs.orig_rax = u64::MAX;
        [regs.rdi, regs.rsi, regs.rdx, regs.r10, regs.r8, regs.r9] = args;
        // Where the thread is dying this fails, and its end is reported to the waits.
        let _ = sys::set_regs(self.tid, &regs);
    }

    fn call(&self, number: i64, args: [u64; 6]) -> std::result::Result<i64, Lost> {
        self.prepare(number, args);
        self.to_syscall_stop()?;
        self.to_syscall_stop()?;
        let result = sys::get_regs(self.tid).map_or(-i64::from(libc::ESRCH), |r| r.rax as i64);
        Ok(result)
    }

    fn to_syscall_stop(&self) -> std::result::Result<(), Lost> {
        let mut signal = 0;
        loop {
            let _ = sys::cont_syscall(self.tid, signal);
            let (event, stop) = wait_for_stop(self.tid)?;
            match (event, stop) {
                (0, s) if s == libc::SIGTRAP | 0x80 => return Ok(()),
                // Only SIGSTOP can get here, all others being blocked.
                (0, s) => signal = s,
                _ => signal = 0,
            }
        }
    }

    /// Back to an event-stop with the thread's own registers and mask; true for a job-control stop.
    fn give_back(&self) -> std::result::Result<bool, Lost> {
        let mut signal = 0;
        let group = loop {
            let _ = sys::interrupt(self.tid);
            let _ = sys::cont(self.tid, signal);
            match wait_for_stop(self.tid)? {
                (libc::PTRACE_EVENT_STOP, stop) => break stop != libc::SIGTRAP,
                (0, s) if s != libc::SIGTRAP | 0x80 => signal = s,
                _ => signal = 0,
            }
        };
        let _ = sys::set_sigmask(self.tid, self.mask);
        let _ = sys::set_regs(self.tid, &self.saved);
        if let Some(laid) = &self.frame {
            sys::write_memory(self.tid, laid.addr, &laid.before);
        }
        Ok(group)
    }
}

/// (event, signal) of the next stop of a thread that is to stop.
pub(super) fn wait_for_stop(tid: i32) -> std::result::Result<(i32, i32), Lost> {
    let begun = Instant::now();
    let mut dead = false;
    loop {
        match sys::wait_for(tid) {
            Some((_, status)) if libc::WIFSTOPPED(status) => return Ok((status >> 16, libc::WSTOPSIG(status))),
            Some((_, status)) => return Err(Lost(Some(status))),
            None if dead => return Err(Lost(None)),
            // To sleep and be woken takes longer than most calls.
            None if begun.elapsed() < SPIN => std::hint::spin_loop(),
            None => {
                let reported = sys::sleep_until(Some(Instant::now() + LOOK_AGAIN));
                dead = !reported && Status::read(tid).is_none_or(|s| s.is_dead());
            }
        }
    }
}

/// Write a frame that takes a thread back from our calls below its stack pointer, and `scratch` below that. None where the
/// thread cannot return by one, or where it is not sure that the room there is the thread's own.
/// `lazy`: of a process that stands still and may have to fill the room there itself.
fn lay_frame(
    borrowed: &Borrowed,
    pid: i32,
    gadgets: &Gadgets,
    maps: &[Mapping],
    scratch: &[u8],
    lazy: Option<&Lazy>,
) -> Option<Laid> {
    let Borrowed { tid, saved, mask, .. } = borrowed;
    let (tid, mask) = (*tid, *mask);
    if !gadgets.can_return() || Status::read(tid).is_none_or(|s| s.has_shadow_stack) {
        return None;
    }
    let mut xstate = vec![0u8; MOST_XSTATE];
    let len = sys::get_xstate(tid, &mut xstate).ok()?;
    let frame = Frame::below(saved.rsp, &calls::restarted(tid, saved), mask, xstate.get(..len)?, gadgets)?;
    let mut bytes = scratch.to_vec();
    bytes.resize(scratch.len().next_multiple_of(STACK_ALIGN), 0);
    let addr = frame.addr.checked_sub(bytes.len() as u64)?;
    bytes.extend_from_slice(&frame.bytes);
    let stack = maps.iter().find(|m| (m.start..m.end).contains(&saved.rsp))?;
    // The first thread's stack, or one that a libc made: that has the thread's own data at its upper end. Others may be
    // small and lie next to anything (goroutines, coroutines, alternate stacks).
    let is_first = tid == pid && stack.name == "[stack]";
    if !is_first && !(saved.rsp..stack.end).contains(&saved.fs_base) || addr < stack.start {
        return None;
    }
    if lazy.is_some_and(|lazy| !lazy.has(addr, bytes.len() as u64)) {
        return None;
    }
    let mut before = vec![0u8; bytes.len()];
    if sys::read_memory(tid, addr, &mut before) < before.len() {
        return None;
    }
    sys::write_memory(tid, addr, &bytes).then_some(Laid { addr, frame: frame.addr, before })
}

impl Owner {
    /// Execute `calls` one after the other in one thread of the target; ends after the first that fails, whose result (a
    /// negative errno) is the last returned. `scratch` is in the target's memory meanwhile.
    pub fn remote(&mut self, pid: i32, calls: &[Call], scratch: &mut [u8]) -> Result<Vec<i64>> {
        if self.procs.get(&pid).is_some_and(Proc::stands) {
            let results = self.remote_stopped(pid, calls, scratch)?;
            self.note_mapped(pid, calls, &results);
            return Ok(results);
        }
        let mut results = Vec::with_capacity(calls.len());
        let done = self.remote_running(pid, calls, scratch, &mut results);
        self.note_mapped(pid, calls, &results);
        done.map(|()| results)
    }

    fn remote_running(&mut self, pid: i32, calls: &[Call], scratch: &mut [u8], results: &mut Vec<i64>) -> Result<()> {
        let tid = self.with_one(pid, |owner, tid| {
            owner.some_on(pid, tid, calls, scratch, results)?;
            Ok(tid)
        })?;
        // The thread has to run in between; the same one, since another may have other files.
        while results.len() < calls.len() && results.last().is_none_or(|r| !FAILURES.contains(r)) {
            let more = |owner: &mut Owner| owner.some_on(pid, tid, calls, scratch, results);
            match self.with_thread(pid, tid, PATIENCE, more) {
                Ok(Some(())) => {}
                // Not made; what was done can be undone by another thread.
                Ok(None) => results.push(-i64::from(libc::ESRCH)),
                Err(e) if e.kind == "busy" => results.push(-i64::from(libc::EBUSY)),
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// The thread that executes our calls: the base of its thread-local storage, and whether it may read the time stamp
    /// counter (prctl PR_SET_TSC; new threads have what their maker had).
    pub fn ask(&mut self, pid: i32) -> Result<Asked> {
        let mut mode = [0u8; 4];
        let call = Call::new(libc::SYS_prctl, &[Arg::Value(libc::PR_GET_TSC as u64), Arg::Scratch(0)]);
        self.with_one(pid, |owner, tid| {
            owner.remote_on(pid, tid, &[call], &mut mode)?;
            let fs_base = owner.proc(pid)?.threads.get(&tid).map_or(0, |t| t.regs.fs_base);
            Ok(Asked { tid, fs_base, may_read_tsc: i32::from_ne_bytes(mode) != PR_TSC_SIGSEGV })
        })
    }

    /// As `remote`, when everything stands.
    pub(super) fn remote_stopped(&mut self, pid: i32, calls: &[Call], scratch: &mut [u8]) -> Result<Vec<i64>> {
        let tid = self.pick(pid)?;
        self.remote_on(pid, tid, calls, scratch)
    }

    /// Same on one stopped thread; others may run.
    pub(super) fn remote_on(&mut self, pid: i32, tid: i32, calls: &[Call], scratch: &mut [u8]) -> Result<Vec<i64>> {
        let mut results = Vec::with_capacity(calls.len());
        self.calls_on(pid, tid, calls, scratch, &mut results)?;
        Ok(results)
    }

    /// The next few of `calls`, those before having given `results`.
    fn some_on(
        &mut self,
        pid: i32,
        tid: i32,
        calls: &[Call],
        scratch: &mut [u8],
        results: &mut Vec<i64>,
    ) -> Result<()> {
        let end = calls.len().min(results.len() + CALLS_AT_ONCE);
        self.calls_on(pid, tid, calls.get(..end).unwrap_or_default(), scratch, results)
    }

    fn calls_on(
        &mut self,
        pid: i32,
        tid: i32,
        calls: &[Call],
        scratch: &mut [u8],
        results: &mut Vec<i64>,
    ) -> Result<()> {
        let gadgets = self.gadgets(pid, tid)?;
        let suspended = self.pass_seccomp(pid, tid)?;
        let done = self.borrow(pid, tid, &gadgets, calls, scratch, results);
        if suspended {
            let _ = sys::set_options(tid, self.options_of(pid));
        }
        done
    }

    pub(super) fn options_of(&self, pid: i32) -> i32 {
        if self.procs.get(&pid).is_some_and(|p| p.partial) {
            sys::OPTIONS_ALONE
        } else {
            sys::OPTIONS
        }
    }

    fn borrow(
        &mut self,
        pid: i32,
        tid: i32,
        gadgets: &Gadgets,
        calls: &[Call],
        scratch: &mut [u8],
        results: &mut Vec<i64>,
    ) -> Result<()> {
        self.settle_time(tid);
        let os = |e| Error::os(pid, "borrowing a thread", e);
        let mut saved = sys::get_regs(tid).map_err(os)?;
        if let Some(abort) = self.rseq_abort(pid, tid, saved.rip) {
            // What the kernel does to a thread that was interrupted in a restartable sequence; it would no longer see it.
            saved.rip = abort;
        }
        let mask = sys::get_sigmask(tid).map_err(os)?;
        let mut borrowed = Borrowed { tid, saved, mask, syscall_addr: gadgets.syscall, frame: None };
        let lazy = self.lazy.get(&pid).filter(|_| self.procs.get(&pid).is_some_and(Proc::stands));
        borrowed.frame = match self.areas.get(&pid) {
            Some(maps) => lay_frame(&borrowed, pid, gadgets, maps, scratch, lazy),
            None => lay_frame(&borrowed, pid, gadgets, &procfs::maps(tid)?, scratch, lazy),
        };
        if borrowed.frame.is_some() {
            borrowed.syscall_addr = gadgets.syscall_ret;
        }
        // A call that does nothing, so that the registers come before the mask.
        borrowed.prepare(libc::SYS_getpid, [0; 6]);
        sys::set_sigmask(tid, u64::MAX).map_err(os)?;
        let outcome = self.run_calls(pid, &borrowed, calls, scratch, results);
        match outcome.and_then(|done| borrowed.give_back().map(|group| (done, group))) {
            Ok((done, group)) => {
                self.given_back(pid, &borrowed, group);
                done
            }
            Err(lost) => {
                self.on_lost(pid, tid, &lost);
                Err(Error::gone(pid))
            }
        }
    }

    pub(super) fn on_lost(&mut self, pid: i32, tid: i32, lost: &Lost) {
        match (lost.0, self.procs.get_mut(&pid)) {
            (Some(status), _) => self.on_exit(tid, status),
            (None, Some(proc)) => proc.set_state(tid, State::Dead),
            (None, None) => {}
        }
    }

    /// A borrowed thread is in an event-stop again.
    fn given_back(&mut self, pid: i32, borrowed: &Borrowed, group: bool) {
        let Some(proc) = self.procs.get_mut(&pid) else {
            return;
        };
        proc.set_state(borrowed.tid, State::Stopped { group });
        if let Some(thread) = proc.threads.get_mut(&borrowed.tid) {
            thread.regs = borrowed.saved;
            thread.interrupted = false;
            thread.was_group_stopped |= group;
        }
    }

    fn run_calls(
        &mut self,
        pid: i32,
        borrowed: &Borrowed,
        calls: &[Call],
        scratch: &mut [u8],
        results: &mut Vec<i64>,
    ) -> std::result::Result<Result<()>, Lost> {
        let len = (scratch.len() as u64).next_multiple_of(PAGE);
        let laid = borrowed.frame.as_ref().map(|laid| laid.addr);
        let needs_page = laid.is_none() && !scratch.is_empty();
        let mut at = laid.unwrap_or(0);
        if needs_page {
            let prot = (libc::PROT_READ | libc::PROT_WRITE) as u64;
            let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
            let got = borrowed.call(libc::SYS_mmap, [0, len, prot, flags, u64::MAX, 0])?;
            if got < 0 {
                return Ok(Err(Error::os(pid, "mapping a page", -got as i32)));
            }
            at = got as u64;
        }
        let mut done = if needs_page { self.write_memory(pid, at, scratch) } else { Ok(()) };
        if done.is_ok() {
            for call in calls.iter().skip(results.len()) {
                let args = call.args.map(|arg| match arg {
                    Arg::Value(value) => value,
                    Arg::Scratch(offset) => at.wrapping_add(offset),
                    Arg::Result { index, add } => results.get(index).map_or(0, |r| (*r as u64).wrapping_add(add)),
                });
                let result = match call.number {
                    OPEN_HERE => open_here(borrowed.tid, args[0]),
                    number => borrowed.call(number, args)?,
                };
                results.push(result);
                if FAILURES.contains(&result) {
                    break;
                }
            }
        }
        if !scratch.is_empty() {
            done = done.and_then(|()| self.read_memory(pid, at, scratch));
        }
        if needs_page {
            borrowed.call(libc::SYS_munmap, [at, len, 0, 0, 0, 0])?;
        }
        Ok(done)
    }

    /// The thread to borrow: no sibling (it has files of its own), 64-bit code, and rather one that was running the program than one in a call.
    pub(super) fn pick(&mut self, pid: i32) -> Result<i32> {
        let proc = self.procs.get(&pid).ok_or_else(|| Error::gone(pid))?;
        let mut best: Option<(u32, i32)> = None;
        for (tid, thread) in &proc.threads {
            let State::Stopped { group } = thread.state else {
                continue;
            };
            if thread.sibling || thread.regs.cs != USER_CODE_SEGMENT {
                continue;
            }
            let in_call = thread.regs.orig_rax as i64 >= 0 || self.calls.contains_key(tid);
            let mut cost = u32::from(group) * 4 + u32::from(in_call) * 2;
            if cost == 0 && self.rseq_abort(pid, *tid, thread.regs.rip).is_some() {
                cost = 1;
            }
            if best.is_none_or(|(least, _)| cost < least) {
                best = Some((cost, *tid));
            }
            if cost == 0 {
                break;
            }
        }
        let none = || Error::new("unsupported", format!("process {pid} has no thread in 64-bit code"));
        best.map(|(_, tid)| tid).ok_or_else(none)
    }

    /// Before the first call: get the filter out of the way, or refuse. True where it is suspended now.
    fn pass_seccomp(&mut self, pid: i32, tid: i32) -> Result<bool> {
        let refuse = |why: &str| {
            let name = Status::read(tid).ok_or_else(|| Error::gone(pid))?.name;
            Err(Error::new("seccomp", format!("process {pid} ({name}) {why}")))
        };
        if sys::dispatches_syscalls(tid) {
            return refuse("handles its own system calls (user dispatch), so none can be made in it");
        }
        // Whether there is a filter now or not: one may come from another thread.
        match sys::set_options(tid, self.options_of(pid) | sys::SUSPEND_SECCOMP) {
            Ok(()) => Ok(true),
            Err(libc::ESRCH) => Err(Error::gone(pid)),
            Err(_) if Status::read(tid).is_some_and(|s| s.seccomp == 0) => Ok(false),
            Err(_) => refuse("filters its system calls (seccomp), which only root can suspend"),
        }
    }

    /// Where the kernel would send a thread that was interrupted in a restartable sequence (struct rseq_cs,
    /// linux/rseq.h); None where it is in none.
    fn rseq_abort(&self, pid: i32, tid: i32, rip: u64) -> Option<u64> {
        let rseq = sys::rseq_address(tid)?;
        let mut pointer = [0u8; 8];
        self.read_memory(pid, rseq.checked_add(8)?, &mut pointer).ok()?;
        let section = u64::from_le_bytes(pointer);
        if section == 0 {
            return None;
        }
        let mut fields = [[0u8; 8]; 4];
        self.read_memory(pid, section, fields.as_flattened_mut()).ok()?;
        let [_, start, length, abort] = fields.map(u64::from_le_bytes);
        (rip.wrapping_sub(start) < length).then_some(abort)
    }
}
