//! Reads the records of a perf.data one after the other, also of one that is still being written or was cut.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use super::bytes::Cursor;
use super::error::Error;
use super::layout::{attr_flag, record, sample, AUXTRACE_LEN, HEADER_DATA_SIZE, HEADER_LEN, MAGIC, RECORD_HEADER_LEN};
use super::records::{self, AuxChunk, Body, Record};

/// Bytes read at once. A record has at most 65,535.
const WINDOW_LEN: usize = 1 << 17;
/// perf itself records some thousand events at most.
const MAX_ATTRS: u64 = 1 << 14;
const MAX_ATTR_LEN: u64 = 4096;
/// One per event and CPU.
const MAX_IDS: usize = 1 << 17;

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
    /// Offset in the file up to which there are records.
    end: u64,
    /// The header tells a size, and this many bytes more than the file has.
    sized: bool,
    missing: u64,
    /// Records so far, and what they are.
    records: u64,
    samples: u64,
    has_trace: bool,
    sample_types: SampleTypes,
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
        let head = read_at_most(&file, 0, HEADER_LEN as usize)?;
        let mut fields = Cursor::new(&head);
        match fields.u64() {
            Some(MAGIC) => {}
            Some(other) if other == MAGIC.swap_bytes() => {
                return Err(Error::format("a perf.data of a big-endian machine", 0));
            }
            Some(_) => return Err(Error::format("not a perf.data (no PERFILE2 at its start)", 0)),
            None => return Err(Error::format("not a perf.data (shorter than its magic)", 0)),
        }
        let short = || Error::format("the file ends inside the perf.data header", head.len() as u64);
        if fields.u64().ok_or_else(short)? < HEADER_LEN {
            return Err(Error::format("a perf.data written to a pipe", 8));
        }
        let attr_len = fields.u64().ok_or_else(short)?;
        let (attrs_at, attrs_len) = (fields.u64().ok_or_else(short)?, fields.u64().ok_or_else(short)?);
        let data_offset = fields.u64().ok_or_else(short)?;
        if data_offset < HEADER_LEN {
            return Err(Error::format("the data section begins inside the header", 40));
        }
        let sample_types = read_attrs(&file, attr_len, attrs_at, attrs_len)?;
        let mut reader = Self {
            file,
            data_offset,
            end: data_offset,
            sized: false,
            missing: 0,
            records: 0,
            samples: 0,
            has_trace: false,
            sample_types,
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
        let told = read_at_most(&self.file, HEADER_DATA_SIZE, 8)?;
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

    /// Said at the end of a file in which no record, not even an AUXTRACE_INFO, speaks of a trace.
    #[must_use]
    pub fn no_trace(&self) -> Option<Error> {
        let Self { records, samples, .. } = *self;
        (!self.has_trace).then_some(Error::NoTrace { records, samples })
    }

    /// The next record; the trace behind an AUXTRACE is skipped.
    pub fn next_record(&mut self) -> Result<Next, Error> {
        let offset = self.offset;
        if offset >= self.end {
            return Ok(match self.missing {
                0 => Next::End,
                missing => Next::Cut { offset, missing },
            });
        }
        let available = self.end - offset;
        let Some((kind, flags, size)) = self.record_header(offset)? else {
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
        let record = records::parse(kind, flags, bytes, offset, self.sample_type(kind, bytes));
        let mut next = offset + u64::from(size);
        if let Body::Aux(chunk) = record.body {
            match next.checked_add(chunk.len).filter(|&next| next <= self.end) {
                Some(behind) => next = behind,
                None => return self.short_chunk(chunk),
            }
        }
        self.offset = next;
        self.records += 1;
        self.samples += u64::from(record.body == Body::Sample);
        self.has_trace |= matches!(kind, record::AUXTRACE_INFO | record::AUXTRACE);
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
        let mut done = 0;
        while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
            match self.file.read_at(rest, file_offset.saturating_add(done as u64)) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(done)
    }

    fn record_header(&mut self, offset: u64) -> Result<Option<(u32, u16, u16)>, Error> {
        if self.end - offset < RECORD_HEADER_LEN as u64 || !self.fill(offset, RECORD_HEADER_LEN)? {
            return Ok(None);
        }
        let start = (offset - self.window_offset) as usize;
        let mut fields = Cursor::new(self.window.get(start..).unwrap_or_default());
        Ok(fields.u32().zip(fields.u16()).zip(fields.u16()).map(|((kind, flags), size)| (kind, flags, size)))
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

    /// `sample_type` of the event that a record belongs to: by the id at its very end where there are several.
    fn sample_type(&self, kind: u32, bytes: &[u8]) -> u64 {
        let first = self.sample_types.first;
        if kind >= record::USER_TYPE_START || first & sample::IDENTIFIER == 0 {
            return first;
        }
        let last = bytes.len().checked_sub(8).and_then(|at| Cursor::new(bytes.get(at..)?).u64());
        last.and_then(|id| self.sample_types.by_id.get(&id)).copied().unwrap_or(first)
    }
}

fn read_at_most(file: &File, offset: u64, len: usize) -> Result<Vec<u8>, Error> {
    let mut bytes = vec![0; len];
    let mut done = 0;
    while let Some(rest) = bytes.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, offset.saturating_add(done as u64)) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e.into()),
        }
    }
    bytes.truncate(done);
    Ok(bytes)
}

/// `sample_type` of the events whose records carry a sample id; 0 where none does.
#[derive(Default)]
struct SampleTypes {
    first: u64,
    by_id: HashMap<u64, u64>,
}

fn read_attrs(file: &File, entry_len: u64, at: u64, len: u64) -> Result<SampleTypes, Error> {
    // 48 bytes up to the flags, 16 for the section of ids.
    if !(64..=MAX_ATTR_LEN).contains(&entry_len) || len / entry_len > MAX_ATTRS {
        return Err(Error::format("a size of event attributes that cannot be", 16));
    }
    let mut types = SampleTypes::default();
    for index in 0..len / entry_len {
        let offset = at.saturating_add(index * entry_len);
        let entry = read_at_most(file, offset, entry_len as usize)?;
        let cut = || Error::format("the file ends inside its event attributes", offset);
        let word = |at: usize| Cursor::new(entry.get(at..).unwrap_or_default()).u64().ok_or_else(cut);
        let (sample_type, flags) = (word(24)?, word(40)?);
        if flags & attr_flag::SAMPLE_ID_ALL == 0 {
            continue;
        }
        if types.first == 0 {
            types.first = sample_type;
        }
        let ids_section = entry_len as usize - 16;
        let (ids_at, ids_len) = (word(ids_section)?, word(ids_section + 8)?);
        let room = MAX_IDS.saturating_sub(types.by_id.len());
        let ids = read_at_most(file, ids_at, usize::try_from(ids_len).map_or(8 * room, |n| n.min(8 * room)))?;
        types.by_id.extend(ids.chunks_exact(8).filter_map(|id| Some((Cursor::new(id).u64()?, sample_type))));
    }
    Ok(types)
}
