//! The one place where the reports of tracees (stops, exits) are answered.
//!
//! Whatever way a thread stops, while its process is to stand still it is sent on to an *event-stop* (PTRACE_INTERRUPT,
//! then resume): signals are delivered, calls finished. There the kernel is in its signal path, before any user code,
//! and still does its restart of interrupted calls when the thread goes on.

use super::owner::{open_memory, Goal, Owner, State};
use super::procfs::Status;
use super::spawn::{Event, EventKind, Halt};
use super::sys;

impl Owner {
    pub(super) fn dispatch(&mut self, tid: i32, status: i32) {
        if !libc::WIFSTOPPED(status) {
            return self.on_exit(tid, status);
        }
        let signal = libc::WSTOPSIG(status);
        let event = status >> 16;
        if self.leaving.contains(&tid) {
            return self.release_leaving(tid, event, signal);
        }
        let Some(pid) = self.owner_of(tid) else {
            // A new process of a target, with memory of its own: not ours to follow.
            let _ = sys::detach(tid, if event == 0 { signal } else { 0 });
            return;
        };
        match event {
            libc::PTRACE_EVENT_STOP => self.on_event_stop(pid, tid, signal),
            libc::PTRACE_EVENT_CLONE => {
                if let Ok(child) = sys::event_message(tid) {
                    self.on_clone(pid, tid, child as i32);
                }
                self.send_on(pid, tid, 0);
            }
            libc::PTRACE_EVENT_EXEC => self.on_exec(pid, tid),
            0 if signal == libc::SIGTRAP | 0x80 => {
                let thread = self.procs.get(&pid).and_then(|p| p.threads.get(&tid));
                let disturbed = self.calls.get(&tid).is_some_and(|call| call.disturbed);
                if disturbed || thread.is_some_and(|t| t.interrupted) {
                    super::calls::interrupt_again(tid);
                }
                match self.has_entered_call(tid) {
                    true => self.send_on(pid, tid, 0),
                    false => self.on_syscall_stop(pid, tid),
                }
            }
            0 => {
                let signal = self.on_signal(pid, tid, signal);
                if let Some(signal) = signal {
                    self.send_on(pid, tid, signal);
                }
            }
            _ => self.send_on(pid, tid, 0),
        }
    }

    /// The process that a stopped thread belongs to; a task that nobody announced yet is looked up.
    fn owner_of(&mut self, tid: i32) -> Option<i32> {
        if let Some(pid) = self.tids.get(&tid) {
            return Some(*pid);
        }
        let tgid = Status::read(tid)?.tgid;
        if self.procs.contains_key(&tgid) {
            self.add_thread(tgid, tid);
            return Some(tgid);
        }
        // Not a thread, but in the same memory: it has to stand still with the others.
        let pid = self.procs.keys().copied().find(|pid| sys::shares_memory(*pid, tid))?;
        self.add_sibling(pid, tid);
        Some(pid)
    }

    pub(super) fn add_thread(&mut self, pid: i32, tid: i32) {
        if let Some(proc) = self.procs.get_mut(&pid) {
            if !proc.threads.contains_key(&tid) {
                proc.add(tid);
                self.tids.insert(tid, pid);
            }
        }
    }

    fn on_clone(&mut self, pid: i32, tid: i32, child: i32) {
        // The child may have stopped, or even died, before its parent told us. A stranger's first stop sorts it out.
        if Status::read(child).is_some_and(|s| s.tgid == pid) {
            self.add_thread(pid, child);
            if let Some(proc) = self.procs.get_mut(&pid) {
                proc.inherit_mask(tid, child);
            }
            self.shared.push(Event { kind: EventKind::Clone, pid, tid, value: child.into() });
        }
    }

    fn on_event_stop(&mut self, pid: i32, tid: i32, signal: i32) {
        let group = signal != libc::SIGTRAP;
        let Some(thread) = self.procs.get(&pid).and_then(|p| p.threads.get(&tid)) else {
            return;
        };
        let was_group_stopped = thread.was_group_stopped;
        if group {
            // A job-control stop ends a call without us, too.
            self.return_from_call(tid);
        }
        let Ok(mut regs) = sys::get_regs(tid) else {
            return;
        };
        if !group && !was_group_stopped {
            self.rewind_call(tid, &mut regs);
        }
        let options = self.options_of(pid);
        let Some(proc) = self.procs.get_mut(&pid) else {
            return;
        };
        let Some(thread) = proc.threads.get_mut(&tid) else {
            return;
        };
        if std::mem::take(&mut thread.adopted) {
            // Only a dying thread refuses.
            let _ = sys::set_options(tid, options);
        }
        thread.regs = regs;
        // Not at a new thread's first stop: libc makes threads with all signals blocked for a moment.
        if thread.interrupted && proc.watch.as_ref().is_some_and(|w| !w.is_load(regs.rip)) {
            thread.observe_stopped(tid);
        }
        thread.interrupted = false;
        let parked = thread.parked;
        thread.was_group_stopped = group;
        proc.set_state(tid, State::Stopped { group });
        if parked {
            self.park(pid, tid);
        }
        if self.procs.get(&pid).is_some_and(|p| p.has_to_stop(tid)) {
            self.announce_if_still(pid);
        } else {
            self.start(pid, tid);
        }
    }

    /// Let a thread that is in an event-stop run (or stay in its job-control stop).
    pub(super) fn start(&mut self, pid: i32, tid: i32) {
        let Some(proc) = self.procs.get_mut(&pid) else {
            return;
        };
        let thread = proc.threads.get(&tid).filter(|t| !t.parked);
        let Some((State::Stopped { group }, sibling)) = thread.map(|t| (t.state, t.sibling)) else {
            return;
        };
        let stepping = proc.stepping && !sibling;
        proc.set_state(tid, State::Running);
        if group {
            self.return_from_call(tid);
        } else if self.resume_into_call(tid, 0) {
            return;
        }
        // A thread that dies meanwhile reports its exit.
        let _ = match (group, stepping) {
            (true, _) => sys::listen(tid),
            (false, true) => sys::cont_syscall(tid, 0),
            (false, false) => sys::cont(tid, 0),
        };
    }

    /// Resume a thread from a stop that is no event-stop; towards one where its process is to stand still.
    pub(super) fn send_on(&mut self, pid: i32, tid: i32, signal: i32) {
        let Some(proc) = self.procs.get_mut(&pid) else {
            return;
        };
        let stop = proc.has_to_stop(tid) || proc.threads.get(&tid).is_some_and(|t| t.parked);
        let stepping = proc.stepping && proc.threads.get(&tid).is_none_or(|t| !t.sibling);
        if let Some(thread) = proc.threads.get_mut(&tid) {
            if stop {
                thread.interrupted = sys::interrupt(tid).is_ok();
            }
        }
        // As above: death is reported.
        let _ = if stepping && !stop { sys::cont_syscall(tid, signal) } else { sys::cont(tid, signal) };
    }

    /// What to deliver for a signal-delivery-stop; None where the thread was taken care of.
    fn on_signal(&mut self, pid: i32, tid: i32, signal: i32) -> Option<i32> {
        if let Some(answer) = self.fix_fault(pid, tid, signal).or_else(|| self.show_original(pid, tid, signal)) {
            return answer;
        }
        (!self.keep_in_call(tid, signal)).then_some(signal)
    }

    fn on_exec(&mut self, pid: i32, tid: i32) {
        // The kernel reports a program's start under its process's id.
        if tid != pid {
            if let Some(proc) = self.procs.get_mut(&pid) {
                proc.remove(tid);
            }
            self.let_go(tid, State::Stopped { group: false });
            return self.announce_if_still(pid);
        }
        self.let_siblings_go(pid);
        self.tids.retain(|_, owner| *owner != pid);
        self.tids.insert(pid, pid);
        self.forget_program(pid);
        let memory = open_memory(pid);
        let Some(proc) = self.procs.get_mut(&pid) else {
            return;
        };
        proc.threads.clear();
        proc.running = 0;
        proc.add(pid);
        proc.generation += 1;
        proc.watch = None;
        proc.mem = memory.ok();
        if proc.stepping {
            proc.goal = Goal::Stop;
            proc.announce = Some(Halt::Exec);
        }
        self.shared.push(Event { kind: EventKind::Exec, pid, tid, value: 0 });
        self.send_on(pid, pid, 0);
    }

    pub(super) fn on_exit(&mut self, tid: i32, status: i32) {
        self.leaving.remove(&tid);
        self.calls.remove(&tid);
        self.sleeps.remove(&tid);
        let was_launched = self.launched.remove(&tid);
        if was_launched {
            self.statuses.insert(tid, status);
        }
        let pid = self.tids.remove(&tid);
        let mut ended = was_launched;
        if let Some(pid) = pid {
            if let Some(proc) = self.procs.get_mut(&pid) {
                proc.remove(tid);
                if tid == pid || proc.threads.is_empty() {
                    // Of a process that is traced in part, others may live on.
                    let partial = proc.partial;
                    self.let_siblings_go(pid);
                    self.procs.remove(&pid);
                    self.tids.retain(|_, owner| *owner != pid);
                    if !partial {
                        self.forget_program(pid);
                    }
                    ended |= !partial;
                } else {
                    self.announce_if_still(pid);
                }
            }
        }
        if ended {
            let pid = pid.unwrap_or(tid);
            self.shared.push(Event { kind: EventKind::Exit, pid, tid, value: status.into() });
            self.shared.set_halt(pid, Some(Halt::Exit));
        }
    }

    pub(super) fn announce_if_still(&mut self, pid: i32) {
        let Some(proc) = self.procs.get_mut(&pid) else {
            return;
        };
        if proc.is_still() {
            if let Some(halt) = proc.announce.take() {
                proc.held = true;
                self.shared.set_halt(pid, Some(halt));
            }
        }
    }
}
