//! Everything that a trace tells, its control flow included: the streams of the flow and the sideband, merged by time.
//!
//! Within a stream the order is the program's, whatever the times; of each stream one batch is held.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use super::assemble::{Assembler, Item, ItemKind};
use super::cursor::{Cursor, Step};
use super::damage::Damage;
use super::entry::{Entry, Totals, What};
use super::flow::{FlowTrace, StreamId};
use super::sideband::{Sideband, Told};
use super::table::Table;
use super::threads::Threads;
use super::words::{GapReason, Word};
use crate::clock::TimeConv;
use crate::flow::context::Context;
use crate::flow::{Branch, Finding, Mark, Skipped, What as Walked};
use crate::image::Timeline;
use crate::perfdata::{Body, Error};
use crate::pt::Kind;

/// See the module.
pub struct Merged {
    flow: FlowTrace,
    conv: Option<TimeConv>,
    sideband: Sideband,
    table: Table,
    threads: Threads,
    streams: Vec<Stream>,
    /// (time of what comes next, stream), of the streams that wait.
    heads: BinaryHeap<Reverse<(u64, usize)>>,
    /// The stream whose turn it is, and up to when.
    turn: Option<(usize, u64)>,
    /// Its time has moved, and the sideband may have something to tell before.
    moved: bool,
    state: State,
    current: Current,
    message: String,
    totals: Totals,
    branches: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Starting,
    Merging,
    Closing,
    Done,
}

struct Stream {
    id: StreamId,
    cursor: Cursor,
    assembler: Assembler,
    items: VecDeque<Item>,
    who: Who,
}

/// Who runs, as far as it is known at the time of a stream.
#[derive(Clone, Copy, Debug, Default)]
struct Who {
    context: Context,
    cpu: Option<u32>,
}

/// What the last entry borrows from.
struct Current {
    ns: Option<u64>,
    context: Context,
    cpu: Option<u32>,
    kind: CurrentKind,
}

enum CurrentKind {
    Branch(Branch),
    Item(Item),
    Event { packet: Kind, ip: Option<u64> },
    Note(u64),
    Lost(u64),
    Torn(u64),
    Problem { word: &'static str, offset: Option<u64> },
}

impl Merged {
    /// `table`: the session's events.
    pub fn new(path: &Path, flow: FlowTrace, table: Table) -> Result<Self, Error> {
        let streams = flow.streams().iter().map(|&id| Stream::new(id)).collect();
        Ok(Self {
            conv: flow.conv(),
            flow,
            sideband: Sideband::open(path)?,
            table,
            threads: Threads::default(),
            streams,
            heads: BinaryHeap::new(),
            turn: None,
            moved: false,
            state: State::Starting,
            current: Current::problem(None, "file", None),
            message: String::new(),
            totals: Totals::default(),
            branches: 0,
        })
    }

    /// Of the entries returned so far.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Branches among them.
    #[must_use]
    pub fn branches(&self) -> u64 {
        self.branches
    }

    #[must_use]
    pub fn flow(&self) -> &FlowTrace {
        &self.flow
    }

    /// Whose addresses [`Entry::space`] means.
    #[must_use]
    pub fn timeline(&self) -> Arc<Timeline> {
        self.flow.shared_timeline()
    }

    /// The next entry; `None` at the end. An error of reading the file ends the trace; what is wrong *in* the file is
    /// an entry.
    pub fn next_entry(&mut self) -> Result<Option<Entry<'_>>, Error> {
        while !self.advance()? {
            if self.state == State::Done {
                return Ok(None);
            }
        }
        Ok(Some(self.entry()))
    }

    /// One step; whether `current` is something new.
    fn advance(&mut self) -> Result<bool, Error> {
        if let Some((index, limit)) = self.turn {
            return self.take_turn(index, limit);
        }
        match self.state {
            State::Starting => {
                self.state = State::Merging;
                for index in 0..self.streams.len() {
                    self.wait(index);
                }
                if self.conv.is_none() && !self.streams.is_empty() {
                    self.message.clear();
                    self.message.push_str("no factors for the time stamp counter: times are its values, not ns");
                    self.current = Current::problem(None, "file", None);
                    return Ok(true);
                }
            }
            State::Merging => match self.heads.pop() {
                Some(Reverse((_, index))) => {
                    let limit = self.heads.peek().map_or(u64::MAX, |&Reverse((ns, _))| ns);
                    self.turn = Some((index, limit));
                    self.moved = true;
                }
                None => self.state = State::Closing,
            },
            State::Closing => {
                if let Some(told) = self.sideband.next_until(u64::MAX)? {
                    return Ok(self.told(told));
                }
                self.state = State::Done;
                if let Some((offset, missing)) = self.sideband.cut() {
                    self.message.clear();
                    // Writing to a String does not fail.
                    let _ = write!(self.message, "{}", Damage::Cut { missing });
                    self.current = Current::problem(None, "file", Some(offset));
                    return Ok(true);
                }
            }
            State::Done => {}
        }
        Ok(false)
    }

    /// Goes on with a stream, for one entry or until others come before it.
    fn take_turn(&mut self, index: usize, limit: u64) -> Result<bool, Error> {
        let Some(stream) = self.streams.get_mut(index) else {
            self.turn = None;
            return Ok(false);
        };
        if std::mem::take(&mut self.moved) {
            let ns = to_ns(self.conv, stream.cursor.tsc());
            if ns.unwrap_or(0) > limit {
                self.turn = None;
                self.heads.push(Reverse((ns.unwrap_or(0), index)));
                return Ok(false);
            }
            if let Some(told) = self.sideband.next_until(ns.unwrap_or(0))? {
                self.moved = true;
                return Ok(self.told(told));
            }
            stream.who = who(&self.flow, &self.threads, index, stream);
        }
        if let Some(item) = stream.items.pop_front() {
            self.set_item(index, item);
            return Ok(true);
        }
        match stream.cursor.step() {
            Step::Branch(branch) => {
                let Who { context, cpu, .. } = stream.who;
                let ns = to_ns(self.conv, stream.cursor.tsc());
                self.current = Current { ns, context, cpu, kind: CurrentKind::Branch(branch) };
                self.branches += 1;
                Ok(true)
            }
            Step::Time => {
                self.moved = true;
                Ok(false)
            }
            Step::Mark(mark) => Ok(self.mark(index, mark)),
            Step::Empty => {
                let used = stream.cursor.used();
                match self.flow.next_batch(index, used) {
                    Some(batch) => stream.cursor.refill(batch),
                    None => {
                        stream.assembler.close(&mut stream.items);
                        if stream.items.is_empty() {
                            self.turn = None;
                        }
                    }
                }
                Ok(false)
            }
        }
    }

    /// A stream waits for its turn, with the time of what it begins with.
    fn wait(&mut self, index: usize) {
        let Some(stream) = self.streams.get_mut(index) else { return };
        if let Some(batch) = self.flow.next_batch(index, None) {
            stream.cursor.refill(batch);
            stream.cursor.first_time();
            let ns = to_ns(self.conv, stream.cursor.tsc()).unwrap_or(0);
            self.heads.push(Reverse((ns, index)));
        }
    }

    fn told(&mut self, told: Told) -> bool {
        match told {
            Told::Problem { ns, offset, text } => {
                self.message = text;
                self.current = Current::problem(ns, "file", Some(offset));
                true
            }
            Told::Record(record) => {
                let (ns, cpu, context) = (record.id.ns, record.id.cpu, Context::default());
                let kind = match record.body {
                    Body::Lost { count } => CurrentKind::Lost(count),
                    Body::LostSamples { count } => CurrentKind::Torn(count),
                    _ => {
                        self.threads.apply(&record);
                        return false;
                    }
                };
                self.current = Current { ns, context, cpu, kind };
                true
            }
        }
    }

    /// What a mark tells at once; what it completes waits in the stream's items.
    fn mark(&mut self, index: usize, mark: Mark) -> bool {
        let Some(stream) = self.streams.get_mut(index) else { return false };
        let tsc = if mark.tsc == 0 { stream.cursor.tsc() } else { mark.tsc };
        let offset = mark.offset;
        let gap = |reason| Word::Gap { tsc, offset, reason };
        let word = match mark.what {
            Walked::Word { value, ip } => Word::Value { tsc, value, ip, offset },
            Walked::Overflow => gap(GapReason::Overflow),
            Walked::Skipped(Skipped::MissingChunk) => gap(GapReason::MissingChunk),
            Walked::Skipped(Skipped::NoPsb { bytes }) => gap(GapReason::Skipped { bytes }),
            Walked::Finding(Finding::BadPacket) => gap(GapReason::UnknownPacket),
            Walked::Finding(Finding::CutPacket) => gap(GapReason::CutPacket),
            Walked::Finding(finding) => {
                self.message.clear();
                let _ = write!(self.message, "{finding}");
                let kind = match word_of(finding) {
                    Some(word) => CurrentKind::Problem { word, offset: Some(offset) },
                    None => CurrentKind::Note(offset),
                };
                return self.set(index, tsc, kind);
            }
            Walked::Event { packet, ip } => return self.set(index, tsc, CurrentKind::Event { packet, ip }),
        };
        stream.assembler.feed(word, &mut self.table, &mut stream.items);
        false
    }

    fn set(&mut self, index: usize, tsc: u64, kind: CurrentKind) -> bool {
        let Some(stream) = self.streams.get(index) else { return false };
        let Who { context, cpu, .. } = stream.who;
        self.current = Current { ns: to_ns(self.conv, tsc), context, cpu, kind };
        true
    }

    fn set_item(&mut self, index: usize, item: Item) {
        match item.kind {
            ItemKind::Incomplete { event_id, got, words } => {
                let name = &self.table.event(event_id).name;
                self.message.clear();
                let _ = write!(self.message, "a hit of {name} is not whole: {got} of {words} words");
            }
            ItemKind::Gap(reason) => {
                self.message.clear();
                let _ = write!(self.message, "{reason}");
            }
            _ => {}
        }
        self.set(index, item.tsc, CurrentKind::Item(item));
    }

    fn entry(&mut self) -> Entry<'_> {
        let Current { ns, context, cpu, ref kind } = self.current;
        let message = &self.message;
        let what = match kind {
            CurrentKind::Branch(branch) => What::Branch(*branch),
            CurrentKind::Event { packet, ip } => What::Event { packet: *packet, ip: *ip },
            CurrentKind::Note(offset) => What::Note { offset: *offset, message },
            CurrentKind::Lost(count) => What::Lost { count: *count },
            CurrentKind::Torn(count) => What::Torn { count: *count },
            CurrentKind::Problem { word, offset } => What::Error { word, offset: *offset, message },
            CurrentKind::Item(item) => match &item.kind {
                ItemKind::Hit { event_id, header_ip, args } => {
                    let site = header_ip.and_then(|ip| self.table.site_addr(*event_id, context.pid, ip));
                    let ip = site.or(*header_ip).unwrap_or(0);
                    What::Hit { event: self.table.event(*event_id), ip, args }
                }
                ItemKind::Stray { ip, value } => What::Stray { ip: *ip, value: *value },
                ItemKind::Incomplete { .. } => What::Error { word: "incomplete", offset: Some(item.offset), message },
                ItemKind::Gap(reason) => What::Error { word: reason.word(), offset: Some(item.offset), message },
            },
        };
        self.totals.add(&what);
        let comm = context.tid.map_or(&[][..], |tid| self.threads.get(tid).comm.as_bytes());
        Entry { ns, pid: context.pid, tid: context.tid, cpu, comm, space: context.space, what }
    }
}

impl Current {
    fn problem(ns: Option<u64>, word: &'static str, offset: Option<u64>) -> Self {
        Self { ns, context: Context::default(), cpu: None, kind: CurrentKind::Problem { word, offset } }
    }
}

impl Stream {
    fn new(id: StreamId) -> Self {
        let cursor = Cursor::default();
        Self { id, cursor, assembler: Assembler::default(), items: VecDeque::new(), who: Who::default() }
    }
}

/// The time at `tsc`; unknown before the first.
fn to_ns(conv: Option<TimeConv>, tsc: u64) -> Option<u64> {
    (tsc != 0).then(|| conv.map_or(tsc, |conv| conv.tsc_to_ns(tsc)))
}

fn who(flow: &FlowTrace, threads: &Threads, index: usize, stream: &Stream) -> Who {
    let tsc = stream.cursor.tsc();
    let mut context = flow.context(index, tsc);
    context.tid = context.tid.or(stream.id.tid).or_else(|| stream.id.cpu.and_then(|cpu| threads.running(cpu)));
    let thread = context.tid.map(|tid| threads.get(tid));
    context.pid = context.pid.or_else(|| thread.and_then(|thread| thread.pid));
    Who { context, cpu: stream.id.cpu.or_else(|| thread.and_then(|thread| thread.cpu)) }
}

/// The stable name of what loses branches.
fn word_of(finding: Finding) -> Option<&'static str> {
    finding.loses_branches().then_some(match finding {
        Finding::BadPacket | Finding::CutPacket => "bad-packet",
        Finding::NoCode { .. } => "no-code",
        Finding::Mismatch { .. } => "mismatch",
        Finding::Endless { .. } => "endless",
        Finding::TracingOff | Finding::TracingOn | Finding::Unreachable { .. } | Finding::Kernel { .. } => "unexpected",
    })
}
