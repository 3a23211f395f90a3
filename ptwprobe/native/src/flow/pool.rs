//! Streams walked side by side: pieces on all cores, batches in the order of each stream.
//!
//! What comes out does not depend on how many work at it: every piece is walked by itself. Memory is bounded: a piece
//! whose batches nobody takes is left standing, and its walk goes on when there is room.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::context::{Schedule, Spaces};
use super::engine::{Config, Engine, Progress};
use super::knows;
use super::pieces::{OwnedPiece, Pieces, Source};
use super::sink::Batch;
use super::suspended::Suspended;

/// Batches of a piece that wait to be taken.
const MAX_WAITING: usize = 8;

/// Batches kept to be filled again.
const MAX_SPARE: usize = 32;

/// A stream: its bytes, and whose they are.
pub struct Input<R> {
    pub pieces: Pieces<R>,
    pub schedule: Arc<Schedule>,
}

/// The walk of some streams. Dropping it ends the work.
pub struct Walks<R: Source, S: Spaces + Clone> {
    shared: Arc<Shared<R, S>>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared<R, S> {
    config: Config,
    spaces: S,
    state: Mutex<State<R, S>>,
    /// Something can be worked at.
    work: Condvar,
    /// A batch or the end of a piece is there.
    results: Condvar,
}

struct State<R, S> {
    streams: Vec<Stream<R, S>>,
    /// Engines with what they know of the code, for the next piece.
    engines: Vec<Box<Engine<S>>>,
    spare: Vec<Batch>,
    /// Pieces of one stream that are worked at together.
    depth: usize,
    closed: bool,
}

struct Stream<R, S> {
    /// `None` while a worker cuts the next piece.
    input: Option<Input<R>>,
    ended: bool,
    /// The number of the piece in front.
    first: u64,
    /// Before that piece.
    suspended: Suspended,
    pieces: VecDeque<Slot<S>>,
}

/// A piece that is walked.
struct Slot<S> {
    batches: VecDeque<Batch>,
    /// While nobody works at it.
    engine: Option<Box<Engine<S>>>,
    /// Until it is told what was suspended before it.
    waits: bool,
    /// What it left suspended, and whether that is all.
    left: Option<(Suspended, bool)>,
    done: bool,
}

impl<R, S: Spaces> Stream<R, S> {
    /// Takes the pieces off whose results are taken.
    fn advance(&mut self) {
        while self.pieces.front().is_some_and(|slot| slot.done && slot.batches.is_empty()) {
            if let Some(left) = self.pieces.pop_front().and_then(|slot| slot.left) {
                self.suspended = self.suspended.after(left);
            }
            self.first += 1;
        }
    }

    /// Tells the first piece that is not done what was suspended before it, if it waits for that.
    fn resolve(&mut self) {
        let Some(at) = self.pieces.iter().position(|slot| !slot.done) else { return };
        if !self.pieces.get(at).is_some_and(|slot| slot.waits) {
            return;
        }
        let mut suspended = self.suspended.clone();
        for left in self.pieces.iter().take(at).filter_map(|slot| slot.left.as_ref()) {
            suspended = suspended.after(left.clone());
        }
        if let Some(slot) = self.pieces.get_mut(at) {
            if let Some(engine) = &mut slot.engine {
                engine.resolve(&suspended);
                slot.waits = false;
            }
        }
    }
}

enum Task<R, S> {
    Cut { stream: usize, input: Input<R> },
    Walk { stream: usize, piece: u64, engine: Box<Engine<S>>, batch: Batch },
}

impl<R: Source + Send + 'static, S: Spaces + Clone + 'static> Walks<R, S> {
    /// `jobs`: how many work at it; with 1 it is the caller alone.
    pub fn new(config: Config, spaces: S, inputs: Vec<Input<R>>, jobs: usize) -> Self {
        let streams: Vec<_> = inputs
            .into_iter()
            .map(|input| Stream {
                input: Some(input),
                ended: false,
                first: 0,
                suspended: Suspended::default(),
                pieces: VecDeque::new(),
            })
            .collect();
        let threads = if jobs > 1 { jobs } else { 0 };
        let depth = 1 + 2 * threads / streams.len().max(1);
        let state = State { streams, engines: Vec::new(), spare: Vec::new(), depth, closed: false };
        let shared = Arc::new(Shared {
            config,
            spaces,
            state: Mutex::new(state),
            work: Condvar::new(),
            results: Condvar::new(),
        });
        let workers = (0..threads).filter_map(|_| {
            let shared = Arc::clone(&shared);
            // Where the system has no thread for it, the others do the work, or the caller.
            std::thread::Builder::new().name("ptwprobe-flow".into()).spawn(move || shared.work()).ok()
        });
        let workers = workers.collect();
        Self { shared, workers }
    }

    /// The next batch of stream `stream`; `None` at its end. One that was taken before may be given back in `used`.
    pub fn next_batch(&mut self, stream: usize, used: Option<Batch>) -> Option<Batch> {
        let shared = &self.shared;
        let mut state = shared.lock();
        state.give_back(used);
        loop {
            let (front, ended) = {
                let stream = state.streams.get_mut(stream)?;
                stream.advance();
                (stream.pieces.front_mut().and_then(|slot| slot.batches.pop_front()), stream.ended)
            };
            if let Some(batch) = front {
                drop(state);
                shared.work.notify_one();
                return Some(batch);
            }
            if ended && state.streams.get(stream)?.pieces.is_empty() {
                return None;
            }
            state = if self.workers.is_empty() {
                let task = state.task_of(stream)?;
                drop(state);
                shared.run(task)
            } else {
                shared.work.notify_all();
                shared.results.wait(state).unwrap_or_else(PoisonError::into_inner)
            };
        }
    }
}

impl<R: Source, S: Spaces + Clone> Drop for Walks<R, S> {
    fn drop(&mut self) {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner).closed = true;
        self.shared.work.notify_all();
        for worker in self.workers.drain(..) {
            // A worker that panicked has said so itself.
            let _ = worker.join();
        }
    }
}

impl<R: Source, S: Spaces + Clone> Shared<R, S> {
    fn lock(&self) -> MutexGuard<'_, State<R, S>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        let mut state = self.lock();
        while !state.closed {
            state = match state.task() {
                Some(task) => {
                    drop(state);
                    let state = self.run(task);
                    self.results.notify_all();
                    state
                }
                None => self.work.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    fn run(&self, task: Task<R, S>) -> MutexGuard<'_, State<R, S>> {
        match task {
            Task::Cut { stream, mut input } => {
                let schedule = Arc::clone(&input.schedule);
                let piece = input.pieces.next_piece(|ip, tsc| knows(&self.spaces, &schedule, ip, tsc));
                let mut rest = Batch::default();
                if piece.is_none() {
                    rest.skipped(input.pieces.skipped());
                }
                let mut state = self.lock();
                state.cut(self, stream, input, piece, rest);
                // Others may go on cutting, or walk this piece.
                self.work.notify_one();
                state
            }
            Task::Walk { stream, piece, mut engine, mut batch } => {
                let progress = engine.run(&mut batch);
                let mut state = self.lock();
                state.walked(stream, piece, engine, batch, progress);
                state
            }
        }
    }
}

impl<R: Source, S: Spaces + Clone> State<R, S> {
    fn give_back(&mut self, batch: Option<Batch>) {
        if let Some(mut batch) = batch.filter(|_| self.spare.len() < MAX_SPARE) {
            batch.clear();
            self.spare.push(batch);
        }
    }

    /// Something to do: what the streams wait for first.
    fn task(&mut self) -> Option<Task<R, S>> {
        for distance in 0..self.depth {
            for stream in 0..self.streams.len() {
                if let Some(task) = self.task_at(stream, distance) {
                    return Some(task);
                }
            }
        }
        None
    }

    /// What brings stream `stream` on.
    fn task_of(&mut self, stream: usize) -> Option<Task<R, S>> {
        (0..self.depth).find_map(|distance| self.task_at(stream, distance))
    }

    /// What brings the piece `distance` behind the front of a stream on.
    fn task_at(&mut self, index: usize, distance: usize) -> Option<Task<R, S>> {
        let stream = self.streams.get_mut(index)?;
        let piece = stream.first + distance as u64;
        if distance == stream.pieces.len() && !stream.ended {
            return Some(Task::Cut { stream: index, input: stream.input.take()? });
        }
        let slot = stream.pieces.get_mut(distance)?;
        if slot.waits || slot.batches.len() >= MAX_WAITING {
            return None;
        }
        let engine = slot.engine.take()?;
        Some(Task::Walk { stream: index, piece, engine, batch: self.spare.pop().unwrap_or_default() })
    }

    fn cut(&mut self, shared: &Shared<R, S>, index: usize, input: Input<R>, piece: Option<OwnedPiece>, rest: Batch) {
        let engine = piece.map(|piece| {
            let mut engine =
                self.engines.pop().unwrap_or_else(|| Box::new(Engine::new(shared.config, shared.spaces.clone())));
            engine.start(piece, &input.schedule);
            engine
        });
        let Some(stream) = self.streams.get_mut(index) else { return };
        stream.ended = engine.is_none();
        stream.input = Some(input);
        let batches = if stream.ended && !rest.is_empty() { VecDeque::from([rest]) } else { VecDeque::new() };
        stream.pieces.push_back(Slot { batches, engine, waits: false, left: None, done: stream.ended });
    }

    fn walked(&mut self, index: usize, piece: u64, mut engine: Box<Engine<S>>, batch: Batch, progress: Progress) {
        let Some(stream) = self.streams.get_mut(index) else { return };
        // A piece stays in its place until it is done.
        let at = usize::try_from(piece.wrapping_sub(stream.first)).unwrap_or(usize::MAX);
        let Some(slot) = stream.pieces.get_mut(at) else { return };
        let empty = batch.is_empty();
        if empty {
            self.spare.push(batch);
        } else {
            slot.batches.push_back(batch);
        }
        if progress == Progress::Done {
            slot.done = true;
            slot.left = Some(engine.suspended());
            self.engines.push(engine);
        } else {
            slot.waits = progress == Progress::Waits;
            slot.engine = Some(engine);
        }
        stream.resolve();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::context::Context;
    use crate::flow::sink::{Branch, Mark};
    use crate::image::FlatCode;
    use crate::pt::{encode, encode_fup, encode_psb, IpField, Kind, LastIp};

    /// `top: dec eax; jnz top; jmp top`, and streams that go round in it, with damage here and there.
    fn stream(seed: u64, len: usize) -> Vec<u8> {
        let mut out = Vec::new();
        let mut random = seed;
        while out.len() < len {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            if out.is_empty() || random >> 54 == 0 {
                let mut last_ip = LastIp::default();
                encode_psb(&mut out, &mut last_ip);
                let time = out.len() as u64;
                encode(&mut out, Kind::Tsc(time));
                encode_fup(&mut out, &mut last_ip, 0x1000);
                encode(&mut out, Kind::PsbEnd);
            } else if random >> 50 == 77 {
                out.extend_from_slice(&[0x02, 0xff]);
            } else {
                encode(&mut out, Kind::Tnt { bits: random >> 40 & 0x3f, count: 6, long: false });
            }
        }
        out
    }

    fn walked(streams: &[Vec<u8>], jobs: usize) -> Vec<(Vec<Branch>, Vec<Mark>)> {
        let code = Arc::new(FlatCode::new(vec![(0x1000, vec![0xff, 0xc8, 0x75, 0xfc, 0xeb, 0xfa])], vec![]));
        let schedule = Arc::new(Schedule::constant(Context::default()));
        let inputs = streams.iter().map(|bytes| {
            // The bytes of a test may stay.
            let bytes: &'static [u8] = bytes.clone().leak();
            Input { pieces: Pieces::of_bytes(bytes), schedule: Arc::clone(&schedule) }
        });
        let config = Config { compressed_returns: true, ..Config::default() };
        let mut walks = Walks::new(config, code, inputs.collect(), jobs);
        let mut all = vec![(Vec::new(), Vec::new()); streams.len()];
        let mut open: Vec<usize> = (0..streams.len()).rev().collect();
        while let Some(stream) = open.pop() {
            if let Some(batch) = walks.next_batch(stream, None) {
                let (branches, marks) = &mut all[stream];
                let before = branches.len() as u32;
                marks.extend(batch.marks.iter().map(|mark| Mark { at: before + mark.at, ..*mark }));
                branches.extend_from_slice(&batch.branches);
                open.insert(0, stream);
            }
        }
        all
    }

    #[test]
    fn however_many_work_the_result_is_the_same() {
        let streams: Vec<_> = (1..4).map(|seed| stream(seed, 400_000 * seed as usize)).collect();
        let alone = walked(&streams, 1);
        assert!(alone.iter().all(|(branches, marks)| branches.len() > 100_000 && !marks.is_empty()));
        for jobs in [2, 3, 8] {
            assert!(walked(&streams, jobs) == alone, "{jobs} jobs");
        }
    }

    /// The loop is interrupted in a stub that cannot be read, and runs as a handler for a long time.
    fn interrupted_stream(rounds: usize) -> Vec<u8> {
        let mut out = Vec::new();
        let mut last_ip = LastIp::default();
        let tnt = Kind::Tnt { bits: 0x3e, count: 6, long: false };
        let psb = |out: &mut Vec<u8>, last_ip: &mut LastIp| {
            encode_psb(out, last_ip);
            encode_fup(out, last_ip, 0x1000);
            encode(out, Kind::PsbEnd);
        };
        psb(&mut out, &mut last_ip);
        for round in 0..rounds {
            let stub = 0x9000 + round as u64 % 3;
            encode_fup(&mut out, &mut last_ip, stub);
            encode(&mut out, Kind::TipPgd(IpField { bytes: 0, value: 0 }));
            encode(&mut out, Kind::TipPge(IpField { bytes: 6, value: 0x1000 }));
            last_ip.0 = 0x1000;
            for _ in 0..40 {
                psb(&mut out, &mut last_ip);
                out.extend(std::iter::repeat_n(0xf6, 10_000 * (round % 3) + 7));
            }
            encode_fup(&mut out, &mut last_ip, 0x1002);
            encode(&mut out, Kind::TipPgd(IpField { bytes: 0, value: 0 }));
            encode(&mut out, Kind::TipPge(IpField { bytes: 6, value: stub }));
            last_ip.0 = stub;
            encode(&mut out, tnt);
        }
        out
    }

    #[test]
    fn flow_goes_on_behind_a_stub_that_an_earlier_piece_was_interrupted_in() {
        let streams = [interrupted_stream(12), interrupted_stream(5)];
        let alone = walked(&streams, 1);
        for (branches, marks) in &alone {
            assert!(branches.len() > 100_000 && marks.is_empty(), "{marks:?}");
        }
        for jobs in [2, 3, 8] {
            assert!(walked(&streams, jobs) == alone, "{jobs} jobs");
        }
    }

    #[test]
    fn work_that_nobody_takes_is_left_standing_and_ends() {
        let code = Arc::new(FlatCode::default());
        let input = Input { pieces: Pieces::of_bytes(stream(9, 3_000_000).leak()), schedule: Arc::default() };
        let mut walks = Walks::new(Config::default(), code, vec![input], 2);
        assert!(walks.next_batch(0, None).is_some());
        assert!(walks.next_batch(1, None).is_none());
        drop(walks);
    }
}
