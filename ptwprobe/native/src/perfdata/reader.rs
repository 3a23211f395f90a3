//! Reads the records of a perf.data one after the other, also of one that is still being written or was cut.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use super::bytes::Cursor;
use super::error::Error;
use super::layout::{attr_flag, record, sample, HEADER_DATA_SIZE, HEADER_LEN, MAGIC, RECORD_HEADER_LEN};
use super::records::{self, Body, Record};

/// Bytes read at once. A record has at most 65,535.
const WINDOW_LEN: usize = 1 << 17;
/// perf itself records some thousand events at most.
const MAX_ATTRS: u64 = 1 << 14;
const MAX_ATTR_LEN: u64 = 4096;
/// One per event and CPU.
const MAX_IDS: usize = 1 << 17;

/// What comes next in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    Record(Record),
    /// The data end here, for now.
    End,
    /// What comes at the offset is not whole.
    Cut(u64),
    /// The record at the offset says that it has less bytes than its header: nothing after it can be found.
    Broken(u64),
}

/// See the module.
pub struct Reader {
    file: File,
    data_offset: u64,
    /// Offset in the file up to which records are whole.
    end: u64,
    /// The header tells more than the file has.
    short: bool,
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
            short: false,
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
        let len = self.file.metadata()?.len();
        let told = read_at_most(&self.file, HEADER_DATA_SIZE, 8)?;
        let told_end = match Cursor::new(&told).u64() {
            // perf tells the size only when it ends: whole records up to the end of the file.
            Some(0) | None => len,
            Some(size) => self.data_offset.saturating_add(size),
        };
        self.short = told_end > len;
        self.end = told_end.min(len);
        Ok(())
    }

    /// Offset in the file of the next record.
    #[must_use]
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// The next record; the trace behind an AUXTRACE is skipped.
    pub fn next_record(&mut self) -> Result<Next, Error> {
        let offset = self.offset;
        if offset >= self.end {
            return Ok(if self.short { Next::Cut(offset) } else { Next::End });
        }
        let available = self.end - offset;
        let Some((kind, flags, size)) = self.record_header(offset)? else { return Ok(Next::Cut(offset)) };
        if usize::from(size) < RECORD_HEADER_LEN {
            return Ok(Next::Broken(offset));
        }
        if u64::from(size) > available || !self.fill(offset, usize::from(size))? {
            return Ok(Next::Cut(offset));
        }
        let start = (offset - self.window_offset) as usize;
        let bytes = self.window.get(start..start + usize::from(size)).unwrap_or_default();
        let record = records::parse(kind, flags, bytes, offset, self.sample_type(kind, bytes));
        let trace_len = match record.body {
            Body::Aux(chunk) => chunk.len,
            _ => 0,
        };
        match u64::from(size).checked_add(trace_len).filter(|&whole| whole <= available) {
            Some(whole) => self.offset = offset + whole,
            None => return Ok(Next::Cut(offset)),
        }
        Ok(Next::Record(record))
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
