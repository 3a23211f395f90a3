//! The header of a file, and what it points to: events and their names.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::attrs::{Attr, Attrs, MAX_ATTRS, MAX_ATTR_LEN, MIN_ATTR_LEN};
use super::buildids::{self, FileBuildId};
use super::bytes::Cursor;
use super::error::Error;
use super::features;
use super::layout::{HEADER_FEATURES, HEADER_LEN, MAGIC, PIPE_HEADER_LEN};
use crate::pt::Cpu;

/// A section of this that is longer is damaged.
const MAX_SECTION: u64 = 8 << 20;
/// Behind each attribute of a file: where its ids are, and their length.
const IDS_SECTION_LEN: usize = 16;

/// Where the records of a file begin, and the events that are known before them.
#[derive(Debug)]
pub(super) struct Header {
    pub data_offset: u64,
    /// Written to a pipe: everything comes as records, up to the end of the file.
    pub pipe: bool,
    pub attrs: Attrs,
    pub build_ids: Vec<FileBuildId>,
    pub cpu: Option<Cpu>,
}

impl Header {
    pub fn read(file: &File) -> Result<Self, Error> {
        let head = read_at_most(file, 0, HEADER_LEN as usize)?;
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
        let own_len = fields.u64().ok_or_else(short)?;
        if own_len == PIPE_HEADER_LEN {
            let (attrs, build_ids) = (Attrs::default(), Vec::new());
            return Ok(Self { data_offset: PIPE_HEADER_LEN, pipe: true, attrs, build_ids, cpu: None });
        }
        if own_len < HEADER_LEN {
            return Err(Error::format("a perf.data header of a size that cannot be", 8));
        }
        let attr_len = fields.u64().ok_or_else(short)?;
        let (attrs_at, attrs_len) = (fields.u64().ok_or_else(short)?, fields.u64().ok_or_else(short)?);
        let (data_offset, data_len) = (fields.u64().ok_or_else(short)?, fields.u64().ok_or_else(short)?);
        if data_offset < HEADER_LEN {
            return Err(Error::format("the data section begins inside the header", 40));
        }
        let mut attrs = read_attrs(file, attr_len, attrs_at, attrs_len)?;
        let features = head.get(HEADER_FEATURES as usize..).and_then(|rest| Cursor::new(rest).u64()).unwrap_or(0);
        let section = |bit| read_feature(file, features, data_offset.saturating_add(data_len), bit);
        if let Some(desc) = section(features::EVENT_DESC)? {
            let _ = attrs.take_names(&desc);
        }
        let build_ids = section(features::BUILD_ID)?.map(|bytes| buildids::parse(&bytes)).unwrap_or_default();
        let cpu = section(features::CPUID)?.and_then(|bytes| Cpu::parse(features::string(&bytes)?));
        Ok(Self { data_offset, pipe: false, attrs, build_ids, cpu })
    }
}

/// As many bytes as there are, up to `len`.
pub(super) fn read_at_most(file: &File, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let done = read_into(file, offset, &mut bytes)?;
    bytes.truncate(done);
    Ok(bytes)
}

/// How many bytes of `buffer` the file could fill.
pub(super) fn read_into(file: &File, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, offset.saturating_add(done as u64)) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            // No file has an offset beyond `i64::MAX`.
            Err(e) if e.kind() == io::ErrorKind::InvalidInput => break,
            Err(e) => return Err(e),
        }
    }
    Ok(done)
}

fn read_attrs(file: &File, entry_len: u64, at: u64, len: u64) -> Result<Attrs, Error> {
    let entry = usize::try_from(entry_len).ok().filter(|len| (MIN_ATTR_LEN..=MAX_ATTR_LEN).contains(len));
    let count = len.checked_div(entry_len).filter(|&count| count <= MAX_ATTRS as u64);
    let Some((entry_len, count)) = entry.zip(count) else {
        return Err(Error::format("a size of event attributes that cannot be", 16));
    };
    let mut attrs = Attrs::default();
    for index in 0..count {
        let offset = at.saturating_add(index * entry_len as u64);
        let entry = read_at_most(file, offset, entry_len)?;
        let cut = || Error::format("the file ends inside its event attributes", offset);
        let (attr, section) = entry.split_at_checked(entry_len - IDS_SECTION_LEN).ok_or_else(cut)?;
        let mut section = Cursor::new(section);
        let (ids_at, ids_len) = section.u64().zip(section.u64()).ok_or_else(cut)?;
        let room = attrs.ids_room();
        let ids = read_at_most(file, ids_at, usize::try_from(ids_len).map_or(room, |len| len.min(room)))?;
        attrs.push(Attr::parse(attr).ok_or_else(cut)?, &ids);
    }
    Ok(attrs)
}

/// The feature sections stand behind the data in the order of their bits, after a table of where they are.
fn read_feature(file: &File, features: u64, table_at: u64, bit: u32) -> Result<Option<Vec<u8>>, Error> {
    let bit = 1u64 << bit;
    if features & bit == 0 {
        return Ok(None);
    }
    let index = u64::from((features & (bit - 1)).count_ones());
    let entry = read_at_most(file, table_at.saturating_add(16 * index), 16)?;
    let mut fields = Cursor::new(&entry);
    let section = fields.u64().zip(fields.u64()).filter(|&(_, len)| len <= MAX_SECTION);
    let Some((at, len)) = section else { return Ok(None) };
    Ok(Some(read_at_most(file, at, len as usize)?))
}
