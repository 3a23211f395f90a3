//! Rounds without the thread: what is held, for how long, and in which order it comes out.

use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use super::rounds::Core;
use super::*;
use crate::clock::rdtsc;
use crate::ring::{RingMemory, Writer};

const EVENT: u16 = FIRST_EVENT_ID;

fn rings(rings: u32, ring_bits: u32) -> (RingMemory, Writer) {
    // SAFETY: a fresh descriptor, owned by nobody else.
    let fd = unsafe {
        OwnedFd::from_raw_fd(libc::memfd_create(c"test".as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING))
    };
    let memory = RingMemory::create_over(fd.as_fd(), rings, ring_bits).unwrap();
    let writer = Writer::map(fd.as_fd(), memory.layout()).unwrap();
    (memory, writer)
}

struct Session {
    core: Option<Core>,
    writer: Writer,
    path: PathBuf,
    pid: i32,
}

impl Session {
    fn new(name: &str, rings: u32, ring_bits: u32) -> Self {
        let (memory, writer) = self::rings(rings, ring_bits);
        let pid = std::process::id() as i32;
        let path = std::env::temp_dir().join(format!("ptwprobe-{name}-{pid}.data"));
        let _ = std::fs::remove_file(&path);
        let mut core = Core::create(&path, vec!["test".into()]).unwrap();
        core.add_event(EVENT, 1).unwrap();
        core.add_target(pid, Arc::new(memory), b"test".to_vec()).unwrap();
        core.add_stub(pid, EVENT, vec![0x1000, 0x1010]).unwrap();
        core.tap(1 << 20);
        core.start();
        Session { core: Some(core), writer, path, pid }
    }

    fn core(&mut self) -> &mut Core {
        self.core.as_mut().unwrap()
    }

    fn write(&self, ring: u32, value: u64) {
        assert!(self.writer.write(ring, self.pid as u64, EVENT, 0, None, &[value]));
    }

    /// Two rounds, late enough that what can be written is: the first one's hits are older than the second's looks.
    fn rounds(&mut self) {
        self.core().round();
        sleep(Duration::from_millis(25));
        self.core().round();
    }

    fn tapped(&mut self) -> Vec<u64> {
        self.core().take_hits(usize::MAX).into_iter().map(|hit| hit.args[0]).collect()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[test]
fn hits_are_held_while_a_ring_may_hold_an_earlier_one() {
    let mut s = Session::new("held", 2, 12);
    s.write(0, 1);
    s.rounds();
    assert_eq!(s.tapped(), [1]);

    let late = s.writer.reserve(1, 1).unwrap();
    let late_tsc = rdtsc();
    s.rounds();
    s.write(0, 3);
    s.rounds();
    assert!(s.tapped().is_empty());
    assert_eq!(s.core().stats().held, 1);

    s.writer.fill(late, late_tsc, s.pid as u64, EVENT, 0, &[2]);
    s.writer.stamp(late);
    s.rounds();
    assert_eq!(s.tapped(), [2, 3]);
    let (stats, ..) = s.core.take().unwrap().finish();
    assert_eq!((stats.hits, stats.held, stats.late), (3, 0, 0));
}

#[test]
fn a_blocked_ring_does_not_fill_our_memory() {
    let mut s = Session::new("bound", 2, 20);
    let late = s.writer.reserve(1, 1).unwrap();
    let late_tsc = rdtsc();
    s.rounds();
    let mut most = 0;
    let mut written = 0;
    while s.core().stats().hits == 0 {
        for _ in 0..20_000 {
            s.write(0, written);
            written += 1;
        }
        s.core().round();
        most = most.max(s.core().stats().held);
        assert!(written < 10_000_000);
    }
    assert!(most < (70 << 20) / 32, "{most} hits were held");
    s.writer.fill(late, late_tsc, s.pid as u64, EVENT, 0, &[0]);
    s.writer.stamp(late);
    let (stats, ..) = s.core.take().unwrap().finish();
    assert_eq!((stats.hits, stats.lost, stats.torn, stats.late), (written + 1, 0, 0, 1));
}

#[test]
fn made_up_times_and_threads_spoil_nothing_else() {
    let mut s = Session::new("hostile", 2, 12);
    let before = rdtsc();
    for tsc in [0, u64::MAX, before] {
        assert!(s.writer.write(0, u64::MAX - tsc, EVENT, 0, Some(tsc), &[tsc]));
    }
    s.write(1, 7);
    s.rounds();
    let hits = s.core().take_hits(10);
    let now_ns = s.core().conv().tsc_to_ns(rdtsc());
    assert_eq!(hits.len(), 4);
    assert!(hits.iter().all(|hit| hit.tid == s.pid && hit.ns < now_ns && now_ns - hit.ns < 10_000_000_000));
    assert_eq!(s.core().stats().unknown_threads, 3);
}

#[test]
fn threads_that_come_and_go_do_not_fill_our_memory() {
    let mut s = Session::new("threads", 1, 22);
    for tid in 0..150_000u64 {
        // Words that no thread has: all stand for the process, each is remembered.
        assert!(s.writer.write(0, 1 << 40 | tid, EVENT, 0, None, &[tid]));
        if tid % 20_000 == 0 {
            s.rounds();
        }
    }
    let (stats, ..) = s.core.take().unwrap().finish();
    assert_eq!((stats.hits, stats.unknown_threads), (150_000, 150_000));
}

#[test]
fn a_pid_may_come_back_after_it_was_dropped() {
    let mut s = Session::new("again", 1, 12);
    s.write(0, 1);
    s.writer.reserve(0, 1).unwrap();
    let pid = s.pid;
    s.core().drop_target(pid).unwrap();
    assert!(matches!(s.core().pass_hole(pid, 0), Err(RecorderError::UnknownTarget(_))));
    let (memory, writer) = rings(1, 12);
    s.core().add_target(pid, Arc::new(memory), b"test".to_vec()).unwrap();
    s.core().add_stub(pid, EVENT, vec![0x2000, 0x2010]).unwrap();
    assert!(writer.write(0, pid as u64, EVENT, 0, None, &[2]));
    let (stats, ..) = s.core.take().unwrap().finish();
    assert_eq!((stats.hits, stats.torn), (2, 1));
}
