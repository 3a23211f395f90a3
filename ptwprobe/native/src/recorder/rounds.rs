//! Rounds over all rings: reading, and deciding up to which time everything has been read.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::emit::Emitter;
use super::intake::Intake;
use super::output::Output;
use super::tap::{Tap, TapHit};
use super::targets::{Events, Ring, Target};
use super::threads::Threads;
use super::{RecorderError, Stats};
use crate::clock::{self, TimeConv};
use crate::perfdata::Mmap2;
use crate::ring::{End, RingMemory};

/// Time between two looks at the rings; shorter while one of them is filling up.
const SHORTEST: Duration = Duration::from_micros(500);
const LONGEST: Duration = Duration::from_millis(10);
/// Slept even when rounds take longer than they should: others need the CPU, too.
const PAUSE: Duration = Duration::from_micros(100);

/// Held hits are written when they are this old, or this many bytes.
const WRITE_EVERY: Duration = Duration::from_millis(20);
const WRITE_BYTES: usize = 1 << 20;
/// More is never held, even where a ring is blocked.
const HOLD_BYTES: usize = 64 << 20;

/// Looks at one ring of a target that ends: one for each 16 MB and for each thread that died in a stub, and an end even
/// if the target goes on to write.
const LAST_LOOKS: usize = 10_000;

/// The younger the last measurement, the better do sideband times agree with the final factors.
const REFINE_EVERY: Duration = WRITE_EVERY;

/// A record that is not complete, and blocks its ring.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hole {
    pub pid: i32,
    pub ring: u32,
    /// How long the reader has been waiting for it.
    pub blocked: Duration,
}

/// What the recorder's thread owns.
pub struct Core {
    targets: Vec<Target>,
    events: Events,
    threads: Threads,
    emitter: Emitter,
    held_bytes: usize,
    counted: Stats,
    running: bool,
    interval: Duration,
    last_round: Instant,
    last_write: Instant,
    last_refine: Instant,
    margin: u64,
}

impl Core {
    pub fn create(perf_data: &Path, command_line: Vec<String>) -> std::io::Result<Self> {
        let output = Output::create(perf_data, command_line)?;
        let now = Instant::now();
        Ok(Core {
            targets: Vec::new(),
            events: Events::default(),
            threads: Threads::default(),
            held_bytes: 0,
            counted: Stats::default(),
            running: false,
            interval: LONGEST,
            last_round: now,
            last_write: now,
            last_refine: now,
            // A stub's clock may be read some instructions before its reservation is seen: 10 us is far more.
            margin: output.tsc_hz() / 100_000,
            emitter: Emitter::new(output),
        })
    }

    pub fn start(&mut self) {
        self.running = true;
    }

    pub fn conv(&self) -> TimeConv {
        self.emitter.output.conv()
    }

    pub fn tsc_hz(&self) -> u64 {
        self.emitter.output.tsc_hz()
    }

    pub fn stats(&self) -> Stats {
        let output = &self.emitter.output;
        let rings = self.targets.iter().flat_map(|t| &t.rings);
        Stats {
            hits: output.hits(),
            lost: self.counted.lost + output.lost(),
            bytes: output.len(),
            late: self.emitter.late,
            broken_rings: self.counted.broken_rings + rings.filter(|r| r.reader.is_broken()).count() as u64,
            error: output.error().cloned(),
            ..self.counted.clone()
        }
    }

    // ------------------------------------------------------------ targets

    /// Reads `memory`'s rings from now on. A pid may come back once it was dropped.
    pub fn add_target(&mut self, pid: i32, memory: Arc<RingMemory>, comm: Vec<u8>) -> Result<(), RecorderError> {
        if self.live(pid).is_ok() {
            return Err(RecorderError::DuplicateTarget(pid));
        }
        self.targets.push(Target::new(pid, memory, comm));
        Ok(())
    }

    pub fn add_event(&mut self, event_id: u16, nargs: usize) -> Result<(), RecorderError> {
        self.events.add(event_id, nargs)
    }

    /// The addresses of the words of an event's stub in `pid`, header first.
    pub fn add_stub(&mut self, pid: i32, event_id: u16, slots: Vec<u64>) -> Result<(), RecorderError> {
        let index = self.live(pid)?;
        let target = self.targets.get_mut(index);
        target.map_or(Ok(()), |t| t.add_stub(&self.events, event_id, slots))
    }

    pub fn add_mapping(&mut self, mapping: &Mmap2<'_>) {
        self.emitter.mapping(mapping);
    }

    /// The thread of `pid` with this fs base is `tid`.
    pub fn set_thread(&mut self, pid: i32, fs_base: u64, tid: i32) -> Result<(), RecorderError> {
        let index = self.live(pid)?;
        self.threads.forget_word(index, fs_base);
        if let Some(target) = self.targets.get_mut(index) {
            target.identity.set_thread(fs_base, tid);
            target.rings.iter_mut().for_each(|ring| ring.last_thread = None);
        }
        Ok(())
    }

    pub fn keep_threads(&mut self, tids: Option<Vec<i32>>) {
        self.threads.keep(tids.map(|t| t.into_iter().collect()));
    }

    /// Rings that wait for a record to be completed. A hole that is reported here for the first time is bounded:
    /// who looks at the threads *after* this call may pass it.
    pub fn holes(&mut self) -> Vec<Hole> {
        let mut holes = Vec::new();
        for target in &mut self.targets {
            for ring in &mut target.rings {
                ring.reader.bound_hole();
                if let Some((_, since)) = ring.hole {
                    holes.push(Hole { pid: target.pid, ring: u32::from(ring.index), blocked: since.elapsed() });
                }
            }
        }
        holes
    }

    /// No thread of `pid` was in a stub after the hole was reported: gives it up. Returns the hits torn by it.
    pub fn pass_hole(&mut self, pid: i32, ring: u32) -> Result<u64, RecorderError> {
        let index = self.live(pid)?;
        let rings = self.targets.get_mut(index).map(|t| &mut t.rings);
        let ring = rings.and_then(|r| r.get_mut(ring as usize));
        Ok(ring.map_or(0, |ring| {
            let torn = ring.reader.pass_hole();
            self.counted.torn += torn;
            ring.torn += torn;
            torn
        }))
    }

    /// The last look at a target that writes no more: gone, or unpatched with no thread in a stub.
    pub fn drop_target(&mut self, pid: i32) -> Result<(), RecorderError> {
        let index = self.live(pid)?;
        self.end_target(index);
        Ok(())
    }

    fn end_target(&mut self, index: usize) {
        let rings = self.targets.get(index).map_or(0, |t| t.rings.len());
        for ring in 0..rings {
            for _ in 0..LAST_LOOKS {
                let end = self.read(index, ring).map(|(end, _)| end);
                if self.held_bytes > HOLD_BYTES {
                    self.write(u64::MAX);
                }
                let ring = self.targets.get_mut(index).and_then(|t| t.rings.get_mut(ring));
                match (end, ring) {
                    (Some(End::Limit), _) => {}
                    (Some(End::Hole), Some(ring)) => {
                        let torn = ring.reader.pass_dead_hole();
                        self.counted.torn += torn;
                        ring.torn += torn;
                    }
                    _ => break,
                }
            }
        }
        let Some(target) = self.targets.get_mut(index) else { return };
        self.counted.lost += self.emitter.losses(target);
        self.counted.broken_rings += target.rings.iter().filter(|r| r.reader.is_broken()).count() as u64;
        target.rings = Vec::new();
        target.memory = None;
    }

    fn live(&self, pid: i32) -> Result<usize, RecorderError> {
        let found = self.targets.iter().rposition(|t| t.pid == pid && t.is_live());
        found.ok_or(RecorderError::UnknownTarget(pid))
    }

    // ------------------------------------------------------------ the newest hits

    pub fn tap(&mut self, capacity: usize) {
        self.emitter.tap = Some(Tap::new(capacity));
    }

    pub fn take_hits(&mut self, max: usize) -> Vec<TapHit> {
        self.emitter.tap.as_mut().map_or_else(Vec::new, |tap| tap.take(max))
    }

    // ------------------------------------------------------------ rounds

    pub fn is_due(&self) -> bool {
        self.until_due().is_zero()
    }

    pub fn until_due(&self) -> Duration {
        self.interval.saturating_sub(self.last_round.elapsed())
    }

    /// Looks at all rings once, writes what is due; returns the time to wait before the next round.
    pub fn round(&mut self) -> Duration {
        self.last_round = Instant::now();
        if !self.running {
            return self.interval;
        }
        let mut fullest = 0.0f64;
        for target in 0..self.targets.len() {
            let rings = self.targets.get(target).map_or(0, |t| t.rings.len());
            for ring in 0..rings {
                fullest = fullest.max(self.look_once(target, ring));
                if self.held_bytes > HOLD_BYTES {
                    self.write(u64::MAX);
                }
            }
        }
        if self.held_bytes > WRITE_BYTES || self.last_write.elapsed() >= WRITE_EVERY {
            self.write(self.watermark());
        }
        // At a steady rate a ring is then less than a quarter full at the next look, with a wide margin for bursts.
        self.interval = match fullest {
            f if f > 0.25 => (self.interval / 4).max(SHORTEST),
            f if f > 0.10 => (self.interval / 2).max(SHORTEST),
            f if f < 0.03 => (self.interval * 2).min(LONGEST),
            _ => self.interval,
        };
        self.until_due().max(PAUSE)
    }

    /// Reads everything, writes everything, ends the file.
    pub fn finish(mut self) -> (Stats, TimeConv, u64) {
        for target in 0..self.targets.len() {
            self.end_target(target);
        }
        self.write(u64::MAX);
        self.emitter.output.finish(self.counted.lost, self.counted.torn);
        (self.stats(), self.conv(), self.tsc_hz())
    }

    /// Every hit before this time has been read.
    fn watermark(&self) -> u64 {
        self.targets.iter().flat_map(|t| &t.rings).map(|r| r.clear_tsc).min().unwrap_or(u64::MAX)
    }

    fn write(&mut self, before_tsc: u64) {
        self.last_write = Instant::now();
        for target in &mut self.targets {
            self.counted.lost += self.emitter.losses(target);
        }
        let released = self.emitter.write(&self.targets, &mut self.threads, before_tsc);
        self.counted.held -= released.hits;
        self.held_bytes -= released.bytes;
        if self.threads.prune() {
            let rings = self.targets.iter_mut().flat_map(|t| &mut t.rings);
            rings.for_each(|ring| ring.last_thread = None);
        }
        if self.last_refine.elapsed() >= REFINE_EVERY {
            self.last_refine = Instant::now();
            self.emitter.output.refine_clock();
        }
    }

    /// One look at a ring; how full it was, 0 to 1.
    fn look_once(&mut self, target: usize, ring: usize) -> f64 {
        let before = clock::rdtsc().saturating_sub(self.margin);
        let Some((end, fill)) = self.read(target, ring) else { return 0.0 };
        let Some(ring) = self.targets.get_mut(target).and_then(|t| t.rings.get_mut(ring)) else { return 0.0 };
        if end == End::Clear {
            ring.clear_tsc = before;
        }
        ring.hole = match (ring.reader.hole(), ring.hole) {
            (Some(now), Some((then, since))) if now == then => Some((then, since)),
            (now, _) => now.map(|mark| (mark, Instant::now())),
        };
        fill
    }

    fn read(&mut self, target_index: usize, ring_index: usize) -> Option<(End, f64)> {
        let target = self.targets.get_mut(target_index)?;
        let capacity = target.memory.as_ref()?.layout().data_len();
        let Ring { index, reader, last_thread, .. } = target.rings.get_mut(ring_index)?;
        let mut intake = Intake {
            target: target_index,
            pid: target.pid,
            ring: *index,
            stubs: &target.stubs,
            identity: &mut target.identity,
            threads: &mut self.threads,
            last_thread,
            counted: &mut self.counted,
            held_bytes: &mut self.held_bytes,
            since_tsc: target.since_tsc,
            now_tsc: target.since_tsc,
            failed: self.emitter.output.error().is_some(),
        };
        let drained = reader.drain(&mut |record| intake.take(record));
        Some((drained.end, drained.fill as f64 / capacity as f64))
    }
}
