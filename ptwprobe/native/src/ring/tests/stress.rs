//! The protocol under threads that hammer one ring, and some of which die in the stub.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use super::ring;
use crate::ring::*;

/// What threads did, for the final balance, and who of them is in the stub.
struct Ledger {
    done: AtomicU64,
    torn: AtomicU64,
    inside: Vec<AtomicBool>,
}

/// Writes `hits` records of changing size; "dies" in every `dies_at`-th after reserving (a new thread takes its place).
fn hammer(writer: &Writer, ledger: &Ledger, thread: usize, hits: u64, dies_at: u64) {
    for hit in 0..hits {
        let args = [thread as u64, hit, hit ^ 0x5555, hit.wrapping_mul(0x9e37_79b9), !hit];
        let args = &args[..2 + (hit % 4) as usize];
        ledger.inside[thread].store(true, Ordering::SeqCst);
        ledger.done.fetch_add(1, Ordering::Relaxed);
        match writer.reserve(0, args.len()) {
            None => thread::yield_now(),
            Some(at) if hit % dies_at == dies_at - 1 => {
                if hit % 2 == 0 {
                    writer.fill(at, 7, 0xdead, 0x8000, 0, args);
                }
                ledger.torn.fetch_add(1, Ordering::Relaxed);
            }
            Some(at) => {
                writer.fill(at, hit, thread as u64, 0x8000, 0, args);
                writer.stamp(at);
            }
        }
        ledger.inside[thread].store(false, Ordering::SeqCst);
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

/// What the recorder does about a hole: bound it, see every thread outside the stub once, pass it.
fn pass_safely(reader: &mut Reader, ledger: &Ledger) {
    reader.bound_hole();
    for inside in &ledger.inside {
        while inside.load(Ordering::SeqCst) {
            thread::yield_now();
        }
    }
    reader.pass_hole();
}

fn stress(ring_bits: u32, threads: usize, hits: u64, dies_at: u64) {
    let (memory, writer) = ring(1, ring_bits);
    let mut reader = Reader::new(memory, 0).unwrap();
    let inside = (0..threads).map(|_| AtomicBool::new(false)).collect();
    let ledger = Ledger { done: AtomicU64::new(0), torn: AtomicU64::new(0), inside };
    let (mut read, mut last, mut holes) = (0u64, HashMap::new(), 0);
    thread::scope(|scope| {
        let (w, l) = (&writer, &ledger);
        let workers: Vec<_> = (0..threads).map(|t| scope.spawn(move || hammer(w, l, t, hits, dies_at))).collect();
        loop {
            let finished = workers.iter().all(|w| w.is_finished());
            let drained = reader.drain(&mut |r| check_record(&mut last, r));
            read += drained.records;
            if drained.end == End::Hole {
                holes += 1;
                pass_safely(&mut reader, &ledger);
            } else if finished {
                break;
            }
        }
    });
    let lost = reader.take_lost();
    assert!(!reader.is_broken());
    assert_eq!(reader.torn(), ledger.torn.load(Ordering::Relaxed), "{holes} holes were met");
    assert_eq!(read + lost + reader.torn(), ledger.done.load(Ordering::Relaxed));
    assert_eq!(ledger.done.into_inner(), threads as u64 * hits);
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
    stress(16, 4, 100_000, 997);
    stress(12, 3, 100_000, 101);
}
