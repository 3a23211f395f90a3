//! Reads the records of a perf.data one after the other, also of one that is still being written or was cut.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::attrs::Attrs;
use super::bytes::Cursor;
use super::error::Error;
use super::header::{read_at_most, read_into, Header};
use super::layout::{record, AUXTRACE_LEN, HEADER_DATA_SIZE, RECORD_HEADER_LEN};
use super::names::Names;
use super::parse::{Known, Raw};
use super::ptinfo::{PtConfig, PtInfo};
use super::records::{AuxChunk, Body, BuildId, ChunkKind, Record, SampleId};
use super::unpack::{Unpacked, Unpacker};
use crate::pt::Errata;

/// Bytes read at once. A record has at most 65,535.
const WINDOW_LEN: usize = 1 << 17;
/// Headers of the records that are looked for after damage: they are alike in all files.
const ROUND_HEAD: [u8; RECORD_HEADER_LEN] = [record::FINISHED_ROUND as u8, 0, 0, 0, 0, 0, RECORD_HEADER_LEN as u8, 0];
const CHUNK_HEAD: [u8; RECORD_HEADER_LEN] = [record::AUXTRACE as u8, 0, 0, 0, 0, 0, AUXTRACE_LEN as u8, 0];

/// What comes next in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    Record(Record),
    /// The data end here, for now.
    End,
    /// The file ends before or inside the record at `offset`. It comes again until the file has grown, as does `CutChunk`.
    Cut {
        offset: u64,
        missing: u64,
    },
    /// The file ends inside this chunk of trace, which tells `told` bytes; its `len` are those that are there.
    CutChunk {
        chunk: AuxChunk,
        told: u64,
        missing: u64,
    },
    /// A chunk of trace that tells a size that cannot be; its `len` bytes are those up to the next sure record.
    BadChunk {
        chunk: AuxChunk,
        told: u64,
    },
    /// `len` bytes at `offset` are no records, up to the next sure one.
    NoRecord {
        offset: u64,
        len: u64,
    },
}

/// See the module.
pub struct Reader {
    file: File,
    data_offset: u64,
    pipe: bool,
    /// Offset in the file up to which there are records.
    end: u64,
    /// The header tells a size, and this many bytes more than the file has.
    sized: bool,
    missing: u64,
    /// Records so far, and what they are.
    records: u64,
    samples: u64,
    has_trace: bool,
    known: Known,
    unpacker: Unpacker,
    window: Vec<u8>,
    /// Offset in the file of the window's first byte, and of the next record.
    window_offset: u64,
    offset: u64,
}

impl Reader {
    /// Checks the head of the file. Pipes and folders are not read.
    pub fn open(path: &Path) -> Result<Self, Error> {
        // A pipe that nobody writes to must not be waited for.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(path)?;
        if !file.metadata()?.is_file() {
            return Err(Error::format("not a regular file", 0));
        }
        let Header { data_offset, pipe, attrs, build_ids, cpu } = Header::read(&file)?;
        let mut reader = Self {
            file,
            data_offset,
            pipe,
            end: data_offset,
            sized: false,
            missing: 0,
            records: 0,
            samples: 0,
            has_trace: false,
            known: Known { attrs, build_ids, cpu, ..Known::default() },
            unpacker: Unpacker::default(),
            window: Vec::new(),
            window_offset: data_offset,
            offset: data_offset,
        };
        reader.refresh()?;
        Ok(reader)
    }

    /// Looks how far the file is whole by now.
    pub fn refresh(&mut self) -> Result<(), Error> {
        // In this order: a recorder writes first and tells then.
        let told = if self.pipe { Vec::new() } else { read_at_most(&self.file, HEADER_DATA_SIZE, 8)? };
        let len = self.file.metadata()?.len();
        // perf tells the size only when it ends: whole records up to the end of the file.
        let size = Cursor::new(&told).u64().filter(|&size| size != 0);
        let told_end = size.map_or(len, |size| self.data_offset.saturating_add(size));
        self.sized = size.is_some();
        self.missing = told_end.saturating_sub(len);
        self.end = told_end.min(len);
        Ok(())
    }

    /// Offset in the file of the next record.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The events of the file. In one that was written to a pipe they come with its first records.
    #[must_use]
    pub fn attrs(&self) -> &Attrs {
        &self.known.attrs
    }

    /// (path, build id) of files that were mapped, as far as the recorder looked at them when it ended. In a file that
    /// was written to a pipe they come among its records: see [`is_pipe`](Self::is_pipe).
    #[must_use]
    pub fn build_ids(&self) -> &[(Box<[u8]>, BuildId)] {
        &self.known.build_ids
    }

    /// Written to a pipe: what other files have in their header comes as records.
    #[must_use]
    pub fn is_pipe(&self) -> bool {
        self.pipe
    }

    /// What wrote the trace may do otherwise than the manual says, by the CPU's model where the file tells it.
    #[must_use]
    pub fn errata(&self) -> Errata {
        let errata = Errata::of(self.known.cpu);
        // Without a filter no jump leaves what is traced.
        let filtered = self.pt_info().is_some_and(|info| info.filter.is_some());
        Errata { no_target: errata.no_target && filtered, ..errata }
    }

    /// The texts of the records so far.
    #[must_use]
    pub fn names(&self) -> &Names {
        &self.known.names
    }

    /// How Intel PT was set up, once the record that tells it was read: see [`find_pt_info`](Self::find_pt_info).
    #[must_use]
    pub fn pt_info(&self) -> Option<&PtInfo> {
        self.known.info.as_ref()
    }

    /// What of Intel PT was turned on, by the same record.
    #[must_use]
    pub fn pt_config(&self) -> Option<PtConfig> {
        self.pt_info().and_then(|info| info.config(self.attrs()))
    }

    /// Before the first record was read: reads ahead to the one that tells how Intel PT was set up, which stands before
    /// all trace, and goes back. Later: what was read.
    pub fn find_pt_info(&mut self) -> Result<Option<&PtInfo>, Error> {
        if self.offset == self.data_offset {
            let back = (self.records, self.samples);
            while self.known.info.is_none() {
                match self.next_in_file()? {
                    Next::Record(Record { body: Body::Aux(_) | Body::FinishedRound, .. }) => break,
                    Next::Record(_) => {}
                    _ => break,
                }
            }
            (self.records, self.samples) = back;
            self.offset = self.data_offset;
            self.unpacker = Unpacker::default();
        }
        Ok(self.known.info.as_ref())
    }

    /// Said at the end of a file in which no record, not even an AUXTRACE_INFO, speaks of a trace.
    #[must_use]
    pub fn no_trace(&self) -> Option<Error> {
        let Self { records, samples, .. } = *self;
        (!self.has_trace).then_some(Error::NoTrace { records, samples })
    }

    /// The next record, compressed ones included; the trace behind an AUXTRACE is skipped.
    pub fn next_record(&mut self) -> Result<Next, Error> {
        loop {
            if let Some(record) = self.next_unpacked()? {
                return Ok(Next::Record(record));
            }
            match self.next_in_file()? {
                Next::Record(Record { body: Body::Compressed, .. }) => {}
                Next::End if self.sized && self.unpacker.has_rest() => {
                    self.unpacker.give_up();
                    return Ok(Next::Record(self.not_unpacked()));
                }
                next => return Ok(next),
            }
        }
    }

    fn next_unpacked(&mut self) -> Result<Option<Record>, Error> {
        let (kind, misc) = match self.unpacker.next_record() {
            Unpacked::Record { kind, misc } => (kind, misc),
            Unpacked::Empty => return Ok(None),
            Unpacked::Damaged => return Ok(Some(self.not_unpacked())),
        };
        let mut record = self.known.parse(&Raw { kind, misc, bytes: self.unpacker.record(), file_offset: 0 });
        record.file_offset = self.unpacker.file_offset();
        if let Body::Aux(chunk) = &mut record.body {
            // Its offset is that in the record so far.
            chunk.file_offset = self.unpacker.keep(chunk.file_offset as usize, chunk.len as usize)?;
        }
        self.count(kind);
        Ok(Some(record))
    }

    fn not_unpacked(&self) -> Record {
        Record { file_offset: self.unpacker.file_offset(), id: SampleId::default(), body: Body::Compressed }
    }

    fn count(&mut self, kind: u32) {
        self.records += 1;
        self.samples += u64::from(kind == record::SAMPLE);
        self.has_trace |= matches!(kind, record::AUXTRACE_INFO | record::AUXTRACE);
    }

    fn next_in_file(&mut self) -> Result<Next, Error> {
        let offset = self.offset;
        if offset >= self.end {
            return Ok(match self.missing {
                0 => Next::End,
                missing => Next::Cut { offset, missing },
            });
        }
        let available = self.end - offset;
        let Some((kind, misc, size)) = self.record_header(offset)? else {
            return self.not_whole(offset, RECORD_HEADER_LEN as u64);
        };
        if usize::from(size) < RECORD_HEADER_LEN || kind > record::MAX_TYPE {
            return self.no_record(offset);
        }
        if u64::from(size) > available || !self.fill(offset, usize::from(size))? {
            return self.not_whole(offset, size.into());
        }
        let start = (offset - self.window_offset) as usize;
        let bytes = self.window.get(start..start + usize::from(size)).unwrap_or_default();
        let record = self.known.parse(&Raw { kind, misc, bytes, file_offset: offset });
        let mut next = offset + u64::from(size);
        match record.body {
            Body::Aux(chunk) if chunk.kind != ChunkKind::Sample => {
                match next.checked_add(chunk.len).filter(|&next| next <= self.end) {
                    Some(behind) => next = behind,
                    None => return self.short_chunk(chunk),
                }
            }
            _ if kind == record::TRACING_DATA => {
                let told = bytes.get(RECORD_HEADER_LEN..).and_then(|rest| Cursor::new(rest).u32()).unwrap_or(0);
                next += u64::from(told);
                if next > self.end {
                    return self.not_whole(offset, next - offset);
                }
            }
            _ => {}
        }
        self.offset = next;
        if record.body == Body::Compressed {
            self.unpacker.feed(kind, bytes.get(RECORD_HEADER_LEN..).unwrap_or_default(), offset);
        } else {
            self.count(kind);
        }
        Ok(Next::Record(record))
    }

    /// The record at `offset` would need `len` bytes: the file is cut, or its size is wrong.
    fn not_whole(&mut self, offset: u64, len: u64) -> Result<Next, Error> {
        if self.sized && self.missing == 0 {
            return self.no_record(offset);
        }
        let missing = if self.sized { self.missing } else { len.saturating_sub(self.end - offset) };
        Ok(Next::Cut { offset, missing })
    }

    fn no_record(&mut self, offset: u64) -> Result<Next, Error> {
        self.offset = self.find_record(offset + 1)?;
        Ok(Next::NoRecord { offset, len: self.offset - offset })
    }

    /// A chunk that reaches beyond the end: the file is cut, or even the whole one could not hold it.
    fn short_chunk(&mut self, mut chunk: AuxChunk) -> Result<Next, Error> {
        self.has_trace = true;
        let told = chunk.len;
        let here = self.end - chunk.file_offset;
        let whole_end = self.end.saturating_add(self.missing);
        let fits = chunk.file_offset.checked_add(told).is_some_and(|end| !self.sized || end <= whole_end);
        if fits {
            chunk.len = here;
            let missing = if self.sized { self.missing } else { told.saturating_sub(here) };
            return Ok(Next::CutChunk { chunk, told, missing });
        }
        self.offset = self.find_record(chunk.file_offset)?;
        chunk.len = self.offset - chunk.file_offset;
        Ok(Next::BadChunk { chunk, told })
    }

    /// The first record from `from` on that is sure enough after damage: the end of a round, or a chunk of trace that
    /// is all there; else the end.
    fn find_record(&mut self, from: u64) -> Result<u64, Error> {
        let mut at = from;
        while self.end.saturating_sub(at) >= RECORD_HEADER_LEN as u64 && self.fill(at, RECORD_HEADER_LEN)? {
            let start = (at - self.window_offset) as usize;
            let bytes = self.window.get(start..).unwrap_or_default();
            let sure = |head: &[u8]| *head == ROUND_HEAD || *head == CHUNK_HEAD;
            let Some(skip) = bytes.windows(RECORD_HEADER_LEN).position(sure) else {
                // The end of the window may be the start of one.
                at += (bytes.len() - RECORD_HEADER_LEN + 1) as u64;
                continue;
            };
            at += skip as u64;
            let mut len = Cursor::new(bytes.get(skip + RECORD_HEADER_LEN..).unwrap_or_default());
            if bytes.get(skip..).is_some_and(|found| found.starts_with(&ROUND_HEAD)) {
                return Ok(at);
            }
            let whole = |len: u64| len.checked_add(at + AUXTRACE_LEN as u64).is_some_and(|end| end <= self.end);
            match len.u64() {
                Some(len) if whole(len) => return Ok(at),
                Some(_) => at += 1,
                // The window ends inside its length.
                None if self.end - at >= AUXTRACE_LEN as u64 && self.fill(at, AUXTRACE_LEN)? => {}
                None => break,
            }
        }
        Ok(self.end)
    }

    /// Reads the trace bytes at `file_offset`: as many as there are, at most `buffer.len()`.
    pub fn read_trace(&self, file_offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        self.unpacker.read(file_offset, buffer).unwrap_or_else(|| read_into(&self.file, file_offset, buffer))
    }

    fn record_header(&mut self, offset: u64) -> Result<Option<(u32, u16, u16)>, Error> {
        if self.end - offset < RECORD_HEADER_LEN as u64 || !self.fill(offset, RECORD_HEADER_LEN)? {
            return Ok(None);
        }
        let start = (offset - self.window_offset) as usize;
        let mut fields = Cursor::new(self.window.get(start..).unwrap_or_default());
        Ok(fields.u32().zip(fields.u16()).zip(fields.u16()).map(|((kind, misc), size)| (kind, misc, size)))
    }

    /// Makes the window hold `len` bytes from `offset` on; false where the file does not.
    fn fill(&mut self, offset: u64, len: usize) -> Result<bool, Error> {
        let held = offset
            .checked_sub(self.window_offset)
            .filter(|&start| start.checked_add(len as u64).is_some_and(|end| end <= self.window.len() as u64));
        if held.is_some() {
            return Ok(true);
        }
        let want = usize::try_from(self.end - offset).map_or(WINDOW_LEN, |n| n.min(WINDOW_LEN));
        let mut window = std::mem::take(&mut self.window);
        window.resize(want, 0);
        let read = self.read_trace(offset, &mut window);
        window.truncate(*read.as_ref().unwrap_or(&0));
        self.window = window;
        self.window_offset = offset;
        Ok(read? >= len)
    }
}
