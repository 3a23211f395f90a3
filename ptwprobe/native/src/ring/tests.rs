//! The protocol under threads, under a step-by-step model, and against hostile contents.

use std::collections::HashMap;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::thread;

use proptest::prelude::*;

use super::*;

fn memfd() -> OwnedFd {
    // SAFETY: a fresh descriptor, owned by nobody else.
    unsafe {
        let fd = libc::memfd_create(c"ring-test".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING);
        assert!(fd >= 0);
        OwnedFd::from_raw_fd(fd)
    }
}

fn ring(rings: u32, ring_bits: u32) -> (Arc<RingMemory>, Writer) {
    let fd = memfd();
    let memory = Arc::new(RingMemory::create_over(fd.as_fd(), rings, ring_bits).unwrap());
    let writer = Writer::map(fd.as_fd(), memory.layout()).unwrap();
    (memory, writer)
}

fn write(writer: &Writer, ring: u32, thread: u64, args: &[u64]) -> bool {
    let Some(at) = writer.reserve(ring, args.len()) else { return false };
    writer.fill(at, 7, thread, 0x8000, 0, args);
    writer.stamp(at);
    true
}

fn all(reader: &mut Reader) -> (Vec<(u64, Vec<u64>)>, Drained) {
    let mut records = Vec::new();
    let drained = reader.drain(&mut |r| records.push((r.thread, r.args.to_vec())));
    (records, drained)
}

#[test]
fn the_layout_is_what_the_stubs_are_assembled_for() {
    let layout = Layout::new(3, 16).unwrap();
    assert_eq!(layout.control_len(), 0x2000);
    assert_eq!(layout.total_len(), 0x2000 + (3 << 16));
    assert_eq!(layout.control_offset(2), 0x1200);
    assert_eq!(Layout::new(0x1000, 12).unwrap().control_len(), 0x101000);
    assert_eq!(Layout::new(0, 16), None);
    assert_eq!(Layout::new(1, 11), None);
    assert_eq!(Layout::new(0x1001, 16), None);
    let mark = Mark(5 << 40 | 0xff_ffff_fff8);
    assert_eq!(mark.after(48).since(mark), mark::Distance { bytes: 48, records: 1 });
}

#[test]
fn the_memfd_is_sealed_and_anything_else_is_refused() {
    let fd = memfd();
    let memory = RingMemory::create_over(fd.as_fd(), 2, 12).unwrap();
    assert_eq!(memory.layout().total_len(), 0x4000);
    assert!(matches!(RingMemory::create_over(fd.as_fd(), 2, 13), Err(RingError::Os("ftruncate", _))));
    let file = std::fs::File::open("/proc/self/stat").unwrap();
    assert!(matches!(RingMemory::create_over(file.as_fd(), 1, 12), Err(RingError::NotMemfd)));
}

#[test]
fn records_come_out_as_they_went_in_over_many_laps() {
    let (memory, writer) = ring(2, 12);
    let mut reader = Reader::new(Arc::clone(&memory), 1).unwrap();
    for lap in 0..1000u64 {
        let args: Vec<u64> = (0..lap % 20).map(|i| lap << 32 | i).collect();
        assert!(write(&writer, 1, lap, &args));
        let (records, drained) = all(&mut reader);
        assert_eq!(records, [(lap, args)]);
        assert_eq!((drained.end, drained.records), (End::Clear, 1));
    }
    assert_eq!(all(&mut Reader::new(memory, 0).unwrap()).0, []);
}

#[test]
fn a_full_ring_counts_the_hit_as_lost() {
    let (memory, writer) = ring(1, 12);
    let mut reader = Reader::new(Arc::clone(&memory), 0).unwrap();
    let written = (0..200).filter(|i| write(&writer, 0, *i, &[1, 2])).count();
    assert_eq!(written, 4096 / 48);
    assert_eq!(reader.take_lost(), 200 - 85);
    assert_eq!(reader.take_lost(), 0);
    assert_eq!(all(&mut reader).0.len(), 85);
    assert!(!write(&writer, 5, 1, &[]));
    assert_eq!(memory.lost_no_ring(), 1);
}

#[test]
fn a_hole_blocks_until_it_is_passed_and_is_counted_exactly() {
    let (memory, writer) = ring(1, 12);
    let mut reader = Reader::new(memory, 0).unwrap();
    write(&writer, 0, 1, &[1]);
    let dead = writer.reserve(0, 3).unwrap();
    writer.fill(dead, 9, 9, 0x8000, 0, &[9, 9, 9]);
    writer.reserve(0, 2).unwrap();
    write(&writer, 0, 2, &[2]);
    let (records, drained) = all(&mut reader);
    assert_eq!(records, [(1, vec![1])]);
    assert!(drained.end == End::Hole && reader.hole().is_some());

    assert_eq!(reader.pass_hole(), 0, "nobody looked at the threads since the hole was bounded");
    reader.bound_hole();
    let live = writer.reserve(0, 1).unwrap();
    assert_eq!(reader.pass_hole(), 2);
    assert_eq!(all(&mut reader).0, [(2, vec![2])]);

    // Reserved after the bound: its thread may be alive, and was.
    assert!(reader.hole().is_some());
    writer.fill(live, 7, 3, 0x8000, 0, &[3]);
    writer.stamp(live);
    assert_eq!(all(&mut reader).0, [(3, vec![3])]);
    assert_eq!(reader.torn(), 2);
}

#[test]
fn a_bound_that_no_complete_record_precedes_is_where_reading_resumes() {
    let (memory, writer) = ring(1, 12);
    let mut reader = Reader::new(memory, 0).unwrap();
    writer.reserve(0, 3).unwrap();
    all(&mut reader);
    reader.bound_hole();
    let live = writer.reserve(0, 0).unwrap();
    assert_eq!(reader.pass_hole(), 1);
    assert_eq!(all(&mut reader).0, []);
    assert_eq!(reader.hole(), Some(live.mark));
    assert_eq!(reader.pass_dead_hole(), 1);
    assert_eq!((reader.torn(), reader.hole()), (2, None));
}

#[test]
fn a_stamped_record_that_does_not_fit_is_torn_and_the_next_one_read() {
    let (memory, writer) = ring(1, 12);
    let mut reader = Reader::new(memory, 0).unwrap();
    for event in [0x00ff_8000u64, 0xffff_8000, 0x0001_8000] {
        let at = writer.reserve(0, 2).unwrap();
        writer.fill(at, 7, 1, 0x8000, 0, &[1, 2]);
        writer.record_word(at, RECORD_EVENT).store(event, Ordering::Relaxed);
        writer.stamp(at);
    }
    write(&writer, 0, 2, &[5]);
    // The third fits with one argument too few: a lie within its own bounds, after which no mark stands.
    let (records, drained) = all(&mut reader);
    assert_eq!(records, [(1, vec![1])]);
    assert_eq!(drained.end, End::Hole);
    assert_eq!(reader.torn(), 2);
}

#[test]
fn control_words_that_make_no_sense_end_the_reading_of_that_ring_only() {
    let (memory, writer) = ring(2, 12);
    let mut reader = Reader::new(Arc::clone(&memory), 0).unwrap();
    writer.field(0, CONTROL_HEAD).store(0x1234_5678_9abc_def1, Ordering::Relaxed);
    assert_eq!(all(&mut reader).0, []);
    assert!(reader.is_broken() && reader.hole().is_none());
    write(&writer, 1, 1, &[1]);
    assert_eq!(all(&mut Reader::new(memory, 1).unwrap()).0.len(), 1);
}

/// What threads did, for the final balance.
#[derive(Default)]
struct Ledger {
    done: AtomicU64,
    torn: AtomicU64,
}

/// Writes `hits` records of changing size; "dies" in every `dies_at`-th after reserving.
fn hammer(writer: &Writer, ledger: &Ledger, thread: u64, hits: u64, dies_at: u64) {
    for hit in 0..hits {
        let args = [thread, hit, hit ^ 0x5555, hit.wrapping_mul(0x9e37_79b9), !hit];
        let nargs = 2 + (hit % 4) as usize;
        ledger.done.fetch_add(1, Ordering::Relaxed);
        let Some(at) = writer.reserve(0, nargs) else {
            thread::yield_now();
            continue;
        };
        if hit % dies_at == dies_at - 1 {
            if hit % 2 == 0 {
                writer.fill(at, 7, 0xdead, 0x8000, 0, &args[..nargs]);
            }
            ledger.torn.fetch_add(1, Ordering::Relaxed);
            continue;
        }
        writer.fill(at, hit, thread, 0x8000, 0, &args[..nargs]);
        writer.stamp(at);
    }
}

fn check_record(last: &mut HashMap<u64, u64>, r: Record<'_>) {
    let [thread, hit, rest @ ..] = r.args else { panic!("too few arguments") };
    assert_eq!((*thread, *hit), (r.thread, r.tsc));
    let expected = [hit ^ 0x5555, hit.wrapping_mul(0x9e37_79b9), !hit];
    assert_eq!(rest, &expected[..(hit % 4) as usize]);
    if let Some(before) = last.insert(*thread, *hit) {
        assert!(before < *hit, "thread {thread}: {hit} after {before}");
    }
}

fn stress(ring_bits: u32, threads: u64, hits: u64, dies_at: u64) {
    let (memory, writer) = ring(1, ring_bits);
    let mut reader = Reader::new(memory, 0).unwrap();
    let (ledger, running) = (Ledger::default(), AtomicBool::new(true));
    let (mut read, mut last) = (0u64, HashMap::new());
    thread::scope(|scope| {
        let workers: Vec<_> = (1..=threads)
            .map(|t| {
                scope.spawn({
                    let (w, l) = (&writer, &ledger);
                    move || hammer(w, l, t, hits, dies_at)
                })
            })
            .collect();
        let running = &running;
        scope.spawn(move || {
            workers.into_iter().for_each(|w| w.join().unwrap());
            running.store(false, Ordering::SeqCst);
        });
        while running.load(Ordering::SeqCst) {
            read += reader.drain(&mut |r| check_record(&mut last, r)).records;
            thread::yield_now();
            // While writers run, nobody may pass a hole; let the ring fill and count instead.
        }
    });
    loop {
        let drained = reader.drain(&mut |r| check_record(&mut last, r));
        read += drained.records;
        if drained.end == End::Clear {
            break;
        }
        reader.bound_hole();
        assert!(reader.pass_hole() > 0);
    }
    let lost = reader.take_lost();
    assert!(!reader.is_broken());
    assert_eq!(reader.torn(), ledger.torn.load(Ordering::Relaxed));
    assert_eq!(read + lost + reader.torn(), ledger.done.load(Ordering::Relaxed));
    assert_eq!(ledger.done.into_inner(), threads * hits);
}

#[test]
fn threads_over_a_small_ring_lose_nothing_silently() {
    stress(12, 4, 200_000, u64::MAX);
}

#[test]
fn threads_over_a_larger_ring_lose_nothing_silently() {
    stress(18, 3, 300_000, u64::MAX);
}

#[test]
fn threads_that_die_in_the_stub_cost_their_own_records() {
    stress(16, 4, 60_000, 59_999);
}

/// One writer of the model, which takes one step of the protocol at a time.
#[derive(Debug, Clone, Copy)]
enum Pc {
    Idle,
    Loaded { old: Mark },
    Checked { old: Mark },
    Reserved(Reservation),
    Filled(Reservation),
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Run(usize),
    Die(usize),
    Drain,
    /// What the recorder does about a hole: bound it, look at every thread, pass it if none is in the stub.
    Bound,
    Pass,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        60 => (0usize..4).prop_map(Step::Run),
        1 => (0usize..4).prop_map(Step::Die),
        6 => Just(Step::Drain),
        2 => Just(Step::Bound),
        3 => Just(Step::Pass),
    ]
}

struct Model {
    writer: Writer,
    reader: Reader,
    pcs: [Pc; 4],
    /// (count of hits begun, arguments of the current one)
    hit: [u64; 4],
    hits: u64,
    died: u64,
    read: u64,
    last: HashMap<u64, u64>,
    bounded_at: Option<Mark>,
}

impl Model {
    fn nargs(&self, t: usize) -> usize {
        (self.hit[t] as usize * 7 + t) % 40
    }

    fn run(&mut self, t: usize) {
        let size = RECORD_HEADER + 8 * self.nargs(t);
        let head = self.writer.field(0, CONTROL_HEAD);
        self.pcs[t] = match self.pcs[t] {
            Pc::Idle => Pc::Loaded { old: Mark(head.load(Ordering::SeqCst)) },
            Pc::Loaded { old } => {
                let tail = Mark(self.writer.field(0, CONTROL_TAIL).load(Ordering::SeqCst));
                if writer::has_room(old, tail, size, 4096) {
                    Pc::Checked { old }
                } else {
                    self.writer.field(0, CONTROL_LOST).fetch_add(1, Ordering::SeqCst);
                    self.finish(t)
                }
            }
            Pc::Checked { old } => {
                match head.compare_exchange(old.0, old.after(size).0, Ordering::SeqCst, Ordering::SeqCst) {
                    Ok(_) => Pc::Reserved(Reservation { ring: 0, mark: old }),
                    Err(_) => Pc::Idle,
                }
            }
            Pc::Reserved(at) => {
                let args: Vec<u64> = (0..self.nargs(t) as u64).map(|i| self.hit[t] << 8 | i).collect();
                self.writer.fill(at, self.hit[t], t as u64, 0x8000, 0, &args);
                Pc::Filled(at)
            }
            Pc::Filled(at) => {
                self.writer.stamp(at);
                self.finish(t)
            }
        };
    }

    fn finish(&mut self, t: usize) -> Pc {
        self.hits += 1;
        self.hit[t] += 1;
        Pc::Idle
    }

    fn die(&mut self, t: usize) {
        if let Pc::Reserved(_) | Pc::Filled(_) = self.pcs[t] {
            self.died += 1;
            self.hits += 1;
        }
        // A new thread takes its place.
        self.hit[t] += 1;
        self.pcs[t] = Pc::Idle;
    }

    fn drain(&mut self) -> Drained {
        let last = &mut self.last;
        let drained = self.reader.drain(&mut |r| {
            assert_eq!(r.args.len(), (r.tsc as usize * 7 + r.thread as usize) % 40);
            assert!(r.args.iter().enumerate().all(|(i, arg)| *arg == r.tsc << 8 | i as u64));
            assert!(last.insert(r.thread, r.tsc).is_none_or(|before| before < r.tsc));
        });
        self.read += drained.records;
        drained
    }

    /// Whether a thread owns a record that was reserved before the hole was bounded.
    fn anyone_in_stub(&self) -> bool {
        let Some(bound) = self.bounded_at else { return true };
        self.pcs.iter().any(|pc| match pc {
            Pc::Reserved(at) | Pc::Filled(at) => bound.since(at.mark).bytes <= 4096 && bound != at.mark,
            _ => false,
        })
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Run(t) => self.run(t),
            Step::Die(t) => self.die(t),
            Step::Drain => drop(self.drain()),
            Step::Bound => {
                if self.reader.hole().is_some() && self.bounded_at.is_none() {
                    self.bounded_at = Some(Mark(self.writer.field(0, CONTROL_HEAD).load(Ordering::SeqCst)));
                    self.reader.bound_hole();
                }
            }
            Step::Pass => {
                if !self.anyone_in_stub() {
                    self.reader.pass_hole();
                }
            }
        }
        if self.reader.hole().is_none() || !matches!(step, Step::Run(_) | Step::Die(_) | Step::Bound) {
            self.bounded_at = self.bounded_at.filter(|_| self.reader.is_bounded());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_interleaving_accounts_for_every_hit(steps in prop::collection::vec(step(), 1..4000)) {
        let (memory, writer) = ring(1, 12);
        let reader = Reader::new(memory, 0).unwrap();
        let mut model = Model {
            writer, reader, pcs: [Pc::Idle; 4], hit: [0; 4], hits: 0, died: 0, read: 0,
            last: HashMap::new(), bounded_at: None,
        };
        for s in steps {
            model.step(s);
        }
        for t in 0..4 {
            model.die(t);
        }
        while model.drain().end != End::Clear {
            model.reader.pass_dead_hole();
        }
        prop_assert!(!model.reader.is_broken());
        prop_assert_eq!(model.reader.torn(), model.died);
        prop_assert_eq!(model.read + model.reader.take_lost() + model.reader.torn(), model.hits);
    }

    #[test]
    fn hostile_contents_never_panic(
        words in prop::collection::vec((0usize..512, any::<u64>()), 0..200),
        marks in prop::collection::vec((0usize..512, 0u64..80, 0u64..600), 0..60),
        head in prop_oneof![any::<u64>(), (0u64..200, 0u64..600).prop_map(|(n, w)| n << 40 | w << 3)],
        relative: bool,
    ) {
        let (memory, writer) = ring(1, 12);
        let start = writer.field(0, CONTROL_HEAD).load(Ordering::Relaxed);
        let at = |word: usize| Reservation { ring: 0, mark: Mark(start + 8 * word as u64) };
        for (word, value) in words {
            writer.record_word(at(word), 0).store(value, Ordering::Relaxed);
        }
        // Words that look like marks, most of them where they stand.
        for (word, records, other) in marks {
            let position = if records % 2 == 0 { word as u64 } else { other };
            writer.record_word(at(word), 0).store(start.wrapping_add(records << 40 | position << 3), Ordering::Relaxed);
        }
        let head = if relative { start.wrapping_add(head) } else { head };
        writer.field(0, CONTROL_HEAD).store(head, Ordering::Relaxed);
        let mut reader = Reader::new(memory, 0).unwrap();
        for _ in 0..4 {
            reader.drain(&mut |r| assert!(r.args.len() <= MAX_ARGS));
            reader.bound_hole();
            reader.pass_hole();
            reader.pass_dead_hole();
        }
    }
}
