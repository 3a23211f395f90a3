//! Rounds of a perf.data: all streams and the sideband of a round, merged by time.
//!
//! A round ends at a FINISHED_ROUND record. Only the positions of its chunks and its sideband are held; the chunks are
//! decoded piece by piece while they are merged.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::fmt::Write as _;
use std::path::Path;

use super::assemble::{Assembler, Item, ItemKind};
use super::damage::Damage;
use super::entry::{Entry, Totals, What};
use super::table::Table;
use super::threads::Threads;
use super::words::Words;
use crate::clock::TimeConv;
use crate::perfdata::{AuxChunk, Body, Error, Joiner, Next, PtConfig, Reader, Record};

/// What a round may hold before it is taken for finished: a hostile file may have one round only.
const MAX_ROUND: usize = 1 << 19;

/// The end of the file as it is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// It is the end.
    Whole,
    /// It is still being written: a round that is not finished is waited for.
    Follow,
}

/// See the module.
pub struct TraceReader {
    file: Reader,
    joiner: Joiner,
    mode: Mode,
    table: Table,
    conv: Option<TimeConv>,
    told_no_conv: bool,
    threads: Threads,
    streams: Vec<Stream>,
    by_key: HashMap<(u32, Option<u32>, Option<u32>), usize>,
    round: Round,
    state: State,
    /// Where the file is cut, and how many bytes are missing; told last.
    ending: Option<(u64, u64)>,
    current: Option<Current>,
    message: String,
    totals: Totals,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Loading,
    Merging,
    /// The file has ended: what the streams still hold is told.
    Closing(usize),
    Done,
}

#[derive(Default)]
struct Round {
    /// Sorted by time when the round is merged.
    sideband: VecDeque<(u64, Record)>,
    chunks: usize,
    /// Time in ns and in ticks (of which several may be in one ns) of the next item of each stream that has one.
    heads: BinaryHeap<Reverse<(u64, u64, usize)>>,
    active: Vec<usize>,
    last: bool,
}

struct Stream {
    tid: Option<u32>,
    cpu: Option<u32>,
    words: Words,
    assembler: Assembler,
    items: VecDeque<Item>,
    active: bool,
    /// The file ends inside its last chunk.
    cut: bool,
}

/// What the last entry borrows from.
struct Current {
    ns: Option<u64>,
    tid: Option<u32>,
    cpu: Option<u32>,
    kind: CurrentKind,
}

enum CurrentKind {
    Item(Item),
    Lost(u64),
    Torn(u64),
    Problem(Option<u64>),
}

impl TraceReader {
    pub fn open(path: &Path, table: Table, mode: Mode) -> Result<Self, Error> {
        Ok(Self {
            file: Reader::open(path)?,
            joiner: Joiner::default(),
            mode,
            table,
            conv: None,
            told_no_conv: false,
            threads: Threads::default(),
            streams: Vec::new(),
            by_key: HashMap::new(),
            round: Round::default(),
            state: State::Loading,
            ending: None,
            current: None,
            message: String::new(),
            totals: Totals::default(),
        })
    }

    /// Of the entries returned so far.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// The next entry, in the order of time within a round; `None` at the (present) end. An error of reading the file
    /// ends the trace; what is wrong *in* the file is an entry.
    pub fn next_entry(&mut self) -> Result<Option<Entry<'_>>, Error> {
        self.current = loop {
            match self.state {
                State::Loading => match self.load()? {
                    Loaded::Round => self.begin_merge(),
                    Loaded::Nothing => return Ok(None),
                    Loaded::Problem(current) => break Some(current),
                },
                State::Merging => {
                    if let Some(current) = self.merge() {
                        break Some(current);
                    }
                }
                State::Closing(index) => {
                    if let Some(current) = self.close_stream(index) {
                        break Some(current);
                    }
                }
                State::Done => match self.ending.take() {
                    Some((offset, missing)) => {
                        self.set_message(format_args!("{}", Damage::Cut { missing }));
                        let kind = CurrentKind::Problem(Some(offset));
                        break Some(Current { ns: None, tid: None, cpu: None, kind });
                    }
                    None => {
                        let nothing = self.totals.errors == 0;
                        return self.file.no_trace().filter(|_| nothing).map_or(Ok(None), Err);
                    }
                },
            }
        };
        Ok(self.entry())
    }

    /// Takes records up to the end of a round.
    fn load(&mut self) -> Result<Loaded, Error> {
        self.file.refresh()?;
        loop {
            if self.round.last || self.round.sideband.len() >= MAX_ROUND || self.round.chunks >= MAX_ROUND {
                return Ok(Loaded::Round);
            }
            let record = match self.file.next_record()? {
                Next::Record(record) => record,
                Next::NoRecord { offset, len } => {
                    return Ok(self.problem(offset, format_args!("{}", Damage::NoRecord { len })));
                }
                Next::BadChunk { chunk, told } => {
                    self.push_chunk(chunk);
                    let damage = Damage::BadChunk { told, len: chunk.len };
                    return Ok(self.problem(chunk.file_offset, format_args!("{damage}")));
                }
                Next::End | Next::Cut { .. } | Next::CutChunk { .. } if self.mode == Mode::Follow => {
                    return Ok(Loaded::Nothing);
                }
                Next::End => {
                    self.round.last = true;
                    continue;
                }
                Next::Cut { offset, missing } => {
                    self.round.last = true;
                    self.ending = Some((offset, missing));
                    continue;
                }
                Next::CutChunk { chunk, missing, .. } => {
                    self.round.last = true;
                    self.ending = Some((chunk.file_offset + chunk.len, missing));
                    if let Some(stream) = self.push_chunk(chunk) {
                        stream.cut = true;
                    }
                    match self.told_no_conv(chunk.file_offset) {
                        Some(problem) => return Ok(problem),
                        None => continue,
                    }
                }
            };
            if let (Some(text), None) = (record.body.problem(), record.id.ns) {
                return Ok(self.problem(record.file_offset, format_args!("{text}")));
            }
            match record.body {
                Body::FinishedRound => return Ok(Loaded::Round),
                Body::Aux(chunk) => {
                    self.push_chunk(chunk);
                    if let Some(problem) = self.told_no_conv(record.file_offset) {
                        return Ok(problem);
                    }
                }
                Body::Time(conv) => self.conv = Some(conv),
                Body::Sample | Body::Other => {}
                _ => self.round.sideband.push_back((record.id.ns.unwrap_or(0), record)),
            }
        }
    }

    /// Told once, with the first chunk of trace.
    fn told_no_conv(&mut self, offset: u64) -> Option<Loaded> {
        if self.conv.is_some() || std::mem::replace(&mut self.told_no_conv, true) {
            return None;
        }
        let text = format_args!("no factors for the time stamp counter: times are its values, not ns");
        Some(self.problem(offset, text))
    }

    fn problem(&mut self, offset: u64, text: std::fmt::Arguments<'_>) -> Loaded {
        self.set_message(text);
        Loaded::Problem(Current { ns: None, tid: None, cpu: None, kind: CurrentKind::Problem(Some(offset)) })
    }

    fn set_message(&mut self, text: std::fmt::Arguments<'_>) {
        self.message.clear();
        // Writing to a String does not fail.
        let _ = self.message.write_fmt(text);
    }

    fn push_chunk(&mut self, chunk: AuxChunk) -> Option<&mut Stream> {
        let chunk = self.joiner.join(&self.file, chunk);
        let streams = &mut self.streams;
        let index = *self.by_key.entry((chunk.idx, chunk.tid, chunk.cpu)).or_insert_with(|| {
            let pt = self.file.pt_config();
            // Where there are TSC packets alone they are the time.
            let timed = pt.is_none_or(|pt| pt.mtc || pt.cyc);
            let time = timed.then(|| PtConfig::time(pt, self.file.pt_info()));
            streams.push(Stream::new(chunk.tid, chunk.cpu, Words::new(time, self.file.errata())));
            streams.len() - 1
        });
        let stream = self.streams.get_mut(index)?;
        stream.words.push(chunk);
        self.round.chunks += 1;
        if !stream.active {
            stream.active = true;
            self.round.active.push(index);
        }
        Some(stream)
    }

    fn begin_merge(&mut self) {
        self.round.sideband.make_contiguous().sort_by_key(|&(ns, _)| ns);
        for at in 0..self.round.active.len() {
            if let Some(&index) = self.round.active.get(at) {
                self.queue_head(index);
            }
        }
        self.state = State::Merging;
    }

    fn end_round(&mut self) {
        for index in self.round.active.drain(..) {
            if let Some(stream) = self.streams.get_mut(index) {
                stream.active = false;
                stream.words.shrink();
            }
        }
        self.round.chunks = 0;
        self.state = if self.round.last { State::Closing(0) } else { State::Loading };
    }

    /// The next of the round by time, sideband first.
    fn merge(&mut self) -> Option<Current> {
        let head = self.round.heads.peek().map(|&Reverse((ns, _, index))| (ns, index));
        let sideband = self.round.sideband.front().map(|&(ns, _)| ns);
        match (sideband, head) {
            (Some(at), head) if head.is_none_or(|(ns, _)| at <= ns) => {
                let (_, record) = self.round.sideband.pop_front()?;
                self.apply(&record)
            }
            (_, Some((ns, index))) => {
                self.round.heads.pop();
                let stream = self.streams.get_mut(index)?;
                let item = stream.items.pop_front()?;
                let (tid, cpu) = (stream.tid, stream.cpu);
                self.queue_head(index);
                Some(self.current_item(ns, tid, cpu, item))
            }
            _ => {
                self.end_round();
                None
            }
        }
    }

    fn apply(&mut self, record: &Record) -> Option<Current> {
        let id = record.id;
        let current = |kind| Some(Current { ns: id.ns, tid: None, cpu: id.cpu, kind });
        match record.body {
            Body::Lost { count } => current(CurrentKind::Lost(count)),
            Body::LostSamples { count } => current(CurrentKind::Torn(count)),
            body => match body.problem() {
                Some(text) => {
                    self.set_message(format_args!("{text}"));
                    current(CurrentKind::Problem(Some(record.file_offset)))
                }
                None => {
                    self.threads.apply(record);
                    None
                }
            },
        }
    }

    /// Decodes up to the stream's next item and queues it by its time.
    fn queue_head(&mut self, index: usize) {
        let Some(stream) = self.streams.get_mut(index) else { return };
        while stream.items.is_empty() {
            let Some(word) = stream.words.next(&self.file) else { return };
            stream.assembler.feed(word, &mut self.table, &mut stream.items);
        }
        if let Some(item) = stream.items.front() {
            let ns = self.conv.map_or(item.tsc, |conv| conv.tsc_to_ns(item.tsc));
            self.round.heads.push(Reverse((ns, item.tsc, index)));
        }
    }

    fn close_stream(&mut self, index: usize) -> Option<Current> {
        let Some(stream) = self.streams.get_mut(index) else {
            self.state = State::Done;
            return None;
        };
        if stream.items.is_empty() {
            match stream.words.finish() {
                // What the cut left of a packet and of a hit is told with the cut.
                Some(word) if stream.cut && word.is_rest() => return None,
                None if stream.cut => {}
                Some(word) => stream.assembler.feed(word, &mut self.table, &mut stream.items),
                None => stream.assembler.close(&mut stream.items),
            }
        }
        let (tid, cpu) = (stream.tid, stream.cpu);
        match stream.items.pop_front() {
            Some(item) => {
                let ns = self.conv.map_or(item.tsc, |conv| conv.tsc_to_ns(item.tsc));
                Some(self.current_item(ns, tid, cpu, item))
            }
            None => {
                self.state = State::Closing(index + 1);
                None
            }
        }
    }

    fn current_item(&mut self, ns: u64, tid: Option<u32>, cpu: Option<u32>, item: Item) -> Current {
        let tid = tid.or_else(|| cpu.and_then(|cpu| self.threads.running(cpu)));
        let cpu = cpu.or_else(|| tid.and_then(|tid| self.threads.get(tid).cpu));
        match item.kind {
            ItemKind::Incomplete { event_id, got, words } => {
                let name = &self.table.event(event_id).name;
                self.message.clear();
                let _ = write!(self.message, "a hit of {name} is not whole: {got} of {words} words");
            }
            ItemKind::Gap(reason) => self.set_message(format_args!("{reason}")),
            _ => {}
        }
        Current { ns: Some(ns), tid, cpu, kind: CurrentKind::Item(item) }
    }

    fn entry(&mut self) -> Option<Entry<'_>> {
        let Current { ns, tid, cpu, kind } = self.current.as_ref()?;
        let thread = tid.map(|tid| self.threads.get(tid));
        let pid = thread.and_then(|thread| thread.pid);
        let what = match kind {
            CurrentKind::Lost(count) => What::Lost { count: *count },
            CurrentKind::Torn(count) => What::Torn { count: *count },
            CurrentKind::Problem(offset) => What::Error { word: "file", offset: *offset, message: &self.message },
            CurrentKind::Item(item) => match &item.kind {
                ItemKind::Hit { event_id, header_ip, args } => {
                    let site = header_ip.and_then(|ip| self.table.site_addr(*event_id, pid, ip));
                    let ip = site.or(*header_ip).unwrap_or(0);
                    What::Hit { event: self.table.event(*event_id), ip, args }
                }
                ItemKind::Stray { ip, value } => What::Stray { ip: *ip, value: *value },
                ItemKind::Incomplete { .. } => {
                    What::Error { word: "incomplete", offset: Some(item.offset), message: &self.message }
                }
                ItemKind::Gap(reason) => {
                    What::Error { word: reason.word(), offset: Some(item.offset), message: &self.message }
                }
            },
        };
        self.totals.add(&what);
        let comm = thread.map_or(&[][..], |thread| thread.comm.as_bytes());
        Some(Entry { ns: *ns, pid, tid: *tid, cpu: *cpu, comm, space: 0, what })
    }
}

enum Loaded {
    Round,
    Nothing,
    Problem(Current),
}

impl Stream {
    fn new(tid: Option<u32>, cpu: Option<u32>, words: Words) -> Self {
        Self { tid, cpu, words, assembler: Assembler::default(), items: VecDeque::new(), active: false, cut: false }
    }
}
