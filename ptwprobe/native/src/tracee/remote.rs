//! System calls executed by a thread of the target, through a `syscall` instruction that the target already has.
//!
//! The borrowed thread is in an event-stop. Its registers are replaced, it runs from there into the call and out of it
//! (two syscall-stops), and is then sent to a new event-stop before it executes anything else; only there does it get its
//! registers back, `orig_rax` included, so that the kernel still restarts a call that our stop interrupted. All its signals are
//! blocked meanwhile, and no trap is raised.

use super::owner::{Owner, State};
use super::procfs::{self, Status};
use super::{sys, Error, Result};

const USER_CODE_SEGMENT: u64 = 0x33;
const PAGE: u64 = 4096;
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

/// How a borrowed thread was lost: it ended with this wait status.
pub(super) struct Lost(pub(super) i32);

/// A thread that executes calls for us.
pub(super) struct Borrowed {
    pub(super) tid: i32,
    pub(super) saved: sys::Regs,
    pub(super) mask: u64,
    /// Of a `syscall` instruction.
    pub(super) syscall_addr: u64,
}

impl Borrowed {
    fn call(&self, number: i64, args: [u64; 6]) -> std::result::Result<i64, Lost> {
        let mut regs = self.saved;
        regs.rip = self.syscall_addr;
        regs.rax = number as u64;
        regs.orig_rax = u64::MAX;
        [regs.rdi, regs.rsi, regs.rdx, regs.r10, regs.r8, regs.r9] = args;
        // Where the thread is dying these fail, and its end is reported to the waits.
        let _ = sys::set_regs(self.tid, &regs);
        self.to_syscall_stop()?;
        self.to_syscall_stop()?;
        let result = sys::get_regs(self.tid).map_or(-i64::from(libc::ESRCH), |r| r.rax as i64);
        Ok(result)
    }

    fn to_syscall_stop(&self) -> std::result::Result<(), Lost> {
        let mut signal = 0;
        loop {
            let _ = sys::cont_syscall(self.tid, signal);
            let (event, stop) = self.wait()?;
            match (event, stop) {
                (0, s) if s == libc::SIGTRAP | 0x80 => return Ok(()),
                // Only SIGSTOP can get here, all others being blocked.
                (0, s) => signal = s,
                _ => signal = 0,
            }
        }
    }

    /// Back to an event-stop with the thread's own registers and mask; true for a job-control stop.
    pub(super) fn give_back(&self) -> std::result::Result<bool, Lost> {
        let mut signal = 0;
        let group = loop {
            let _ = sys::interrupt(self.tid);
            let _ = sys::cont(self.tid, signal);
            match self.wait()? {
                (libc::PTRACE_EVENT_STOP, stop) => break stop != libc::SIGTRAP,
                (0, s) if s != libc::SIGTRAP | 0x80 => signal = s,
                _ => signal = 0,
            }
        };
        let _ = sys::set_regs(self.tid, &self.saved);
        let _ = sys::set_sigmask(self.tid, self.mask);
        Ok(group)
    }

    /// (event, signal) of the next stop.
    pub(super) fn wait(&self) -> std::result::Result<(i32, i32), Lost> {
        loop {
            match sys::wait_for(self.tid) {
                Some((_, status)) if libc::WIFSTOPPED(status) => return Ok((status >> 16, libc::WSTOPSIG(status))),
                Some((_, status)) => return Err(Lost(status)),
                None => {
                    sys::sleep_until(None);
                }
            }
        }
    }
}

impl Owner {
    /// Execute `calls` one after the other while the target stands still; ends after the first that fails, whose
    /// result (a negative errno) is the last returned. `scratch` is in the target's memory meanwhile.
    pub fn remote(&mut self, pid: i32, calls: &[Call], scratch: &mut [u8]) -> Result<Vec<i64>> {
        self.stopped(pid, |owner| owner.remote_stopped(pid, calls, scratch))
    }

    /// Whether the thread that executes our calls may read the time stamp counter (prctl PR_SET_TSC; new threads have
    /// what their maker had). Asked with everything at a stand, so that what cannot be stopped shows before any change.
    pub fn may_read_tsc(&mut self, pid: i32) -> Result<bool> {
        let mut mode = [0u8; 4];
        let ask = Call::new(libc::SYS_prctl, &[Arg::Value(libc::PR_GET_TSC as u64), Arg::Scratch(0)]);
        self.attached(pid, |owner| {
            owner.stop_all(pid)?;
            owner.remote_stopped(pid, &[ask], &mut mode)
        })?;
        Ok(i32::from_ne_bytes(mode) != PR_TSC_SIGSEGV)
    }

    pub(super) fn remote_stopped(&mut self, pid: i32, calls: &[Call], scratch: &mut [u8]) -> Result<Vec<i64>> {
        let tid = self.pick(pid)?;
        self.remote_on(pid, tid, calls, scratch)
    }

    /// Same on one stopped thread; others may run.
    pub(super) fn remote_on(&mut self, pid: i32, tid: i32, calls: &[Call], scratch: &mut [u8]) -> Result<Vec<i64>> {
        let syscall_addr = self.find_syscall(pid, tid)?;
        let suspended = self.pass_seccomp(pid, tid)?;
        let done = self.borrow(pid, tid, syscall_addr, calls, scratch);
        if suspended {
            let _ = sys::set_options(tid, sys::OPTIONS);
        }
        done
    }

    fn borrow(&mut self, pid: i32, tid: i32, at: u64, calls: &[Call], scratch: &mut [u8]) -> Result<Vec<i64>> {
        let os = |e| Error::os(pid, "borrowing a thread", e);
        let mut saved = sys::get_regs(tid).map_err(os)?;
        if let Some(abort) = self.rseq_abort(pid, tid, saved.rip) {
            // What the kernel does to a thread that was interrupted in a restartable sequence; it would no longer see it.
            saved.rip = abort;
        }
        let mask = sys::get_sigmask(tid).map_err(os)?;
        sys::set_sigmask(tid, u64::MAX).map_err(os)?;
        let borrowed = Borrowed { tid, saved, mask, syscall_addr: at };
        let mut results = Vec::with_capacity(calls.len());
        let outcome = self.run_calls(pid, &borrowed, calls, scratch, &mut results);
        match outcome.and_then(|done| borrowed.give_back().map(|group| (done, group))) {
            Ok((done, group)) => {
                self.given_back(pid, &borrowed, group);
                done.map(|()| results)
            }
            Err(Lost(status)) => {
                self.on_exit(tid, status);
                Err(Error::gone(pid))
            }
        }
    }

    /// A borrowed thread is in an event-stop again.
    pub(super) fn given_back(&mut self, pid: i32, borrowed: &Borrowed, group: bool) {
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
        let mut page = 0;
        if !scratch.is_empty() {
            let prot = (libc::PROT_READ | libc::PROT_WRITE) as u64;
            let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
            let got = borrowed.call(libc::SYS_mmap, [0, len, prot, flags, u64::MAX, 0])?;
            if got < 0 {
                return Ok(Err(Error::os(pid, "mapping a page", -got as i32)));
            }
            page = got as u64;
        }
        let mut done = if scratch.is_empty() { Ok(()) } else { self.write_memory(pid, page, scratch) };
        if done.is_ok() {
            for call in calls {
                let args = call.args.map(|arg| match arg {
                    Arg::Value(value) => value,
                    Arg::Scratch(offset) => page.wrapping_add(offset),
                    Arg::Result { index, add } => results.get(index).map_or(0, |r| (*r as u64).wrapping_add(add)),
                });
                let result = borrowed.call(call.number, args)?;
                results.push(result);
                if (-4095..0).contains(&result) {
                    break;
                }
            }
        }
        if !scratch.is_empty() {
            done = done.and_then(|()| self.read_memory(pid, page, scratch));
            borrowed.call(libc::SYS_munmap, [page, len, 0, 0, 0, 0])?;
        }
        Ok(done)
    }

    /// The thread to borrow: no sibling (it has files of its own), 64-bit code, and rather one that was running the program than one in a call.
    fn pick(&mut self, pid: i32) -> Result<i32> {
        let proc = self.procs.get(&pid).ok_or_else(|| Error::gone(pid))?;
        let mut best: Option<(u32, i32)> = None;
        for (tid, thread) in &proc.threads {
            let State::Stopped { group } = thread.state else {
                continue;
            };
            if thread.sibling || thread.regs.cs != USER_CODE_SEGMENT {
                continue;
            }
            let mut cost = u32::from(group) * 4 + u32::from(thread.regs.orig_rax as i64 >= 0) * 2;
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
        let status = Status::read(tid).ok_or_else(|| Error::gone(pid))?;
        let refuse = |why: &str| Err(Error::new("seccomp", format!("process {pid} ({}) {why}", status.name)));
        if sys::dispatches_syscalls(tid) {
            return refuse("handles its own system calls (user dispatch), so none can be made in it");
        }
        if status.seccomp == 0 {
            return Ok(false);
        }
        match sys::set_options(tid, sys::OPTIONS | sys::SUSPEND_SECCOMP) {
            Ok(()) => Ok(true),
            Err(libc::ESRCH) => Err(Error::gone(pid)),
            Err(_) => refuse("filters its system calls (seccomp), which only root can suspend"),
        }
    }

    /// A `syscall` instruction in the vDSO or any other executable mapping.
    fn find_syscall(&mut self, pid: i32, tid: i32) -> Result<u64> {
        let known = self.proc(pid)?.syscall_addr;
        let mut bytes = [0u8; 2];
        if known != 0 && self.read_memory(pid, known, &mut bytes).is_ok() && bytes == [0x0f, 0x05] {
            return Ok(known);
        }
        // By a thread that lives: a first thread that has ended has no memory any more.
        let mut maps = procfs::maps(tid)?;
        maps.retain(|m| m.executable && m.name != "[vsyscall]");
        maps.sort_by_key(|m| m.name != "[vdso]");
        for map in maps {
            // The kernel's instruction is somewhere in the first pages of a libc or the vDSO; 4 MB reach into any text.
            let len = (map.end - map.start).min(4 << 20);
            let mut text = vec![0; usize::try_from(len).unwrap_or(0)];
            if self.read_memory(pid, map.start, &mut text).is_err() {
                continue;
            }
            if let Some(at) = text.windows(2).position(|w| w == [0x0f, 0x05]) {
                let found = map.start + at as u64;
                self.proc(pid)?.syscall_addr = found;
                return Ok(found);
            }
        }
        if Status::read(tid).is_none_or(|s| s.is_dead() || !s.has_memory) {
            return Err(Error::gone(pid));
        }
        Err(Error::new("unsupported", format!("process {pid} has no syscall instruction")))
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
