//! Bringing all threads of a process to a stand and letting them go on as if nothing had been.

use std::time::{Duration, Instant};

use super::owner::{Goal, Owner, Proc, State, Thread};
use super::procfs::{self, Status};
use super::{sys, Error, Result};

/// How long threads may take to stop before everything is let go again.
const STOP_LIMIT: Duration = Duration::from_millis(100);
/// When to look whether a thread that does not report has ended.
const SWEEP_AFTER: Duration = Duration::from_millis(3);

/// Not in every version of the libc crate (arch/x86/entry/syscalls/syscall_64.tbl).
const SYS_IO_PGETEVENTS: i64 = 333;

/// Calls that the kernel ends with EINTR, rather than restarting them, when a tracer stops the thread (signal(7), "Interruption
/// of system calls and library functions by stop signals"; io_uring_enter from its source). An EINTR of theirs means that
/// nothing was done yet, so they can be entered again. `close` is not among them, and must not be.
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
];

/// What a call returns inside the kernel that is to be restarted (include/linux/errno.h).
const RESTARTS: [i64; 4] = [-512, -513, -514, -516];
const RESTART_SYSCALL: u64 = libc::SYS_restart_syscall as u64;
/// Calls that `restart_syscall` stands for.
const WITH_RESTART_BLOCK: [i64; 4] = [libc::SYS_nanosleep, libc::SYS_clock_nanosleep, libc::SYS_poll, libc::SYS_futex];

pub fn may_return_eintr(call: i64) -> bool {
    ENTERED_AGAIN.contains(&call)
}

pub fn returns_eintr(regs: &sys::Regs) -> bool {
    regs.rax as i64 == -i64::from(libc::EINTR) && ENTERED_AGAIN.contains(&(regs.orig_rax as i64))
}

/// The registers with which a thread in an event-stop goes on where the kernel does not restart its call for it: as it
/// would, but for the timeouts of nanosleep, poll and futex, which start anew.
pub fn restarted(tid: i32, regs: &sys::Regs) -> sys::Regs {
    let mut out = *regs;
    if regs.orig_rax as i64 >= 0 && (RESTARTS.contains(&(regs.rax as i64)) || returns_eintr(regs)) {
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

/// Make a call that our stop interrupted start over, unless a handler of the program is due: then EINTR is right.
pub fn rewind(tid: i32, regs: &mut sys::Regs) {
    if !returns_eintr(regs) || Status::read(tid).is_none_or(|s| s.handler_is_due()) {
        return;
    }
    let mut again = *regs;
    again.rax = regs.orig_rax;
    again.rip = regs.rip.wrapping_sub(2);
    again.orig_rax = u64::MAX;
    if sys::set_regs(tid, &again).is_ok() {
        *regs = again;
    }
}

fn interrupt_running(proc: &mut Proc, siblings: bool) {
    for (tid, thread) in proc.threads.iter_mut().filter(|(_, t)| t.sibling == siblings) {
        if thread.state == State::Running {
            thread.interrupted = sys::interrupt(*tid).is_ok();
        }
    }
}

impl Owner {
    /// Bring every task of `pid` to an event-stop. On any error all of them run again.
    pub(super) fn stop(&mut self, pid: i32) -> Result<()> {
        let begun = Instant::now();
        let deadline = begun + STOP_LIMIT;
        let mut sweep = begun + SWEEP_AFTER;
        let generation = self.proc(pid)?.generation;
        let proc = self.proc(pid)?;
        proc.goal = Goal::Stop;
        proc.holding_siblings = false;
        interrupt_running(proc, false);
        loop {
            loop {
                let proc = self.proc(pid)?;
                if proc.generation != generation {
                    self.go(pid);
                    return Err(Error::new("gone", format!("process {pid} executes another program")));
                }
                if proc.is_still() {
                    if !proc.threads.values().any(Thread::is_stopped) {
                        return Err(Error::gone(pid));
                    }
                    if proc.running == 0 {
                        break;
                    }
                    proc.holding_siblings = true;
                    interrupt_running(proc, true);
                }
                match self.next_report(deadline.min(sweep)) {
                    Some((tid, status)) => self.dispatch(tid, status),
                    None if Instant::now() < deadline => {
                        sweep = Instant::now() + SWEEP_AFTER;
                        self.sweep(pid);
                    }
                    None => return Err(self.give_up(pid)),
                }
            }
            match self.find_new_tasks(pid) {
                Ok(true) => {}
                Ok(false) => return Ok(()),
                Err(e) => {
                    self.go(pid);
                    return Err(e);
                }
            }
        }
    }

    /// Undo a stop that did not come about.
    fn give_up(&mut self, pid: i32) -> Error {
        let stuck = self.procs.get(&pid).and_then(|p| p.threads.iter().find(|(_, t)| t.state == State::Running));
        let stuck = stuck.map_or_else(String::new, |(tid, _)| format!(": thread {tid} did not stop"));
        self.go(pid);
        let limit = STOP_LIMIT.as_millis();
        Error::new("busy", format!("process {pid} does not come to a stand within {limit} ms{stuck}"))
    }

    /// With all known tasks at a stand, seize those that appeared before the kernel told us of new ones.
    /// True where there were any.
    fn find_new_tasks(&mut self, pid: i32) -> Result<bool> {
        if self.proc(pid)?.complete {
            return Ok(false);
        }
        let found = self.seize_tasks(pid)?;
        let proc = self.proc(pid)?;
        proc.complete = !found;
        for (tid, thread) in &mut proc.threads {
            if thread.state == State::Running {
                thread.interrupted = sys::interrupt(*tid).is_ok();
            }
        }
        Ok(found)
    }

    /// Notice threads that ended without a report: a leader stays a zombie until its threads are gone.
    fn sweep(&mut self, pid: i32) {
        let Some(proc) = self.procs.get_mut(&pid) else {
            return;
        };
        let running = proc.threads.iter().filter(|(_, t)| t.state == State::Running);
        for tid in running.map(|(tid, _)| *tid).collect::<Vec<_>>() {
            match Status::read(tid) {
                Some(status) if status.is_dead() && tid == status.tgid => proc.set_state(tid, State::Dead),
                Some(_) => {}
                None => {
                    proc.remove(tid);
                    self.tids.remove(&tid);
                }
            }
        }
    }

    /// Let all threads run again, unless the process is held for `next_mapping_event`.
    pub(super) fn go(&mut self, pid: i32) {
        let Some(proc) = self.procs.get_mut(&pid) else {
            return;
        };
        if proc.held {
            return;
        }
        proc.goal = Goal::Run;
        proc.holding_siblings = false;
        let mut next = 0;
        // By key, since starting a thread may change the table; nothing is allocated.
        while let Some(tid) = self.procs.get(&pid).and_then(|p| p.threads.range(next..).next()).map(|(tid, _)| *tid) {
            self.start(pid, tid);
            next = tid + 1;
        }
    }

    /// Run `work` with all tasks of `pid` at a stand; a process that is not attached is attached for that time only.
    pub(super) fn stopped<T>(&mut self, pid: i32, work: impl FnOnce(&mut Owner) -> Result<T>) -> Result<T> {
        self.attached(pid, |owner| {
            owner.stop(pid)?;
            work(owner)
        })
    }

    /// Run `work` with `pid` attached; afterwards it runs on, whether `work` left it standing or not.
    pub(super) fn attached<T>(&mut self, pid: i32, work: impl FnOnce(&mut Owner) -> Result<T>) -> Result<T> {
        if self.procs.contains_key(&pid) {
            let done = work(self);
            self.go(pid);
            return done;
        }
        self.attach(pid)?;
        let done = work(self);
        match (done, self.detach(pid)) {
            (Ok(_), Err(e)) if e.kind != "gone" => Err(e),
            (done, _) => done,
        }
    }

    /// Seize every task that is not yet ours; true where there were any.
    pub(super) fn seize_tasks(&mut self, pid: i32) -> Result<bool> {
        let mut found = false;
        for tid in procfs::tasks(pid)? {
            if self.proc(pid)?.threads.contains_key(&tid) {
                continue;
            }
            match sys::seize(tid) {
                Ok(()) => {
                    self.add_thread(pid, tid);
                    found = true;
                }
                Err(errno) => match Status::read(tid) {
                    None => {}
                    // Ours since its creation; its first stop is on its way.
                    Some(status) if status.tracer == self.me => {
                        self.add_thread(pid, tid);
                        found = true;
                    }
                    Some(status) if status.is_dead() => {}
                    Some(status) => return Err(super::attach::explain(pid, &status, errno)),
                },
            }
        }
        Ok(found)
    }
}
