//! Prints the sideband of a perf.data, one record a line, in the words of
//! `perf script --show-mmap-events --show-task-events --show-switch-events`: tests compare the two.

use std::path::Path;

use _native::perfdata::{Body, Error, FileId, Mmap, Next, Reader, Record};

const PROT: [(u32, char); 3] = [(1, 'r'), (2, 'w'), (4, 'x')];
const MAP_SHARED: u32 = 1;

fn main() -> Result<(), Error> {
    let path = std::env::args_os().nth(1).unwrap_or_else(|| "perf.data".into());
    let mut reader = Reader::open(Path::new(&path))?;
    if let Some(info) = reader.find_pt_info()? {
        println!("# {info:?}");
        println!("# {:?}", reader.pt_config());
    }
    loop {
        match reader.next_record()? {
            Next::Record(record) => {
                if let Some(line) = line(&reader, &record) {
                    println!("{line}");
                }
            }
            Next::End => break,
            other => {
                println!("# {other:?}");
                if let Next::Cut { .. } | Next::CutChunk { .. } = other {
                    break;
                }
            }
        }
    }
    Ok(())
}

fn line(reader: &Reader, record: &Record) -> Option<String> {
    let out = |out| if out { "OUT" } else { "IN" };
    Some(match record.body {
        Body::Comm { pid, tid, comm, exec } => {
            let exec = if exec { " exec" } else { "" };
            format!("PERF_RECORD_COMM{exec}: {}:{pid}/{tid}", String::from_utf8_lossy(comm.as_bytes()))
        }
        Body::Mmap(mmap) => mmap_line(&mmap, &String::from_utf8_lossy(reader.names().get(mmap.path))),
        Body::Fork(task) => {
            format!("PERF_RECORD_FORK({}:{}):({}:{})", task.pid, task.tid, task.parent_pid, task.parent_tid)
        }
        Body::Exit(task) => {
            format!("PERF_RECORD_EXIT({}:{}):({}:{})", task.pid, task.tid, task.parent_pid, task.parent_tid)
        }
        Body::ItraceStart { pid, tid } => format!("PERF_RECORD_ITRACE_START pid: {pid} tid: {tid}"),
        Body::Switch { out: to } => format!("PERF_RECORD_SWITCH {}", out(to)),
        Body::SwitchCpuWide { out: to, other_pid, other_tid } => {
            let who = if to { "next" } else { "prev" };
            format!("PERF_RECORD_SWITCH_CPU_WIDE {} {who} pid/tid: {other_pid}/{other_tid}", out(to))
        }
        Body::SchedSwitch { prev_tid, next_tid } => format!("sched_switch {prev_tid} ==> {next_tid}"),
        Body::Compressed => "# damaged".to_owned(),
        _ => return None,
    })
}

fn mmap_line(mmap: &Mmap, path: &str) -> String {
    let Mmap { pid, tid, addr, len, file_offset, prot, flags, .. } = *mmap;
    let (pid, tid) = (pid as i32, tid as i32);
    let hex = |n: u64| if n == 0 { "0".to_owned() } else { format!("{n:#x}") };
    let place = format!("{pid}/{tid}: [{}({}) @ {}", hex(addr), hex(len), hex(file_offset));
    let file = match mmap.file {
        FileId::Unknown => {
            let how = if prot & 4 == 0 { 'r' } else { 'x' };
            return format!("PERF_RECORD_MMAP {place}]: {how} {path}");
        }
        FileId::Inode { major, minor, inode, generation } => format!("{major:02x}:{minor:02x} {inode} {generation}"),
        FileId::BuildId(id) => {
            let id: String = id.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
            format!("<{id}>")
        }
    };
    let how: String = PROT.iter().map(|&(bit, letter)| if prot & bit == 0 { '-' } else { letter }).collect();
    let shared = if flags & MAP_SHARED == 0 { 'p' } else { 's' };
    format!("PERF_RECORD_MMAP2 {place} {file}]: {how}{shared} {path}")
}
