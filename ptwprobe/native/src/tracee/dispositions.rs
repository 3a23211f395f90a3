//! What the program does on SIGSEGV and SIGBUS, known from before a fault of our loads and put back after it.
//!
//! Such a fault is *forced* on the thread (`force_sig_info_to_task`, kernel/signal.c): where the program blocks or ignores the
//! signal, the kernel sets its handler to the default and unblocks it, before any tracer hears of it. Flags, mask and
//! restorer stay. Nothing that a stub could execute instead fails without a signal, so what the kernel overwrites has
//! to be known beforehand: it is looked up every 20 ms while loads are watched, and at every stop of ours. What such a look
//! shows as default or unblocked may be a fault that is still on its way to us; only a stop in which no thread stands at a load
//! tells.
//! A program with a handler tells by itself whether the thread blocked the signal: only then the handler is lost.

use std::time::{Duration, Instant};

use super::owner::{Owner, Proc, Thread};
use super::procfs::{bit, Status};
use super::remote::{Arg, Call};
use super::{sys, Error, Result};

pub const SIGNALS: [i32; 2] = [libc::SIGSEGV, libc::SIGBUS];
/// Looking at a thread takes some 15 µs.
const SURVEY_EVERY: Duration = Duration::from_millis(20);
const THREADS_A_SURVEY: usize = 8;
/// How soon after the stop before a process may be stopped to tell what a survey could not.
const ASK_AGAIN_AFTER: Duration = Duration::from_millis(100);
/// How often a handler is read again where a blocked signal could lose it: reading stops a process.
const READ_AGAIN_EVERY: Duration = Duration::from_secs(1);
/// `struct kernel_sigaction`: handler, flags, restorer, mask.
const SIGACTION: usize = 32;
const HANDLER: std::ops::Range<usize> = 0..8;
const IGNORE: u64 = 1;
/// The signals that libc keeps to itself (SIGCANCEL, SIGSETXID). Only libc's own critical sections (of pthread_create, say) block
/// them, and nothing is to be learned there.
const INTERNAL: u64 = 1 << 31 | 1 << 32;
/// Calls that lend the thread another mask while it waits.
const LENDING: &[&str] = &[
    "128", // rt_sigtimedwait
    "130", // rt_sigsuspend
    "270", // pselect6
    "271", // ppoll
    "281", // epoll_pwait
    "333", // io_pgetevents
    "441", // epoll_pwait2
];

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Disposition {
    #[default]
    Default,
    Ignored,
    Caught,
}

impl Disposition {
    fn of(status: &Status, signal: i32) -> Disposition {
        let bit = bit(signal);
        match (status.caught & bit != 0, status.ignored & bit != 0) {
            (true, _) => Disposition::Caught,
            (_, true) => Disposition::Ignored,
            _ => Disposition::Default,
        }
    }
}

type RawAction = [u8; SIGACTION];

fn handler(action: &RawAction) -> u64 {
    action.first_chunk().map_or(0, |b| u64::from_ne_bytes(*b))
}

fn with_handler(action: &RawAction, handler: u64) -> RawAction {
    let mut out = *action;
    if let Some(place) = out.get_mut(HANDLER) {
        place.copy_from_slice(&handler.to_ne_bytes());
    }
    out
}

/// All that the kernel leaves alone is the same.
fn same_but_handler(a: &RawAction, b: &RawAction) -> bool {
    a.get(HANDLER.end..) == b.get(HANDLER.end..)
}

#[derive(Debug, Clone, Copy, Default)]
struct Known {
    disposition: Disposition,
    /// As it was when the disposition became `Caught`, or the watch began.
    action: RawAction,
}

/// What has to be asked in a stop.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Doubt {
    #[default]
    None,
    /// A signal seems to be default, or unblocked, now.
    Reset,
    /// There is a handler that was not there before.
    Handler,
}

/// Of one watched process.
pub struct Dispositions {
    signals: [Known; 2],
    /// The thread that a survey begins with.
    next_tid: i32,
    due: Instant,
    read_at: Instant,
    doubt: Doubt,
}

fn slot(signal: i32) -> usize {
    usize::from(signal == libc::SIGBUS)
}

impl Dispositions {
    fn new(actions: &[u8], status: &Status) -> Dispositions {
        let now = Instant::now();
        let mut signals = [Known::default(); 2];
        for ((known, signal), action) in signals.iter_mut().zip(SIGNALS).zip(actions.chunks_exact(SIGACTION)) {
            known.action.copy_from_slice(action);
            known.disposition = Disposition::of(status, signal);
        }
        Dispositions { signals, next_tid: 0, due: now + SURVEY_EVERY, read_at: now, doubt: Doubt::None }
    }

    fn observe(&mut self, status: &Status) {
        for (known, signal) in self.signals.iter_mut().zip(SIGNALS) {
            match Disposition::of(status, signal) {
                now if now == known.disposition => {}
                Disposition::Default => self.doubt = self.doubt.max(Doubt::Reset),
                Disposition::Caught => self.doubt = Doubt::Handler,
                Disposition::Ignored => known.disposition = Disposition::Ignored,
            }
        }
    }

    fn wants_reading(&self, in_danger: bool, now: Instant) -> bool {
        let age = now.saturating_duration_since(self.read_at);
        match self.doubt {
            Doubt::Handler => true,
            Doubt::Reset => age >= ASK_AGAIN_AFTER,
            Doubt::None => in_danger && age >= READ_AGAIN_EVERY,
        }
    }

    fn caught(&self) -> u64 {
        let caught = self.signals.iter().zip(SIGNALS).filter(|(k, _)| k.disposition == Disposition::Caught);
        caught.fold(0, |all, (_, signal)| all | bit(signal))
    }
}

impl Thread {
    /// Learn from a mask whether the thread blocks the signals of faults.
    fn observe_mask(&mut self, mask: u64) {
        if mask & INTERNAL != INTERNAL {
            self.blocked = SIGNALS.iter().fold(0, |all, signal| all | mask & bit(*signal));
        }
    }

    /// Same from the mask of a thread in an event-stop that we asked for.
    pub(super) fn observe_stopped(&mut self, tid: i32) {
        if let Ok(mask) = sys::get_sigmask(tid) {
            self.observe_mask(mask);
        }
    }
}

impl Proc {
    /// A new thread has the mask of its maker.
    pub(super) fn inherit_mask(&mut self, maker: i32, child: i32) {
        let blocked = self.threads.get(&maker).map_or(0, |t| t.blocked);
        if let Some(thread) = self.threads.get_mut(&child) {
            thread.blocked = blocked;
        }
    }
}

/// Whether the mask in /proc is the thread's own, not one that a waiting call lends it.
fn has_own_mask(tid: i32, status: &Status) -> bool {
    let in_lending_call = |text: String| text.split(' ').next().is_some_and(|number| LENDING.contains(&number));
    status.state == 'R' || std::fs::read_to_string(format!("/proc/{tid}/syscall")).is_ok_and(|t| !in_lending_call(t))
}

impl Owner {
    /// The process is stopped and watched from now on.
    pub(super) fn learn_dispositions(&mut self, pid: i32) -> Result<Dispositions> {
        let actions = self.read_actions(pid)?;
        self.stop(pid)?;
        let proc = self.proc(pid)?;
        let mut any = None;
        for (tid, thread) in proc.threads.iter_mut().filter(|(_, t)| t.is_stopped()) {
            thread.observe_stopped(*tid);
            any = any.or(Some(*tid));
        }
        let status = any.and_then(Status::read).ok_or_else(|| Error::gone(pid))?;
        Ok(Dispositions::new(&actions, &status))
    }

    /// Asks in a stop; fails where a fault is on its way.
    fn read_actions(&mut self, pid: i32) -> Result<Vec<u8>> {
        let mut scratch = vec![0u8; SIGNALS.len() * SIGACTION];
        let ask = |(i, signal): (usize, &i32)| {
            let at = Arg::Scratch((i * SIGACTION) as u64);
            Call::new(libc::SYS_rt_sigaction, &[Arg::Value(*signal as u64), Arg::Value(0), at, Arg::Value(8)])
        };
        let calls: Vec<Call> = SIGNALS.iter().enumerate().map(ask).collect();
        self.stopped(pid, |owner| {
            let proc = owner.proc(pid)?;
            let at_load = |t: &Thread| proc.watch.as_ref().is_some_and(|w| w.is_load(t.regs.rip));
            if proc.threads.values().any(at_load) {
                return Err(Error::new("busy", format!("a fault of process {pid} is on its way")));
            }
            owner.remote_stopped(pid, &calls, &mut scratch)
        })?;
        Ok(scratch)
    }

    /// When the next survey is due; None while nothing is watched.
    pub(super) fn survey_due(&self) -> Option<Instant> {
        self.procs.values().filter_map(|p| p.watch.as_ref()).map(|w| w.dispositions.due).min()
    }

    /// Look at the masks and dispositions of watched processes, some threads at a time.
    pub(super) fn survey(&mut self) {
        let now = Instant::now();
        let due = |p: &Proc| p.watch.as_ref().is_some_and(|w| w.dispositions.due <= now);
        for pid in self.procs.iter().filter(|(_, p)| due(p)).map(|(pid, _)| *pid).collect::<Vec<_>>() {
            let Some(proc) = self.procs.get_mut(&pid) else { continue };
            survey_process(proc, now);
            let in_danger = |d: &Dispositions| proc.threads.values().any(|t| t.blocked & d.caught() != 0);
            let asks = |d: &Dispositions| d.wants_reading(in_danger(d), now);
            if proc.watch.as_ref().is_some_and(|w| asks(&w.dispositions)) {
                // Else it is asked again with the next survey.
                if let Ok(actions) = self.read_actions(pid) {
                    self.take_actions(pid, &actions);
                }
            }
        }
    }

    fn take_actions(&mut self, pid: i32, actions: &[u8]) {
        let Some(watch) = self.procs.get_mut(&pid).and_then(|p| p.watch.as_mut()) else { return };
        watch.dispositions.read_at = Instant::now();
        watch.dispositions.doubt = Doubt::None;
        for (known, action) in watch.dispositions.signals.iter_mut().zip(actions.chunks_exact(SIGACTION)) {
            known.action.copy_from_slice(action);
            known.disposition = match handler(&known.action) {
                0 => Disposition::Default,
                IGNORE => Disposition::Ignored,
                _ => Disposition::Caught,
            };
        }
    }

    /// Give the program back what the kernel took from it with the fault that `tid` stands at. False where there was
    /// nothing to restore; true where the thread had to be borrowed for it, and is in an event-stop or runs now.
    pub(super) fn restore_action(&mut self, pid: i32, tid: i32, signal: i32) -> Result<bool> {
        let proc = self.procs.get_mut(&pid).ok_or_else(|| Error::gone(pid))?;
        let bit = bit(signal);
        let Some(watch) = proc.watch.as_ref() else { return Ok(false) };
        let known = watch.dispositions.signals.get(slot(signal)).copied().unwrap_or_default();
        let blocked = proc.threads.get(&tid).is_some_and(|t| t.blocked & bit != 0);
        if known.disposition == Disposition::Default && !blocked {
            return Ok(false);
        }
        let status = Status::read(tid).ok_or_else(|| Error::gone(pid))?;
        if (status.caught | status.ignored) & bit != 0 {
            return Ok(false);
        }
        let other_blocks = proc.threads.iter().any(|(other, t)| *other != tid && t.blocked & bit != 0);
        // A handler is lost only where the signal was blocked, even if no survey has seen that yet.
        if blocked || known.disposition == Disposition::Caught && !other_blocks {
            let mask = sys::get_sigmask(tid).map_err(|e| Error::os(pid, "reading a signal mask", e))?;
            sys::set_sigmask(tid, mask | bit).map_err(|e| Error::os(pid, "restoring a signal mask", e))?;
        }
        if known.disposition == Disposition::Default {
            return Ok(false);
        }
        self.put_back(pid, tid, signal, known)?;
        if self.proc(pid)?.has_to_stop(tid) {
            self.announce_if_still(pid);
        } else {
            self.start(pid, tid);
        }
        Ok(true)
    }

    fn put_back(&mut self, pid: i32, tid: i32, signal: i32, known: Known) -> Result<()> {
        let wanted = match known.disposition {
            Disposition::Ignored => with_handler(&known.action, IGNORE),
            _ => known.action,
        };
        let found = self.exchange_action(pid, tid, signal, &wanted)?;
        if handler(&found) == 0 && same_but_handler(&found, &wanted) {
            return Ok(());
        }
        // Not the action that we knew: what is left of it is right, and only the handler is missing, if that.
        let ignored = handler(&found) == 0 && known.disposition == Disposition::Ignored;
        let right = if ignored { with_handler(&found, IGNORE) } else { found };
        self.exchange_action(pid, tid, signal, &right)?;
        if let Some(watch) = self.procs.get_mut(&pid).and_then(|p| p.watch.as_mut()) {
            if let Some(known) = watch.dispositions.signals.get_mut(slot(signal)) {
                known.action = right;
            }
        }
        Ok(())
    }

    /// Set an action; returns what was there.
    fn exchange_action(&mut self, pid: i32, tid: i32, signal: i32, action: &RawAction) -> Result<RawAction> {
        let mut scratch = [[0u8; SIGACTION], *action];
        let new = Arg::Scratch(SIGACTION as u64);
        let args = [Arg::Value(signal as u64), new, Arg::Scratch(0), Arg::Value(8)];
        let call = Call::new(libc::SYS_rt_sigaction, &args);
        self.remote_on(pid, tid, &[call], scratch.as_flattened_mut())?;
        Ok(scratch[0])
    }
}

fn survey_process(proc: &mut Proc, now: Instant) {
    let Some(watch) = proc.watch.as_mut() else { return };
    let dispositions = &mut watch.dispositions;
    dispositions.due = now + SURVEY_EVERY;
    let from = dispositions.next_tid;
    let own = |t: &Thread| !t.sibling;
    let after =
        proc.threads.range(from..).chain(proc.threads.range(..from)).filter(|(_, t)| own(t)).map(|(tid, _)| *tid);
    let mut last = from;
    for tid in after.take(THREADS_A_SURVEY).collect::<Vec<_>>() {
        last = tid + 1;
        let Some(status) = Status::read(tid).filter(|s| !s.is_dead()) else { continue };
        dispositions.observe(&status);
        let Some(thread) = proc.threads.get_mut(&tid) else { continue };
        let all = SIGNALS.iter().fold(0, |all, signal| all | bit(*signal));
        let (more, less) = (status.blocked & !thread.blocked & all, thread.blocked & !status.blocked);
        if more | less != 0 && has_own_mask(tid, &status) {
            thread.observe_mask(status.blocked | less);
            if less != 0 {
                dispositions.doubt = dispositions.doubt.max(Doubt::Reset);
            }
        }
    }
    dispositions.next_tid = last;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(blocked: u64, ignored: u64, caught: u64) -> Status {
        Status { blocked, ignored, caught, ..Status::default() }
    }

    #[test]
    fn what_a_fault_on_its_way_can_look_like_is_not_taken_for_granted() {
        let segv = bit(libc::SIGSEGV);
        let mut known = Dispositions::new(&[0; 2 * SIGACTION], &status(0, 0, 0));
        let now = known.read_at;
        known.observe(&status(0, segv, 0));
        assert_eq!((known.signals[0].disposition, known.doubt), (Disposition::Ignored, Doubt::None));
        assert!(!known.wants_reading(false, now) && !known.wants_reading(true, now));
        known.observe(&status(0, 0, 0));
        assert_eq!((known.signals[0].disposition, known.doubt), (Disposition::Ignored, Doubt::Reset));
        assert!(!known.wants_reading(false, now) && known.wants_reading(false, now + ASK_AGAIN_AFTER));
        known.observe(&status(0, 0, segv));
        assert_eq!((known.signals[0].disposition, known.doubt), (Disposition::Ignored, Doubt::Handler));
        assert!(known.wants_reading(false, now));
    }

    #[test]
    fn a_mask_of_libcs_own_critical_section_says_nothing() {
        let mut thread = Thread::running();
        thread.observe_mask(u64::MAX);
        assert_eq!(thread.blocked, 0);
        thread.observe_mask(!INTERNAL);
        assert_eq!(thread.blocked, bit(libc::SIGSEGV) | bit(libc::SIGBUS));
    }

    #[test]
    fn the_handler_is_the_first_word_and_the_rest_is_compared() {
        let mut action = [7u8; SIGACTION];
        let ignoring = with_handler(&action, IGNORE);
        assert_eq!(handler(&ignoring), IGNORE);
        assert!(same_but_handler(&action, &ignoring));
        action[20] = 0;
        assert!(!same_but_handler(&action, &ignoring));
    }
}
