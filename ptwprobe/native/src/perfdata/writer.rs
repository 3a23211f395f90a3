//! Writes a session's perf.data, readable by stock perf at any moment.
//!
//! Records gather in a buffer; `flush` writes them and only then tells the header, so a reader (or a crash) never sees
//! half a record. Times are ns of CLOCK_MONOTONIC.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use super::features::Features;
use super::head::file_head;
use super::layout::{
    misc, pt_config, record, AUXTRACE_INTEL_PT, AUXTRACE_LEN, DUMMY_EVENT_ID, HEADER_DATA_SIZE, HEADER_FEATURES,
    INFO_TIME_SHIFT, INFO_WORDS, RECORD_HEADER_LEN,
};
use crate::clock::TimeConv;

/// The buffer is written out beyond this, whole records at a time.
const BUFFER_LEN: usize = 1 << 20;

/// A file name in MMAP2 is cut to what a path can have; a comm to what the kernel keeps.
const MAX_PATH: usize = 4095;
const MAX_COMM: usize = 63;

/// Facts that the head of the file needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriterInfo {
    /// Number of the PT PMU; where there is none any number does that no other event has.
    pub pmu_type: u32,
}

impl Default for WriterInfo {
    /// What most machines with PT have.
    fn default() -> Self {
        Self { pmu_type: 8 }
    }
}

/// An executable mapping of a process. `build_id` is used instead of device and inode where it is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mmap2<'a> {
    pub pid: u32,
    pub tid: u32,
    pub addr: u64,
    pub len: u64,
    /// Bytes.
    pub file_offset: u64,
    pub major: u32,
    pub minor: u32,
    pub inode: u64,
    /// At most 20 bytes.
    pub build_id: Option<&'a [u8]>,
    /// `PROT_*` and `MAP_*`.
    pub prot: u32,
    pub flags: u32,
    pub path: &'a [u8],
    pub ns: u64,
}

/// Who, when and where of a record.
#[derive(Clone, Copy)]
struct SampleId {
    pid: u32,
    tid: u32,
    ns: u64,
    cpu: u32,
}

#[derive(Clone, Copy, Default)]
struct AuxStream {
    idx: u32,
    /// Bytes written so far.
    len: u64,
}

/// See the module. After an error of a write the file is whole up to its last record, and stays so.
pub struct Writer {
    file: File,
    buffer: Vec<u8>,
    data_offset: u64,
    /// Bytes of the data section that are in the file; the header may tell fewer.
    written: u64,
    streams: HashMap<u32, AuxStream>,
    info_offset: u64,
    conv_offset: u64,
    /// The `errno` of the write that failed.
    failed: Option<i32>,
}

impl Writer {
    /// Creates the file (mode 0600, never through a link, never over an old one) and writes its head.
    pub fn create(path: &Path, conv: TimeConv, who: WriterInfo) -> io::Result<Self> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC)
            .open(path)?;
        let (head, data_offset) = file_head(who);
        file.write_all_at(&head, 0)?;
        let mut writer = Self {
            file,
            buffer: Vec::with_capacity(BUFFER_LEN + (BUFFER_LEN >> 2)),
            data_offset,
            written: 0,
            streams: HashMap::new(),
            info_offset: data_offset,
            conv_offset: 0,
            failed: None,
        };
        writer.auxtrace_info(conv, who);
        writer.conv_offset = data_offset + writer.buffer.len() as u64;
        writer.time_conv(conv);
        writer.flush()?;
        Ok(writer)
    }

    /// The name of a thread; `exec` where it got it by an exec.
    pub fn comm(&mut self, pid: u32, tid: u32, comm: &[u8], ns: u64, exec: bool) -> io::Result<()> {
        let flags = if exec { misc::COMM_EXEC } else { 0 };
        let at = self.begin(record::COMM, flags);
        self.u32(pid);
        self.u32(tid);
        self.text(comm, MAX_COMM);
        self.end(at, SampleId { pid, tid, ns, cpu: 0 })
    }

    pub fn mmap2(&mut self, map: &Mmap2<'_>) -> io::Result<()> {
        let build_id = map.build_id.filter(|id| !id.is_empty() && id.len() <= 20);
        let flags = if build_id.is_some() { misc::MMAP_BUILD_ID } else { 0 };
        let at = self.begin(record::MMAP2, misc::USER | flags);
        self.u32(map.pid);
        self.u32(map.tid);
        self.u64(map.addr);
        self.u64(map.len);
        self.u64(map.file_offset);
        match build_id {
            Some(id) => {
                self.u32(id.len() as u32);
                let end = self.buffer.len() + 20;
                self.buffer.extend_from_slice(id);
                self.buffer.resize(end, 0);
            }
            None => {
                self.u32(map.major);
                self.u32(map.minor);
                self.u64(map.inode);
                self.u64(0);
            }
        }
        self.u32(map.prot);
        self.u32(map.flags);
        self.text(map.path, MAX_PATH);
        self.end(at, SampleId { pid: map.pid, tid: map.tid, ns: map.ns, cpu: 0 })
    }

    /// `tid` of process `pid` begins; its parent is `ptid` of `ppid`.
    pub fn fork(&mut self, pid: u32, tid: u32, ppid: u32, ptid: u32, ns: u64) -> io::Result<()> {
        self.task(record::FORK, [pid, ppid, tid, ptid], ns)
    }

    pub fn exit(&mut self, pid: u32, tid: u32, ppid: u32, ptid: u32, ns: u64) -> io::Result<()> {
        self.task(record::EXIT, [pid, ppid, tid, ptid], ns)
    }

    /// From `ns` on the thread runs on `cpu`.
    pub fn switch_in(&mut self, pid: u32, tid: u32, cpu: u32, ns: u64) -> io::Result<()> {
        let at = self.begin(record::SWITCH, misc::USER);
        self.end(at, SampleId { pid, tid, ns, cpu })
    }

    /// `count` hits found no room in the ring of `cpu`.
    pub fn lost(&mut self, count: u64, cpu: u32, ns: u64) -> io::Result<()> {
        let at = self.begin(record::LOST, 0);
        self.u64(DUMMY_EVENT_ID);
        self.u64(count);
        self.end(at, SampleId { pid: 0, tid: 0, ns, cpu })
    }

    /// `count` hits of the ring of `cpu` were begun and never finished.
    pub fn torn(&mut self, count: u64, cpu: u32, ns: u64) -> io::Result<()> {
        let at = self.begin(record::LOST_SAMPLES, 0);
        self.u64(count);
        self.end(at, SampleId { pid: 0, tid: 0, ns, cpu })
    }

    /// Packets of one thread, beginning with a PSB. `tsc_reference` is a full TSC value near them and not 0, else perf
    /// drops their times. COMM or FORK tells the process of `tid`, so it is not written here.
    ///
    /// All packets of a round have to be in the file before its `finished_round`, and a round holds nothing older
    /// than the one before.
    pub fn auxtrace(&mut self, tid: u32, _pid: u32, bytes: &[u8], tsc_reference: u64) -> io::Result<()> {
        self.check()?;
        let idx = self.streams.len() as u32;
        let stream = self.streams.entry(tid).or_insert(AuxStream { idx, len: 0 });
        let AuxStream { idx, len: offset } = *stream;
        stream.len += bytes.len() as u64;
        let at = self.begin(record::AUXTRACE, 0);
        self.u64(bytes.len() as u64);
        self.u64(offset);
        self.u64(tsc_reference.max(1));
        self.u32(idx);
        self.u32(tid);
        // No cpu: the stream is the thread's, wherever it runs.
        self.u32(u32::MAX);
        self.u32(0);
        self.close(at);
        debug_assert_eq!(self.buffer.len() - at, AUXTRACE_LEN);
        self.buffer.extend_from_slice(bytes);
        self.spill()
    }

    /// All before this is older than all after the next one.
    pub fn finished_round(&mut self) -> io::Result<()> {
        let at = self.begin(record::FINISHED_ROUND, 0);
        self.close(at);
        self.spill()
    }

    /// Writes everything buffered, then tells the header. When a write fails (a full disk, say) the file is cut back
    /// to its last whole record, which the header then tells, and the error is returned; so it is by all later calls.
    pub fn flush(&mut self) -> io::Result<()> {
        self.write_buffer()?;
        self.write_data_size()
    }

    /// After an error: the next write is tried again, from the last whole record on.
    pub fn resume(&mut self) {
        self.failed = None;
    }

    /// Writes the features and the final time factors, by which all packets are converted.
    pub fn finish(mut self, conv: TimeConv, features: &Features) -> io::Result<()> {
        self.flush()?;
        let factors = [u64::from(conv.shift), u64::from(conv.mult), conv.zero].map(u64::to_le_bytes).concat();
        let info_factors = self.info_offset + 16 + 8 * INFO_TIME_SHIFT as u64;
        self.file.write_all_at(&factors, info_factors)?;
        self.file.write_all_at(&factors, self.conv_offset + RECORD_HEADER_LEN as u64)?;
        self.write_features(features)
    }

    /// Bytes in the file, the buffered ones included.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.data_offset + self.written + self.buffer.len() as u64
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.written == 0 && self.buffer.is_empty()
    }

    fn write_features(&self, features: &Features) -> io::Result<()> {
        let sections = features.sections();
        let table = self.data_offset + self.written;
        let mut mask = [0u64; 4];
        let mut index = Vec::new();
        let mut bodies = Vec::new();
        let first_body = table + 16 * sections.len() as u64;
        for (bit, body) in &sections {
            mask[0] |= 1 << bit;
            index.extend_from_slice(&(first_body + bodies.len() as u64).to_le_bytes());
            index.extend_from_slice(&(body.len() as u64).to_le_bytes());
            bodies.extend_from_slice(body);
        }
        index.extend_from_slice(&bodies);
        self.file.write_all_at(&index, table)?;
        // The mask last: before it the sections are bytes after the end.
        self.file.write_all_at(&mask.map(u64::to_le_bytes).concat(), HEADER_FEATURES)
    }

    fn check(&self) -> io::Result<()> {
        self.failed.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)))
    }

    fn spill(&mut self) -> io::Result<()> {
        if self.failed.is_some() {
            self.buffer.clear();
        }
        if self.buffer.len() >= BUFFER_LEN {
            self.write_buffer()
        } else {
            self.check()
        }
    }

    fn write_buffer(&mut self) -> io::Result<()> {
        self.check()?;
        let mut done = 0;
        while let Some(rest) = self.buffer.get(done..).filter(|rest| !rest.is_empty()) {
            match self.file.write_at(rest, self.data_offset + self.written + done as u64) {
                Ok(0) => return Err(self.cut_back(done, io::Error::from_raw_os_error(libc::ENOSPC))),
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(self.cut_back(done, e)),
            }
        }
        self.written += done as u64;
        self.buffer.clear();
        Ok(())
    }

    /// `done` bytes of the buffer are in the file: keeps the whole records among them.
    fn cut_back(&mut self, done: usize, error: io::Error) -> io::Error {
        self.written += whole_records(&self.buffer, done) as u64;
        self.buffer.clear();
        self.failed = Some(error.raw_os_error().unwrap_or(libc::EIO));
        // Neither needs room on the disk. Should they fail as well, the header tells the size of the flush before.
        let _ = self.file.set_len(self.data_offset + self.written);
        let _ = self.write_data_size();
        error
    }

    fn write_data_size(&self) -> io::Result<()> {
        self.file.write_all_at(&self.written.to_le_bytes(), HEADER_DATA_SIZE)
    }

    fn task(&mut self, kind: u32, ids: [u32; 4], ns: u64) -> io::Result<()> {
        let at = self.begin(kind, 0);
        for id in ids {
            self.u32(id);
        }
        self.u64(ns);
        self.end(at, SampleId { pid: ids[0], tid: ids[2], ns, cpu: 0 })
    }

    fn auxtrace_info(&mut self, conv: TimeConv, who: WriterInfo) {
        let mut words = [0u64; INFO_WORDS];
        let filled = [
            u64::from(who.pmu_type),
            u64::from(conv.shift),
            u64::from(conv.mult),
            conv.zero,
            1, // the factors count
            pt_config::TSC,
            pt_config::NORETCOMP,
        ];
        words[..filled.len()].copy_from_slice(&filled);
        let at = self.begin(record::AUXTRACE_INFO, 0);
        self.u32(AUXTRACE_INTEL_PT);
        self.u32(0);
        for word in words {
            self.u64(word);
        }
        self.close(at);
    }

    fn time_conv(&mut self, conv: TimeConv) {
        let at = self.begin(record::TIME_CONV, 0);
        // Shift, mult, zero; cycles and mask of a short counter; then one byte each: the factors count, no short counter.
        for word in [u64::from(conv.shift), u64::from(conv.mult), conv.zero, 0, 0, 1] {
            self.u64(word);
        }
        self.close(at);
    }

    fn begin(&mut self, kind: u32, misc: u16) -> usize {
        let at = self.buffer.len();
        self.u32(kind);
        self.buffer.extend_from_slice(&misc.to_le_bytes());
        self.buffer.extend_from_slice(&[0, 0]);
        at
    }

    /// Ends a record of the kernel's kind.
    fn end(&mut self, at: usize, id: SampleId) -> io::Result<()> {
        self.u32(id.pid);
        self.u32(id.tid);
        self.u64(id.ns);
        self.u32(id.cpu);
        self.u32(0);
        self.u64(DUMMY_EVENT_ID);
        self.close(at);
        self.spill()
    }

    /// Fills in the size of the record that began at `at`; texts are cut so that it fits.
    fn close(&mut self, at: usize) {
        let size = (self.buffer.len() - at) as u16;
        if let Some(field) = self.buffer.get_mut(at + 6..at + 8) {
            field.copy_from_slice(&size.to_le_bytes());
        }
    }

    fn u32(&mut self, value: u32) {
        self.buffer.extend_from_slice(&value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.buffer.extend_from_slice(&value.to_le_bytes());
    }

    /// Up to the first zero, cut to `max` bytes, with 1 to 8 zeros behind.
    fn text(&mut self, text: &[u8], max: usize) {
        let len = text.iter().position(|&b| b == 0).unwrap_or(text.len()).min(max);
        let end = self.buffer.len() + (len + 1).next_multiple_of(8);
        self.buffer.extend(text.iter().take(len));
        self.buffer.resize(end, 0);
    }
}

/// The records that end within the first `done` bytes of `buffer`, in bytes.
fn whole_records(buffer: &[u8], done: usize) -> usize {
    let mut at = 0;
    loop {
        let field = |from: usize, len: usize| {
            let bytes = buffer.get(at + from..at + from + len)?;
            Some(bytes.iter().rev().fold(0u64, |n, &b| n << 8 | u64::from(b)))
        };
        let Some((kind, size)) = field(0, 4).zip(field(6, 2)) else {
            return at;
        };
        let trace = if kind == u64::from(record::AUXTRACE) { field(8, 8).unwrap_or(u64::MAX) } else { 0 };
        match (at as u64).checked_add(size).and_then(|end| end.checked_add(trace)) {
            Some(end) if size != 0 && end <= done as u64 => at = end as usize,
            _ => return at,
        }
    }
}

#[cfg(test)]
mod tests;
