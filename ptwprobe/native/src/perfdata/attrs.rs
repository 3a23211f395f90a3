//! The events of a file: their attributes, ids and names.

use std::collections::HashMap;

use super::bytes::Cursor;
use super::layout::{attr_flag, sample};

/// perf itself records some thousand events at most.
pub(super) const MAX_ATTRS: usize = 1 << 14;
pub(super) const MAX_ATTR_LEN: usize = 4096;
/// `PERF_ATTR_SIZE_VER0`: what every one has.
pub(super) const MIN_ATTR_LEN: usize = 64;
/// One id per event and CPU.
const MAX_IDS: usize = 1 << 17;
/// Longest name kept of an event, in bytes.
const MAX_NAME: usize = 256;

/// `perf_event_attr`, as far as records are read by it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Attr {
    /// `PERF_TYPE_*`, or the number of a PMU.
    pub kind: u32,
    pub config: u64,
    pub sample_type: u64,
    pub read_format: u64,
    /// Bits of `layout::attr_flag`.
    pub flags: u64,
    pub branch_sample_type: u64,
    pub regs_user: u64,
    pub regs_intr: u64,
    /// As perf shows it; only whole files have it.
    pub name: Option<Box<str>>,
}

impl Attr {
    /// What a field that the file's version has not is, is 0.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() < MIN_ATTR_LEN - 16 {
            return None;
        }
        let word = |at: usize| bytes.get(at..).and_then(|rest| Cursor::new(rest).u64()).unwrap_or(0);
        Some(Self {
            kind: word(0) as u32,
            config: word(8),
            sample_type: word(24),
            read_format: word(32),
            flags: word(40),
            branch_sample_type: word(72),
            regs_user: word(80),
            regs_intr: word(96),
            name: None,
        })
    }

    #[must_use]
    pub fn has_flag(&self, flag: u64) -> bool {
        self.flags & flag != 0
    }

    #[must_use]
    pub fn samples(&self, bit: u64) -> bool {
        self.sample_type & bit != 0
    }
}

/// All events of a file.
#[derive(Debug, Default)]
pub struct Attrs {
    list: Vec<Attr>,
    by_id: HashMap<u64, u32>,
}

impl Attrs {
    #[must_use]
    pub fn list(&self) -> &[Attr] {
        &self.list
    }

    /// The event with this id.
    #[must_use]
    pub fn of_id(&self, id: u64) -> Option<&Attr> {
        self.by_id.get(&id).and_then(|&index| self.list.get(index as usize))
    }

    /// Ids may come as bytes that end within one.
    pub(super) fn push(&mut self, attr: Attr, ids: &[u8]) {
        if self.list.len() >= MAX_ATTRS {
            return;
        }
        let index = self.list.len() as u32;
        self.list.push(attr);
        let room = MAX_IDS.saturating_sub(self.by_id.len());
        let ids = ids.chunks_exact(8).take(room).filter_map(|id| Cursor::new(id).u64());
        self.by_id.extend(ids.map(|id| (id, index)));
    }

    /// Bytes of ids that still have room.
    pub(super) fn ids_room(&self) -> usize {
        8 * MAX_IDS.saturating_sub(self.by_id.len())
    }

    /// What a HEADER_ATTR record says: an attribute of the length that it tells itself, then its ids.
    pub(super) fn push_record(&mut self, payload: &[u8]) -> Option<()> {
        let told = payload.get(4..).and_then(|rest| Cursor::new(rest).u32())? as usize;
        let (attr, ids) = payload.split_at_checked(told.max(MIN_ATTR_LEN)).filter(|_| told <= MAX_ATTR_LEN)?;
        self.push(Attr::parse(attr)?, ids);
        Some(())
    }

    /// Takes the names out of an EVENT_DESC feature; what of it is damaged names nothing.
    pub(super) fn take_names(&mut self, event_desc: &[u8]) -> Option<()> {
        let mut fields = Cursor::new(event_desc);
        let (count, attr_len) = (fields.u32()? as usize, fields.u32()? as usize);
        for index in 0..count.min(MAX_ATTRS) {
            let _attr = fields.take(attr_len)?;
            let ids = fields.u32()? as usize;
            let name_len = fields.u32()? as usize;
            let name = Cursor::new(fields.take(name_len)?).text();
            let ids = fields.take(ids.checked_mul(8)?)?;
            let first_id = Cursor::new(ids).u64().and_then(|id| self.by_id.get(&id)).map(|&index| index as usize);
            if let Some(attr) = self.list.get_mut(first_id.unwrap_or(index)) {
                let name = name.get(..MAX_NAME).unwrap_or(name);
                attr.name = Some(String::from_utf8_lossy(name).into());
            }
        }
        Some(())
    }

    /// By which attribute a record of the kernel is read that is no sample: its id stands at its very end, where
    /// there are several. `None` where records have no sample id.
    pub(super) fn of_record(&self, bytes: &[u8]) -> Option<&Attr> {
        let first = self.list.iter().find(|attr| attr.has_flag(attr_flag::SAMPLE_ID_ALL))?;
        if self.list.len() < 2 || !first.samples(sample::IDENTIFIER) {
            return Some(first);
        }
        let id = bytes.len().checked_sub(8).and_then(|at| Cursor::new(bytes.get(at..)?).u64());
        Some(id.and_then(|id| self.of_id(id)).unwrap_or(first))
    }

    /// The same of a sample: its id stands at its start.
    pub(super) fn of_sample(&self, payload: &[u8]) -> Option<&Attr> {
        let first = self.list.first()?;
        if self.list.len() < 2 || !first.samples(sample::IDENTIFIER) {
            return Some(first);
        }
        Some(Cursor::new(payload).u64().and_then(|id| self.of_id(id)).unwrap_or(first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn attr_bytes(kind: u32, sample_type: u64, flags: u64) -> Vec<u8> {
        let mut bytes = [kind.to_le_bytes(), 64u32.to_le_bytes()].concat();
        for word in [0x2401u64, 1, sample_type, 4, flags, 0, 0] {
            bytes.extend_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    #[test]
    fn an_attribute_of_a_pipe_brings_its_ids_and_an_event_desc_its_name() {
        let mut attrs = Attrs::default();
        for (kind, id) in [(1u32, 5u64), (8, 6)] {
            let record = [attr_bytes(kind, 1 << 16, 1 << 18), id.to_le_bytes().to_vec()].concat();
            assert!(attrs.push_record(&record).is_some());
        }
        assert_eq!(attrs.of_id(6).map(|attr| (attr.kind, attr.config, attr.read_format)), Some((8, 0x2401, 4)));
        let mut desc = [1u32.to_le_bytes(), 64u32.to_le_bytes()].concat();
        desc.extend(attr_bytes(8, 0, 0));
        desc.extend([1u32.to_le_bytes(), 16u32.to_le_bytes()].concat());
        desc.extend(*b"intel_pt//u\0\0\0\0\0");
        desc.extend(6u64.to_le_bytes());
        assert!(attrs.take_names(&desc).is_some());
        assert_eq!(
            attrs.list().iter().map(|attr| attr.name.as_deref()).collect::<Vec<_>>(),
            [None, Some("intel_pt//u")]
        );
        assert_eq!(attrs.of_record(&6u64.to_le_bytes()).map(|attr| attr.kind), Some(8));
        assert_eq!(attrs.of_sample(&9u64.to_le_bytes()).map(|attr| attr.kind), Some(1));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), count in 0u32..4) {
            let mut attrs = Attrs::default();
            let _ = attrs.push_record(&bytes);
            let _ = attrs.take_names(&bytes);
            let _ = attrs.take_names(&[&count.to_le_bytes(), &8u32.to_le_bytes(), &bytes[..]].concat());
            let _ = (attrs.of_record(&bytes).is_some(), attrs.of_sample(&bytes).is_some());
        }
    }
}
