//! Build ids of files that a recording has mapped, as perf gathers them when it ends: the section
//! HEADER_BUILD_ID, or in a file that was written to a pipe records of that name.

use super::bytes::Cursor;
use super::layout::{misc, RECORD_HEADER_LEN};
use super::records::{BuildId, MAX_BUILD_ID};

/// More than any recording has.
pub(super) const MAX_FILES: usize = 1 << 16;
/// Bytes of an id with its own length and padding.
const ID_LEN: usize = 24;

/// A path as the recording saw it, and the build id of the file there.
pub(super) type FileBuildId = (Box<[u8]>, BuildId);

/// All that are told, up to the first entry that makes no sense.
pub(super) fn parse(mut section: &[u8]) -> Vec<FileBuildId> {
    let mut out = Vec::new();
    while let Some((entry, rest)) = split(section).filter(|_| out.len() < MAX_FILES) {
        section = rest;
        out.extend(entry);
    }
    out
}

/// One entry, where it tells an id, and what is behind it.
fn split(section: &[u8]) -> Option<(Option<FileBuildId>, &[u8])> {
    let mut header = Cursor::new(section);
    let (_kind, flags, len) = (header.u32()?, header.u16()?, usize::from(header.u16()?));
    let (record, rest) = section.split_at_checked(len).filter(|_| len >= RECORD_HEADER_LEN)?;
    let mut fields = Cursor::new(record.get(RECORD_HEADER_LEN..)?);
    let (_pid, id) = (fields.u32()?, fields.take(ID_LEN)?);
    let told = flags & misc::BUILD_ID_SIZE != 0;
    let len = if told { usize::from(*id.get(MAX_BUILD_ID)?) } else { MAX_BUILD_ID };
    let id = BuildId::new(id.get(..len.min(MAX_BUILD_ID))?);
    let path = fields.text();
    Some(((!path.is_empty()).then(|| (path.into(), id)), rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(flags: u16, id: &[u8], path: &[u8]) -> Vec<u8> {
        let mut body = [0; ID_LEN];
        body[..id.len()].copy_from_slice(id);
        body[MAX_BUILD_ID] = id.len() as u8;
        let len = (8 + 4 + ID_LEN + path.len()) as u16;
        [&67u32.to_le_bytes()[..], &flags.to_le_bytes(), &len.to_le_bytes(), &[0xff; 4], &body, path].concat()
    }

    #[test]
    fn ids_have_the_length_that_is_told() {
        let section = [entry(0, &[1; 20], b"/bin/a\0\0"), entry(misc::BUILD_ID_SIZE, &[2; 8], b"/bin/b\0")].concat();
        let told = parse(&section);
        assert_eq!(told.len(), 2);
        assert_eq!((&*told[0].0, told[0].1.as_bytes()), (&b"/bin/a"[..], &[1; 20][..]));
        assert_eq!((&*told[1].0, told[1].1.as_bytes()), (&b"/bin/b"[..], &[2; 8][..]));
        for len in 0..section.len() {
            assert!(parse(&section[..len]).len() < 2);
        }
    }
}
