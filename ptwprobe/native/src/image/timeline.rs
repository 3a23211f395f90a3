//! The address spaces of a trace, and whose is seen on a thread or a CPU at a time.

use std::collections::HashMap;
use std::sync::Arc;

use super::files::{Content, Files, Note};
use super::space::Space;
use crate::flow::code::Code;
use crate::flow::context::{Context, Schedule, Spaces};

/// Made by `Builder`.
pub struct Timeline {
    pub(super) spaces: Vec<Space>,
    /// (TSC, space) of each process, sorted.
    pub(super) history: HashMap<u32, Vec<(u64, u32)>>,
    /// (TSC, process) of each thread, sorted.
    pub(super) threads: HashMap<u32, Vec<(u64, u32)>>,
    pub(super) switches: HashMap<u32, Switches>,
    pub(super) files: Arc<Files>,
    pub(super) notes: Vec<String>,
}

/// What a CPU executes. Where the process is not told it is that of the thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Who {
    pub pid: Option<u32>,
    pub tid: u32,
}

/// Where code is from: a file by its number, and an offset in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub file: u32,
    pub offset: u64,
}

/// Who ran on a CPU.
#[derive(Default)]
pub struct Switches {
    /// By time: of the recording's clock first, then TSC.
    list: Vec<(u64, Option<Who>)>,
    closed: bool,
}

impl Switches {
    pub(super) fn push(&mut self, ns: u64, who: Option<Who>) {
        if self.list.last().is_none_or(|&(_, before)| before != who) {
            self.list.push((ns, who));
        }
    }

    /// From `ns` on nothing is known, whatever comes later. True the first time.
    pub(super) fn close(&mut self, ns: u64) -> bool {
        let first = !self.closed;
        if first {
            self.push(ns, None);
        }
        self.closed = true;
        first
    }

    pub(super) fn convert(&mut self, tsc: impl Fn(u64) -> u64) {
        self.list.iter_mut().for_each(|(time, _)| *time = tsc(*time));
        self.list.sort_by_key(|&(tsc, _)| tsc);
    }
}

impl Timeline {
    /// The contexts of a thread's stream.
    #[must_use]
    pub fn thread(&self, tid: u32) -> Schedule {
        let mut schedule = Schedule::default();
        // A thread that no record speaks of may be a process that one does.
        let alone = [(0, tid)];
        let processes = match self.threads.get(&tid) {
            Some(processes) => processes.as_slice(),
            None if self.history.contains_key(&tid) => &alone,
            None => return Schedule::constant(Context { space: 0, pid: None, tid: Some(tid) }),
        };
        for (i, &(begin, pid)) in processes.iter().enumerate() {
            // What its first record says was so before it, too.
            let begin = if i == 0 { 0 } else { begin };
            let end = processes.get(i + 1).map_or(u64::MAX, |&(next, _)| next);
            self.add(&mut schedule, begin, end, Some(Who { pid: Some(pid), tid }));
        }
        schedule
    }

    /// The contexts of a CPU's stream.
    #[must_use]
    pub fn cpu(&self, cpu: u32) -> Schedule {
        let mut schedule = Schedule::default();
        let list = self.switches.get(&cpu).map(|switches| switches.list.as_slice()).unwrap_or_default();
        for (i, &(begin, who)) in list.iter().enumerate() {
            self.add(&mut schedule, begin, list.get(i + 1).map_or(u64::MAX, |&(next, _)| next), who);
        }
        schedule
    }

    /// `who` runs from `begin` to `end`.
    fn add(&self, schedule: &mut Schedule, begin: u64, end: u64, who: Option<Who>) {
        let Some(Who { pid, tid }) = who else { return schedule.push(begin, Context::default()) };
        let Some(pid) = pid.or_else(|| self.process_of(tid, begin)) else {
            return schedule.push(begin, Context { space: 0, pid: None, tid: Some(tid) });
        };
        let history = self.history.get(&pid).map(Vec::as_slice).unwrap_or_default();
        let context = |space| Context { space, pid: Some(pid), tid: Some(tid) };
        let next = history.partition_point(|&(tsc, _)| tsc <= begin);
        let space = next.checked_sub(1).and_then(|at| history.get(at)).map_or(0, |&(_, space)| space);
        schedule.push(begin, context(space));
        for &(tsc, space) in history.get(next..).unwrap_or_default().iter().take_while(|&&(tsc, _)| tsc < end) {
            schedule.push(tsc, context(space));
        }
    }

    fn process_of(&self, tid: u32, tsc: u64) -> Option<u32> {
        let processes = self.threads.get(&tid)?;
        let next = processes.partition_point(|&(begin, _)| begin <= tsc);
        processes.get(next.saturating_sub(1)).map(|&(_, pid)| pid)
    }

    /// The space of process `pid` at `tsc`, 0 if it has none.
    #[must_use]
    pub fn process(&self, pid: u32, tsc: u64) -> u32 {
        let mut schedule = Schedule::default();
        self.add(&mut schedule, tsc, tsc, Some(Who { pid: Some(pid), tid: pid }));
        schedule.at(tsc).space
    }

    /// Which file the code at `ip` of a space is from.
    #[must_use]
    pub fn place(&self, space: u32, ip: u64) -> Option<Place> {
        let region = self.spaces.get(space as usize)?.regions.at(ip)?;
        let offset = region.source.offset.wrapping_add(ip.wrapping_sub(region.start));
        Some(Place { file: region.source.file, offset })
    }

    /// The file that a [`Place`] is in, if it was found.
    #[must_use]
    pub fn content(&self, file: u32) -> Option<&Content> {
        self.files.content(file)
    }

    /// (start, end) of the code that is known in a space, by address.
    #[must_use]
    pub fn regions(&self, index: u32) -> Vec<(u64, u64)> {
        let space = self.spaces.get(index as usize);
        space.map(|space| space.regions.iter().map(|r| (r.start, r.end)).collect()).unwrap_or_default()
    }

    /// How many spaces there are, the empty one included.
    #[must_use]
    pub fn len(&self) -> usize {
        self.spaces.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.spaces.len() <= 1
    }

    /// What a user should know; the files' part only of those that were read by now.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        self.notes.iter().cloned().chain(self.files.notes().iter().map(Note::to_string)).collect()
    }
}

impl Spaces for Timeline {
    fn space(&self, index: u32) -> &dyn Code {
        static NONE: Nothing = Nothing;
        self.spaces.get(index as usize).map_or(&NONE, |space| space as &dyn Code)
    }
}

/// No code at all.
struct Nothing;

impl Code for Nothing {
    fn read(&self, _ip: u64, _buffer: &mut [u8]) -> usize {
        0
    }

    fn stub(&self, _ip: u64) -> Option<crate::flow::code::Stub> {
        None
    }
}
