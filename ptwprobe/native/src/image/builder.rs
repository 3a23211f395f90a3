//! From what the records say, in the order of the file, to the address spaces in the order of time.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::elf::BuildId;
use super::files::{Files, Places, Wanted};
use super::find::is_nameless;
use super::jit;
use super::regions::{FileId, Region, Regions, Source};
use super::space::{Space, Stubs};
use super::timeline::{Switches, Timeline, Who};
use crate::clock::TimeConv;
use crate::flow::code::Stub;

/// One executable mapping.
#[derive(Clone, Debug, Default)]
pub struct Map {
    pub pid: u32,
    pub start: u64,
    pub len: u64,
    pub file_offset: u64,
    /// False: what was there is code no more.
    pub executable: bool,
    pub file: Wanted,
}

/// Beyond so many records of each kind the rest is not looked at.
const MAX_CHANGES: usize = 1 << 21;
const MAX_SWITCHES: usize = 1 << 22;
/// Bytes that spaces may take.
const MAX_SPACE_BYTES: usize = 128 << 20;

enum Change {
    Map {
        pid: u32,
        start: u64,
        end: u64,
        source: Option<Source>,
    },
    /// Memory without a file: nothing is known there but what a runtime tells of it.
    Nameless {
        pid: u32,
        start: u64,
        end: u64,
    },
    Exec {
        pid: u32,
    },
    Fork {
        pid: u32,
        parent: u32,
    },
    Thread {
        tid: u32,
        pid: u32,
    },
}

/// Takes the records one by one, in any order of their times, which are ns of the recording's clock; `finish` makes
/// the timeline.
pub struct Builder {
    conv: Option<TimeConv>,
    files: Files,
    /// By ns.
    changes: Vec<(u64, Change)>,
    /// By TSC.
    jitted: Vec<(u64, Change)>,
    switches: HashMap<u32, Switches>,
    switch_count: usize,
    stubs: HashMap<u32, Vec<Stub>>,
    /// (process, file) of the jitdumps that were read.
    dumps: HashSet<(u32, FileId)>,
    notes: Vec<String>,
}

impl Builder {
    #[must_use]
    pub fn new(places: Places) -> Self {
        Self {
            conv: None,
            files: Files::new(places),
            changes: Vec::new(),
            jitted: Vec::new(),
            switches: HashMap::new(),
            switch_count: 0,
            stubs: HashMap::new(),
            dumps: HashSet::new(),
            notes: Vec::new(),
        }
    }

    /// The clock of the recording, before or after the rest. Without it all that is said holds from the start on, the
    /// last of it.
    pub fn clock(&mut self, conv: TimeConv) {
        self.conv = Some(conv);
    }

    /// The file that the recording found at `path` has this build id; a mapping's own counts more.
    pub fn build_id(&mut self, path: &[u8], id: &[u8]) {
        if let Some(id) = BuildId::new(id) {
            self.files.build_id(path, id);
        }
    }

    /// Process `pid` has a stub.
    pub fn stub(&mut self, pid: u32, stub: Stub) {
        self.stubs.entry(pid).or_default().push(stub);
    }

    pub fn map(&mut self, ns: u64, map: Map) {
        let Map { pid, start, len, file_offset, executable, file } = map;
        let end = start.saturating_add(len);
        if !executable {
            return self.change(ns, Change::Map { pid, start, end, source: None });
        }
        if is_nameless(&file.path) {
            return self.change(ns, Change::Nameless { pid, start, end });
        }
        let is_dump = jit::is_marker(&file.path);
        let file = self.files.add(Wanted { pid, mapped: (start, end), ..file });
        match file {
            Some(file) if is_dump => self.dump(pid, file),
            Some(file) => {
                let source = Some(Source { file, offset: file_offset, jit: false });
                self.change(ns, Change::Map { pid, start, end, source });
            }
            None => {
                self.note("too many files are mapped: code of later ones is unknown");
                self.change(ns, Change::Map { pid, start, end, source: None });
            }
        }
    }

    /// All code that the runtime of `pid` tells of in its jitdump.
    fn dump(&mut self, pid: u32, file: FileId) {
        if !self.dumps.insert((pid, file)) {
            return;
        }
        let Some(content) = self.files.content(file) else { return };
        for code in jit::loaded(content) {
            let source = Some(Source { file, offset: code.offset, jit: true });
            let change = Change::Map { pid, start: code.start, end: code.end, source };
            match code.time {
                jit::Time::Ns(ns) => self.change(ns, change),
                jit::Time::Tsc(tsc) if self.has_room() => self.jitted.push((tsc, change)),
                jit::Time::Tsc(_) => return,
            }
        }
    }

    /// `tid` of process `pid` begins. `exec`: a later program than that of its parent runs in it.
    pub fn fork(&mut self, ns: u64, pid: u32, parent: u32, tid: u32, exec: bool) {
        if pid != parent {
            self.change(ns, if exec { Change::Exec { pid } } else { Change::Fork { pid, parent } });
        }
        self.thread(ns, pid, tid);
    }

    /// `tid` is one of process `pid`.
    pub fn thread(&mut self, ns: u64, pid: u32, tid: u32) {
        self.change(ns, Change::Thread { tid, pid });
    }

    /// Process `pid` executes another program.
    pub fn exec(&mut self, ns: u64, pid: u32) {
        self.change(ns, Change::Exec { pid });
    }

    /// From now on `cpu` executes `who`, or nobody knows whom.
    pub fn switch(&mut self, ns: u64, cpu: u32, who: Option<Who>) {
        let limit = self.switch_count >= MAX_SWITCHES;
        self.switch_count += usize::from(!limit);
        let switches = self.switches.entry(cpu).or_default();
        if !limit {
            switches.push(ns, who);
        } else if switches.close(ns) {
            self.note(&format!("too many context switches: later ones of CPU {cpu} are not used"));
        }
    }

    fn change(&mut self, ns: u64, change: Change) {
        if self.has_room() {
            self.changes.push((ns, change));
        }
    }

    fn has_room(&mut self) -> bool {
        let room = self.changes.len() + self.jitted.len() < MAX_CHANGES;
        if !room {
            self.note("too many records of mappings and threads: later ones of the file are not used");
        }
        room
    }

    fn note(&mut self, text: &str) {
        if !self.notes.iter().any(|note| note == text) {
            self.notes.push(text.to_owned());
        }
    }

    #[must_use]
    pub fn finish(mut self) -> Timeline {
        let conv = self.conv;
        // 0: before all, as perf writes it of what it found. Times before the counter's start are so, too.
        let at = |ns: u64| conv.filter(|conv| ns != 0 && before(conv.zero, ns)).map_or(0, |conv| conv.ns_to_tsc(ns));
        // Each CPU's records stand in the file for themselves; those of one moment stay in its order.
        self.changes.sort_by_key(|&(ns, _)| ns);
        self.changes.iter_mut().for_each(|(time, _)| *time = at(*time));
        self.changes.append(&mut self.jitted);
        self.changes.sort_by_key(|&(tsc, _)| tsc);
        self.switches.values_mut().for_each(|switches| switches.convert(at));
        if conv.is_none() && !self.switches.is_empty() {
            self.switches.clear();
            self.note("no clock that the trace could be compared with: which program ran on a CPU is unknown");
        }
        let stubs = self.stubs.into_iter().map(|(pid, stubs)| (pid, Arc::new(Stubs::new(stubs)))).collect();
        let mut state = State {
            spaces: vec![Draft::default()],
            running: HashMap::new(),
            history: HashMap::new(),
            threads: HashMap::new(),
            stubs,
            bytes: 0,
            full: false,
        };
        for (tsc, change) in self.changes {
            state.apply(tsc, change);
        }
        if state.full {
            self.notes.push("too many changes of mappings: later code of some processes is unknown".to_owned());
        }
        let files = Arc::new(self.files);
        let space = |draft: Draft| Space { regions: draft.regions, stubs: draft.stubs, files: Arc::clone(&files) };
        Timeline {
            spaces: state.spaces.into_iter().map(space).collect(),
            history: state.history,
            threads: state.threads,
            switches: self.switches,
            files: Arc::clone(&files),
            notes: self.notes,
        }
    }
}

/// Whether time `a` is before `b`; the zero of a clock is a number modulo 2^64.
fn before(a: u64, b: u64) -> bool {
    b.wrapping_sub(a) < 1 << 63
}

#[derive(Clone, Default)]
struct Draft {
    regions: Regions,
    stubs: Arc<Stubs>,
}

struct State {
    spaces: Vec<Draft>,
    /// The space of each process now.
    running: HashMap<u32, u32>,
    history: HashMap<u32, Vec<(u64, u32)>>,
    threads: HashMap<u32, Vec<(u64, u32)>>,
    stubs: HashMap<u32, Arc<Stubs>>,
    bytes: usize,
    full: bool,
}

impl State {
    fn apply(&mut self, tsc: u64, change: Change) {
        match change {
            Change::Map { pid, start, end, source } => self.map(tsc, pid, start, end, source),
            Change::Nameless { pid, start, end } => {
                let known = self.running.get(&pid).and_then(|&index| self.spaces.get(index as usize));
                let Some(draft) = known else { return };
                let within = draft.regions.within(start, end).filter(|region| !region.source.jit);
                let gone: Vec<_> = within.map(|region| (region.start.max(start), region.end.min(end))).collect();
                for (start, end) in gone {
                    self.map(tsc, pid, start, end, None);
                }
            }
            Change::Exec { pid } => {
                if self.running.remove(&pid).is_some() {
                    self.tell(tsc, pid, 0);
                }
            }
            Change::Fork { pid, parent } => {
                let index = self.running.get(&parent).copied();
                match index {
                    Some(index) => self.running.insert(pid, index),
                    None => self.running.remove(&pid),
                };
                self.tell(tsc, pid, index.unwrap_or(0));
            }
            Change::Thread { tid, pid } => {
                let history = self.threads.entry(tid).or_default();
                if history.last().map(|&(_, pid)| pid) != Some(pid) {
                    history.push((tsc, pid));
                }
            }
        }
    }

    fn map(&mut self, tsc: u64, pid: u32, start: u64, end: u64, source: Option<Source>) {
        let before = self.running.get(&pid).copied();
        if let Some(draft) = before.and_then(|index| self.spaces.get_mut(index as usize)) {
            if !draft.regions.conflicts(start, end, source) {
                // Nothing was known there, so nothing ran there: all who share the space may see it.
                if draft.regions.set(start, end, source) > 0 {
                    self.bytes += size_of::<Region>();
                }
                return;
            }
        }
        let mut draft = before.and_then(|index| self.spaces.get(index as usize)).cloned().unwrap_or_default();
        if let (None, Some(stubs)) = (before, self.stubs.get(&pid)) {
            draft.stubs = Arc::clone(stubs);
        }
        self.bytes += size_of::<Space>() + draft.regions.size_of_copy() + draft.regions.set(start, end, source);
        if self.bytes > MAX_SPACE_BYTES {
            return self.lose(tsc, pid);
        }
        let index = self.spaces.len() as u32;
        self.spaces.push(draft);
        self.running.insert(pid, index);
        self.tell(tsc, pid, index);
    }

    /// There is no room for the change: from here on nothing is known of the process.
    fn lose(&mut self, tsc: u64, pid: u32) {
        self.full = true;
        if self.running.remove(&pid).is_some() {
            self.tell(tsc, pid, 0);
        }
    }

    fn tell(&mut self, tsc: u64, pid: u32, index: u32) {
        let history = self.history.entry(pid).or_default();
        match history.last_mut() {
            Some((last, space)) if *last == tsc => *space = index,
            Some(&mut (_, space)) if space == index => {}
            _ => history.push((tsc, index)),
        }
    }
}
