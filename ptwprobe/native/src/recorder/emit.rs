//! Held hits as Intel PT: one AUX chunk per thread and round, and the sideband records that go with it.

use super::output::{Output, Told, NO_CPU};
use super::tap::{Tap, TapHit};
use super::targets::Target;
use super::threads::{Thread, Threads};
use crate::clock;
use crate::perfdata::Mmap2;
use crate::pt::{encode_hit, encode_psb_plus, header_word, LastIp};

/// A chunk is ended beyond this.
const CHUNK_BYTES: usize = 256 << 10;

/// Sideband is told this long before the hit it is needed for, but after the thread's hit before: times of hits are
/// converted with the session's final clock factors, those of sideband with the factors of the moment.
const SIDEBAND_LEAD_NS: u64 = 1_000;

pub struct Emitter {
    pub output: Output,
    pub tap: Option<Tap>,
    /// Hits written with a later time than theirs.
    pub late: u64,
    /// The latest time that was written.
    latest_tsc: u64,
    /// Length of the file when the last round was finished.
    finished_len: u64,
    chunk: Vec<u8>,
}

/// Hits that are held no more: they were written, or the output has counted them as lost.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Released {
    pub hits: u64,
    pub bytes: usize,
}

impl Emitter {
    pub fn new(output: Output) -> Self {
        let finished_len = output.len();
        Emitter { output, tap: None, late: 0, latest_tsc: clock::rdtsc(), finished_len, chunk: Vec::new() }
    }

    /// Writes every hit before `before_tsc`, and makes it readable.
    pub fn write(&mut self, targets: &[Target], threads: &mut Threads, before_tsc: u64) -> Released {
        let mut released = Released::default();
        threads.for_busy(|thread| {
            let count = thread.held.ready(before_tsc);
            if let Some(target) = targets.get(thread.target).filter(|_| count > 0) {
                self.thread(target, thread, count);
                released.hits += count as u64;
                released.bytes += thread.held.remove(count);
            }
        });
        if self.output.len() != self.finished_len {
            self.output.record(|w| w.finished_round());
            self.output.flush();
            self.finished_len = self.output.len();
        }
        released
    }

    /// Tells what was lost and torn since the last call; returns what the target lost.
    pub fn losses(&mut self, target: &mut Target) -> u64 {
        let ns = self.output.conv().tsc_to_ns(self.latest_tsc);
        let no_ring = target.take_lost_no_ring();
        if no_ring > 0 {
            self.output.tell(Told { lost: no_ring, ..Told::default() }, |w| w.lost(no_ring, NO_CPU, ns));
        }
        let mut all = no_ring;
        for ring in &mut target.rings {
            let cpu = u32::from(ring.index);
            let lost = ring.reader.take_lost();
            if lost > 0 {
                self.output.tell(Told { lost, ..Told::default() }, |w| w.lost(lost, cpu, ns));
            }
            let torn = std::mem::take(&mut ring.torn);
            if torn > 0 {
                self.output.tell(Told { torn, ..Told::default() }, |w| w.torn(torn, cpu, ns));
            }
            all += lost;
        }
        all
    }

    /// At its time, or where the file is by now if that is later.
    pub fn mapping(&mut self, mapping: &Mmap2<'_>) {
        let ns = self.output.conv().tsc_to_ns(self.latest_tsc).max(mapping.ns);
        self.output.record(|w| w.mmap2(&Mmap2 { ns, ..mapping.clone() }));
    }

    /// Writes the first `count` hits of a thread.
    fn thread(&mut self, target: &Target, thread: &mut Thread, count: usize) {
        let conv = self.output.conv();
        let (pid, tid) = (thread.pid as u32, thread.tid as u32);
        let (mut in_chunk, mut reference) = (0, 0);
        let mut last_ip = LastIp::default();
        self.chunk.clear();
        for (entry, args) in thread.held.first(count) {
            let tsc = entry.tsc.max(thread.written_tsc);
            self.late += u64::from(tsc != entry.tsc);
            let ns = conv.tsc_to_ns(tsc);
            let lead_ns = match thread.written_tsc {
                0 => SIDEBAND_LEAD_NS,
                last => SIDEBAND_LEAD_NS.min(ns.saturating_sub(conv.tsc_to_ns(last)) / 2),
            };
            let sideband_ns = ns.saturating_sub(lead_ns);
            thread.written_tsc = tsc;
            if let Some(comm) = thread.comm.take() {
                self.output.record(|w| w.comm(pid, tid, &comm, sideband_ns, false));
            }
            if thread.last_cpu != Some(entry.ring) {
                thread.last_cpu = Some(entry.ring);
                self.output.record(|w| w.switch_in(pid, tid, u32::from(entry.ring), sideband_ns));
            }
            if self.chunk.is_empty() {
                reference = tsc;
                encode_psb_plus(&mut self.chunk, &mut last_ip, tsc);
            }
            // Records hold at most 255 arguments.
            let header = header_word(entry.event_id, args.len() as u8);
            let slots = target.stubs.slots(entry.event_id).unwrap_or(&[]);
            encode_hit(&mut self.chunk, &mut last_ip, tsc, slots, header, args);
            in_chunk += 1;
            if let Some(tap) = &mut self.tap {
                let cpu = i32::from(entry.ring);
                let hit =
                    TapHit { ns, pid: thread.pid, tid: thread.tid, cpu, event_id: entry.event_id, args: Vec::new() };
                tap.push(hit, args);
            }
            if self.chunk.len() >= CHUNK_BYTES {
                self.output
                    .tell(Told { hits: in_chunk, ..Told::default() }, |w| w.auxtrace(tid, pid, &self.chunk, reference));
                in_chunk = 0;
                self.chunk.clear();
            }
        }
        if in_chunk > 0 {
            self.output
                .tell(Told { hits: in_chunk, ..Told::default() }, |w| w.auxtrace(tid, pid, &self.chunk, reference));
        }
        self.latest_tsc = self.latest_tsc.max(thread.written_tsc);
    }
}
