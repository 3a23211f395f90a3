//! The records of a perf.data as `Builder` takes them.

use std::path::Path;

use super::builder::{Builder, Map};
use super::elf::BuildId;
use super::files::{Places, Wanted};
use super::timeline::{Timeline, Who};
use crate::flow::code::Stub;
use crate::perfdata::{Body, CpuMode, Error, FileId, Mmap, Names, Next, Reader, Record};

/// The kernel's own mappings.
const KERNEL: u32 = u32::MAX;
const PROT_EXEC: u32 = libc::PROT_EXEC as u32;

impl Builder {
    /// Takes what `record` says of mappings, programs, threads and the clock; `names` are its file's.
    pub fn record(&mut self, record: &Record, names: &Names) {
        // perf tells no time of what it found when it began.
        let ns = record.id.ns.unwrap_or(0);
        match record.body {
            Body::Mmap(mmap)
                if mmap.pid != KERNEL && !matches!(mmap.mode, CpuMode::GuestKernel | CpuMode::GuestUser) =>
            {
                self.thread(ns, mmap.pid, mmap.tid);
                self.map(ns, map(&mmap, names));
            }
            Body::Comm { pid, tid, exec, .. } => {
                if exec {
                    self.exec(ns, pid);
                }
                self.thread(ns, pid, tid);
            }
            Body::Fork(task) => self.fork(ns, task.pid, task.parent_pid, task.tid, task.exec),
            Body::Time(conv) => self.clock(conv),
            _ => {}
        }
        if let Body::ItraceStart { pid, tid } = record.body {
            self.thread(ns, pid, tid);
        }
        if let Some((runs, cpu)) = record.runs().and_then(|runs| Some((runs, runs.cpu?))) {
            self.switch(ns, cpu, runs.tid.map(|tid| Who { pid: runs.pid, tid }));
        }
    }
}

fn map(mmap: &Mmap, names: &Names) -> Map {
    let mut file = Wanted { path: names.get(mmap.path).to_vec(), ..Wanted::default() };
    match mmap.file {
        FileId::Inode { major, minor, inode, .. } => file.inode = (major, minor, inode),
        FileId::BuildId(id) => file.build_id = BuildId::new(id.as_bytes()),
        FileId::Unknown => {}
    }
    let Mmap { pid, addr: start, len, file_offset, prot, .. } = *mmap;
    Map { pid, start, len, file_offset, executable: prot & PROT_EXEC != 0, file }
}

impl Timeline {
    /// One pass over the records of a perf.data. `stubs`: by process, as a session tells them.
    pub fn read(path: &Path, places: Places, stubs: impl IntoIterator<Item = (u32, Stub)>) -> Result<Self, Error> {
        let mut reader = Reader::open(path)?;
        let mut builder = Builder::new(places);
        if reader.is_pipe() {
            // They have to be known before the files are.
            let mut ahead = Reader::open(path)?;
            while let Next::Record(_) | Next::BadChunk { .. } | Next::NoRecord { .. } = ahead.next_record()? {}
            for (path, id) in ahead.build_ids() {
                builder.build_id(path, id.as_bytes());
            }
        }
        for (path, id) in reader.build_ids() {
            builder.build_id(path, id.as_bytes());
        }
        for (pid, stub) in stubs {
            builder.stub(pid, stub);
        }
        loop {
            match reader.next_record()? {
                Next::Record(record) => builder.record(&record, reader.names()),
                Next::BadChunk { .. } | Next::NoRecord { .. } => {}
                Next::End | Next::Cut { .. } | Next::CutChunk { .. } => return Ok(builder.finish()),
            }
        }
    }
}
