//! The protocol record by record; under threads in `stress.rs`, step by step in `model.rs`.

use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::Arc;

use super::*;

mod model;
mod stress;

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
    writer.field(0, CONTROL_LOST).store(u64::MAX / 3, Ordering::Relaxed);
    assert_eq!(reader.take_lost(), 0, "nothing counts so fast");
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
