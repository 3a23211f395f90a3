//! Random interleavings of four writers and the reader, one step of the protocol at a time, and hostile contents.

use std::collections::HashMap;
use std::sync::atomic::Ordering;

use proptest::prelude::*;

use super::ring;
use crate::ring::*;

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
