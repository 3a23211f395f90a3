//! The timeline against a model that does the same byte by byte.

use std::collections::HashMap;
use std::path::PathBuf;

use proptest::prelude::*;

use super::*;
use crate::clock::TimeConv;
use crate::flow::code::Stub;
use crate::flow::context::{Context, Spaces};

/// One tick a ns.
const CONV: TimeConv = TimeConv { shift: 0, mult: 1, zero: 0 };

fn file(path: &str) -> Wanted {
    Wanted { path: path.as_bytes().to_vec(), ..Wanted::default() }
}

fn map(pid: u32, start: u64, len: u64, path: &str) -> Map {
    Map { pid, start, len, file_offset: start, executable: true, file: file(path) }
}

fn builder() -> Builder {
    let mut builder = Builder::new(Places::default());
    builder.clock(CONV);
    builder
}

fn who(pid: u32, tid: u32) -> Who {
    Who { pid: Some(pid), tid }
}

fn folder(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("ptwprobe-image-{}-{name}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).unwrap();
    path
}

fn read(spaces: &Timeline, space: u32, ip: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let len = spaces.space(space).read(ip, &mut bytes);
    bytes.truncate(len);
    bytes
}

const PIDS: u32 = 4;
const LEN: u64 = 64;

#[derive(Clone, Debug)]
enum Step {
    Map { pid: u32, start: u64, len: u64, file: u8 },
    Data { pid: u32, start: u64, len: u64 },
    Fork { pid: u32, parent: u32 },
    Exec { pid: u32 },
}

fn step() -> impl Strategy<Value = Step> {
    let pid = || 1..=PIDS;
    prop_oneof![
        8 => (pid(), 0..LEN, 1u64..20, 0u8..3).prop_map(|(pid, start, len, file)| Step::Map { pid, start, len, file }),
        2 => (pid(), 0..LEN, 1u64..20).prop_map(|(pid, start, len)| Step::Data { pid, start, len }),
        2 => (pid(), pid()).prop_map(|(pid, parent)| Step::Fork { pid, parent }),
        1 => pid().prop_map(|pid| Step::Exec { pid }),
    ]
}

/// File and offset of each byte that a process has as code.
type Memory = HashMap<u64, (u8, u64)>;

fn apply(processes: &mut HashMap<u32, Memory>, step: &Step) {
    match *step {
        Step::Map { pid, start, len, file } => {
            let memory = processes.entry(pid).or_default();
            memory.extend((start..start + len).map(|addr| (addr, (file, addr))));
        }
        Step::Data { pid, start, len } => {
            processes.entry(pid).or_default().retain(|addr, _| !(start..start + len).contains(addr));
        }
        Step::Fork { pid, parent } => {
            let memory = processes.get(&parent).cloned().unwrap_or_default();
            processes.insert(pid, memory);
        }
        Step::Exec { pid } => drop(processes.remove(&pid)),
    }
}

fn tell(builder: &mut Builder, ns: u64, step: &Step) {
    match *step {
        Step::Map { pid, start, len, file } => builder.map(ns, map(pid, start, len, &format!("/{file}"))),
        Step::Data { pid, start, len } => builder.map(ns, Map { executable: false, ..map(pid, start, len, "/data") }),
        Step::Fork { pid, parent } => builder.fork(ns, pid, parent, pid, false),
        Step::Exec { pid } => builder.exec(ns, pid),
    }
}

proptest! {
    #[test]
    fn code_is_what_it_was_at_the_time(steps in proptest::collection::vec(step(), 1..80), seed: u64) {
        // The records come in another order than that of their times, as those of several CPUs do.
        let mut order: Vec<usize> = (0..steps.len()).collect();
        order.sort_by_key(|&i| (i as u64).wrapping_mul(seed | 1) >> 7);
        let mut builder = builder();
        for i in order {
            tell(&mut builder, 10 * (i as u64 + 1), &steps[i]);
        }
        let timeline = builder.finish();
        let mut processes = HashMap::new();
        for (i, step) in steps.iter().enumerate() {
            apply(&mut processes, step);
            for pid in 1..=PIDS {
                let memory = processes.get(&pid);
                let space = timeline.process(pid, 10 * (i as u64 + 1));
                let regions = &timeline.spaces[space as usize].regions;
                for addr in 0..LEN + 20 {
                    let told = regions.at(addr).map(|r| (r.source.file, r.source.offset + addr - r.start));
                    // Where nothing is code yet, what comes first may show already.
                    if let Some(&(file, offset)) = memory.and_then(|memory| memory.get(&addr)) {
                        let path = format!("/{file}").into_bytes();
                        prop_assert_eq!(told.map(|(_, at)| at), Some(offset));
                        let id = told.map(|(id, _)| id).unwrap();
                        prop_assert_eq!(timeline.files.wanted(id).map(|w| w.path.clone()), Some(path));
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_mapped_where_nothing_was_makes_no_new_space() {
    let mut builder = builder();
    for i in 0..100 {
        builder.map(10 + i, map(1, 0x1000 * (100 - i), 0x800, "/a"));
    }
    builder.fork(200, 2, 1, 2, false);
    builder.map(300, map(2, 0x100_0000, 0x800, "/b"));
    // The same file at the same place: mprotect(2) tells it once more.
    builder.map(400, map(1, 0x1000, 0x100, "/a"));
    let timeline = builder.finish();
    assert_eq!(timeline.len(), 2);
    assert_eq!(timeline.process(1, 50), timeline.process(2, 250));
    assert_eq!(timeline.process(2, 150), 0);
}

#[test]
fn a_process_that_executes_another_program_has_none_of_the_first_ones_code() {
    let mut builder = builder();
    builder.map(0, map(1, 0x1000, 0x1000, "/bin/true"));
    builder.exec(100, 1);
    builder.map(110, map(1, 0x5000, 0x1000, "/bin/true"));
    let timeline = builder.finish();
    assert_eq!(timeline.regions(timeline.process(1, 99)), [(0x1000, 0x2000)]);
    assert_eq!(timeline.process(1, 105), 0);
    assert_eq!(timeline.regions(timeline.process(1, 120)), [(0x5000, 0x6000)]);
}

#[test]
fn threads_and_cpus_have_the_space_of_the_process_that_runs() {
    let mut builder = builder();
    builder.map(0, map(1, 0x1000, 0x1000, "/a"));
    builder.map(0, map(2, 0x1000, 0x1000, "/b"));
    builder.fork(10, 1, 1, 11, false);
    builder.map(50, map(1, 0x1000, 0x1000, "/c"));
    builder.thread(0, 2, 2);
    builder.switch(30, 0, Some(who(1, 11)));
    builder.switch(80, 0, None);
    builder.switch(60, 0, Some(Who { pid: None, tid: 2 }));
    let timeline = builder.finish();
    let context = |space, pid, tid| Context { space, pid: Some(pid), tid: Some(tid) };
    let thread = timeline.thread(11);
    assert_eq!((thread.at(0), thread.at(49)), (context(1, 1, 11), context(1, 1, 11)));
    assert_eq!(thread.at(50), context(3, 1, 11));
    assert_eq!(timeline.thread(2).during(0), (context(2, 2, 2), u64::MAX));
    assert_eq!(timeline.thread(9).at(5), Context { space: 0, pid: None, tid: Some(9) });
    let cpu = timeline.cpu(0);
    let changes = [(30, context(1, 1, 11)), (50, context(3, 1, 11)), (60, context(2, 2, 2)), (80, Context::default())];
    assert_eq!(cpu.changes(), changes);
    assert_eq!(timeline.cpu(7), Default::default());
}

#[test]
fn code_is_read_on_from_one_file_in_the_next() {
    let dir = folder("read");
    let path = |name: &str, byte: u8, len: usize| {
        let path = dir.join(name);
        std::fs::write(&path, vec![byte; len]).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (old, new) = (path("old", 1, 0x3000), path("new", 2, 0x5000));
    let mut builder = builder();
    builder.map(0, map(1, 0, 0x3000, &old));
    builder.map(100, map(1, 0x1000, 0x1000, &new));
    builder.map(100, map(1, 0x3000, 0x1000, "/no/such/file"));
    builder.stub(1, Stub { start: 0x1000, end: 0x1010, site: 1, continue_addr: 2 });
    let timeline = builder.finish();
    let (before, after) = (timeline.process(1, 99), timeline.process(1, 100));
    assert_eq!(read(&timeline, before, 0xffe, 4), [1; 4]);
    assert_eq!(read(&timeline, after, 0xffe, 4), [1, 1, 2, 2]);
    assert_eq!(read(&timeline, after, 0x1fff, 3), [2, 1, 1]);
    assert_eq!(read(&timeline, after, 0x2ffe, 15), [1, 1]);
    assert_eq!(read(&timeline, after, 0x3000, 15), [0u8; 0]);
    assert_eq!(read(&timeline, after, 0, 0x3000).len(), 0x3000);
    assert_eq!(read(&timeline, 99, 0, 15), [0u8; 0]);
    assert_eq!(timeline.space(before).stub(0x100f).map(|s| s.site), Some(1));
    assert_eq!(timeline.space(after).stub(0x1010), None);
    assert_eq!(timeline.notes(), ["/no/such/file: not found, its code is unknown"]);
    // A file that is cut while it is read gives what it has.
    std::fs::write(&new, vec![2; 0x1800]).unwrap();
    assert_eq!(read(&timeline, after, 0x1ff0, 4), [2; 4]);
}

#[test]
fn without_a_clock_the_last_that_was_said_holds() {
    let mut builder = Builder::new(Places::default());
    builder.map(20, map(1, 0x1000, 0x1000, "/b"));
    builder.map(10, map(1, 0x1000, 0x1000, "/a"));
    builder.switch(30, 0, Some(who(1, 1)));
    let timeline = builder.finish();
    assert_eq!(timeline.process(1, 0), 2);
    assert_eq!(timeline.cpu(0), Default::default());
    assert_eq!(timeline.notes().len(), 1);
}

#[test]
fn code_of_a_runtime_stays_where_memory_without_a_name_is_told_of() {
    let dir = folder("jit");
    let dump = dir.join("jit-1.dump");
    let mut bytes = b"DTiJ".to_vec();
    bytes.extend([1u32, 40, 62, 0, 1, 0, 0, 0, 0].iter().flat_map(|w| w.to_le_bytes()));
    bytes.extend([0u32, 16 + 40 + 2 + 4, 50, 0, 1, 1].iter().flat_map(|w| w.to_le_bytes()));
    bytes.extend([0x1010u64, 0x1010, 4, 1].iter().flat_map(|w| w.to_le_bytes()));
    bytes.extend(b"f\0\x90\x90\x90\xc3");
    std::fs::write(&dump, bytes).unwrap();
    let mut builder = builder();
    builder.map(10, map(1, 0x1000, 0x1000, "/x"));
    builder.map(20, map(1, 0x1000, 0x1000, "//anon"));
    builder.map(30, map(1, 0x9000, 0x1000, dump.to_str().unwrap()));
    builder.map(60, map(1, 0x1000, 0x1000, "//anon"));
    builder.map(70, Map { executable: false, ..map(1, 0x1000, 0x1000, "//anon") });
    let timeline = builder.finish();
    assert_eq!(timeline.regions(timeline.process(1, 15)), [(0x1000, 0x2000)]);
    let space = timeline.process(1, 60);
    assert_eq!(timeline.regions(space), [(0x1010, 0x1014)]);
    assert_eq!(read(&timeline, space, 0x1010, 15), [0x90, 0x90, 0x90, 0xc3]);
    assert_eq!(timeline.regions(timeline.process(1, 70)), []);
}

#[test]
fn memory_is_bounded_whatever_is_mapped() {
    let mut builder = builder();
    for i in 0..5_000u64 {
        builder.map(i, map(1, 0x1000 * i, 0x800, "/a"));
    }
    for i in 0..100_000u64 {
        builder.map(100_000 + i, map(1, 0, 0x800, if i % 2 == 0 { "/b" } else { "/a" }));
    }
    let timeline = builder.finish();
    assert!(timeline.len() < 90_000);
    assert_eq!(timeline.notes().len(), 1);
    assert_eq!(timeline.process(1, 100_000), 2);
    assert_eq!(timeline.process(1, u64::MAX), 0);
}
