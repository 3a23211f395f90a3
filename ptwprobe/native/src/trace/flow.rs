//! A perf.data whose control flow is walked: its streams, side by side.

use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use crate::clock::TimeConv;
use crate::flow::code::Stub;
use crate::flow::context::{Context, Schedule};
use crate::flow::{Batch, Config, Input, Pieces, Source, Walks, What};
use crate::image::{Places, Timeline};
use crate::perfdata::{AuxChunk, Body, Error, Joiner, Next, PtConfig, PtInfo, Reader};
use crate::pt::Errata;

/// Chunks of trace that are looked at.
const MAX_CHUNKS: usize = 1 << 20;

/// Whose trace a stream is: a thread's or a CPU's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamId {
    pub idx: u32,
    pub tid: Option<u32>,
    pub cpu: Option<u32>,
}

/// The bytes of a file's trace.
#[derive(Clone)]
pub struct TraceBytes {
    reader: Arc<Reader>,
    /// Bytes that were read.
    progress: Arc<AtomicU64>,
}

impl Source for TraceBytes {
    fn read(&self, file_offset: u64, buffer: &mut [u8]) -> usize {
        let len = self.reader.read_trace(file_offset, buffer).unwrap_or(0);
        self.progress.fetch_add(len as u64, Ordering::Relaxed);
        len
    }
}

/// See the module.
pub struct FlowTrace {
    walks: Walks<TraceBytes, Arc<Timeline>>,
    timeline: Arc<Timeline>,
    streams: Vec<StreamId>,
    schedules: Vec<Arc<Schedule>>,
    progress: Arc<AtomicU64>,
    len: u64,
    conv: Option<TimeConv>,
    cut: Option<(u64, u64)>,
}

impl FlowTrace {
    /// `places`: where code is looked for; `stubs`: by process, as a session tells them; `jobs`: threads that work.
    pub fn open(
        path: &Path,
        places: Places,
        stubs: impl IntoIterator<Item = (u32, Stub)>,
        jobs: usize,
    ) -> Result<Self, Error> {
        let timeline = Arc::new(Timeline::read(path, places, stubs)?);
        let mut reader = Reader::open(path)?;
        let mut conv = None;
        let (chunks, cut) = chunks(&mut reader, &mut conv)?;
        if chunks.is_empty() {
            if let Some(error) = reader.no_trace() {
                return Err(error);
            }
        }
        let info = reader.pt_info();
        let config = config(info, reader.pt_config(), reader.errata());
        let conv = conv.or(info.and_then(|info| info.conv));
        let progress = Arc::new(AtomicU64::new(0));
        let bytes = TraceBytes { reader: Arc::new(reader), progress: Arc::clone(&progress) };
        let len = chunks.iter().flat_map(|(_, chunks)| chunks).map(|chunk| chunk.len).fold(0, u64::saturating_add);
        let mut streams = Vec::new();
        let mut schedules = Vec::new();
        let inputs = chunks
            .into_iter()
            .map(|(id, chunks)| {
                streams.push(id);
                let schedule = match id {
                    StreamId { tid: Some(tid), .. } => timeline.thread(tid),
                    StreamId { cpu: Some(cpu), .. } => timeline.cpu(cpu),
                    _ => Schedule::default(),
                };
                let schedule = Arc::new(schedule);
                schedules.push(Arc::clone(&schedule));
                Input { pieces: Pieces::new(bytes.clone(), chunks), schedule }
            })
            .collect();
        let walks = Walks::new(config, Arc::clone(&timeline), inputs, jobs);
        Ok(Self { walks, timeline, streams, schedules, progress, len, conv, cut })
    }

    #[must_use]
    pub fn streams(&self) -> &[StreamId] {
        &self.streams
    }

    /// Whose code is where.
    #[must_use]
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// The same, to be kept.
    #[must_use]
    pub fn shared_timeline(&self) -> Arc<Timeline> {
        Arc::clone(&self.timeline)
    }

    /// Who runs in a stream at `tsc`.
    #[must_use]
    pub fn context(&self, stream: usize, tsc: u64) -> Context {
        self.schedules.get(stream).map(|schedule| schedule.at(tsc)).unwrap_or_default()
    }

    /// How much of the trace is read, and how much there is, in bytes.
    #[must_use]
    pub fn progress(&self) -> (u64, u64) {
        (self.progress.load(Ordering::Relaxed).min(self.len), self.len)
    }

    /// `None`: times are values of the counter.
    #[must_use]
    pub fn conv(&self) -> Option<TimeConv> {
        self.conv
    }

    /// Where the file ends too early, and how many bytes are missing.
    #[must_use]
    pub fn cut(&self) -> Option<(u64, u64)> {
        self.cut
    }

    /// Walks all streams to their end.
    pub fn count(&mut self) -> Counts {
        let mut counts = Counts::default();
        for stream in 0..self.streams.len() {
            let mut used = None;
            while let Some(batch) = self.walks.next_batch(stream, used.take()) {
                counts.add(&batch);
                used = Some(batch);
            }
        }
        counts
    }

    /// See [`Walks::next_batch`].
    pub fn next_batch(&mut self, stream: usize, used: Option<Batch>) -> Option<Batch> {
        self.walks.next_batch(stream, used)
    }
}

/// How much of each there is. `errors`: findings after which branches may be missing; `soft`: those that lose nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub branches: u64,
    pub words: u64,
    pub events: u64,
    pub losses: u64,
    pub errors: u64,
    pub soft: u64,
}

impl Counts {
    fn add(&mut self, batch: &Batch) {
        self.branches += batch.branches.len() as u64;
        for mark in &batch.marks {
            *match mark.what {
                What::Word { .. } => &mut self.words,
                What::Event { .. } => &mut self.events,
                What::Overflow | What::Skipped(_) => &mut self.losses,
                What::Finding(finding) if finding.loses_branches() => &mut self.errors,
                What::Finding(_) => &mut self.soft,
            } += 1;
        }
    }
}

type Streams = Vec<(StreamId, Vec<AuxChunk>)>;

/// The chunks of each stream, in the order of the file, and where it is cut.
fn chunks(reader: &mut Reader, conv: &mut Option<TimeConv>) -> Result<(Streams, Option<(u64, u64)>), Error> {
    let mut streams: Streams = Vec::new();
    let mut joiner = Joiner::default();
    let mut by_id = HashMap::new();
    let mut count = 0;
    let mut push = |chunk: AuxChunk| {
        let id = StreamId { idx: chunk.idx, tid: chunk.tid, cpu: chunk.cpu };
        let at = *by_id.entry(id).or_insert_with(|| {
            streams.push((id, Vec::new()));
            streams.len() - 1
        });
        if let Some((_, chunks)) = streams.get_mut(at) {
            chunks.push(chunk);
        }
        count += 1;
        count < MAX_CHUNKS
    };
    let mut cut = None;
    loop {
        let more = match reader.next_record()? {
            Next::Record(record) => match record.body {
                Body::Aux(chunk) => push(joiner.join(reader, chunk)),
                Body::Time(found) => {
                    *conv = Some(found);
                    true
                }
                _ => true,
            },
            Next::BadChunk { chunk, .. } => push(joiner.join(reader, chunk)),
            Next::NoRecord { .. } => true,
            Next::CutChunk { chunk, missing, .. } => {
                push(joiner.join(reader, chunk));
                cut = Some((chunk.file_offset.saturating_add(chunk.len), missing));
                false
            }
            Next::Cut { offset, missing } => {
                cut = Some((offset, missing));
                false
            }
            Next::End => false,
        };
        if !more {
            return Ok((streams, cut));
        }
    }
}

/// How the trace was recorded. A file that does not tell was recorded as perf does by default.
fn config(info: Option<&PtInfo>, pt: Option<PtConfig>, errata: Errata) -> Config {
    Config { compressed_returns: pt.is_none_or(|pt| !pt.noretcomp), time: PtConfig::time(pt, info), errata }
}
