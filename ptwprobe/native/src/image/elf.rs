//! The build id of an ELF file, whose headers may say anything.

use std::io;

use crate::perfdata::Cursor;

/// A build id: 20 bytes mostly, never more in a perf.data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BuildId {
    bytes: [u8; MAX_BUILD_ID],
    len: u8,
}

pub const MAX_BUILD_ID: usize = 20;

impl BuildId {
    /// `None` for one that is empty, all zeros (a record's way to say that there is none) or too long.
    #[must_use]
    pub fn new(id: &[u8]) -> Option<Self> {
        let mut bytes = [0; MAX_BUILD_ID];
        bytes.get_mut(..id.len())?.copy_from_slice(id);
        id.iter().any(|&b| b != 0).then_some(Self { bytes, len: id.len() as u8 })
    }

    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.len)).unwrap_or_default()
    }

    #[must_use]
    pub fn hex(&self) -> String {
        self.as_bytes().iter().map(|b| format!("{b:02x}")).collect()
    }

    /// perf 6.1 pads ids that are shorter than 20 bytes with zeros, and does not always tell the length.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        let len = usize::from(self.len.min(other.len));
        let zeros = |id: &Self| id.bytes.get(len..).is_some_and(|rest| rest.iter().all(|&b| b == 0));
        self.bytes.get(..len) == other.bytes.get(..len) && zeros(self) && zeros(other)
    }
}

const HEADER_LEN: usize = 64;
const PT_NOTE: u32 = 4;
const SHT_NOTE: u32 = 7;
const NT_GNU_BUILD_ID: u32 = 3;
/// More than any file has.
const MAX_TABLE: usize = 1 << 16;
const MAX_NOTES: u64 = 1 << 16;

/// The build id of a 64-bit little-endian ELF file of which `read` copies bytes from an offset on, as `pread` does.
pub fn build_id(read: impl Fn(u64, &mut [u8]) -> io::Result<usize>) -> Option<BuildId> {
    let take = |offset: u64, len: usize| {
        let mut bytes = vec![0; len];
        let len = read(offset, &mut bytes).ok()?;
        bytes.truncate(len);
        Some(bytes)
    };
    let header = take(0, HEADER_LEN)?;
    // ELFCLASS64, ELFDATA2LSB.
    if !header.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let number = |at: usize| Cursor::new(header.get(at..)?).u64();
    let count = |at: usize| Cursor::new(header.get(at..)?).u16().map(usize::from);
    // (offset, size of an entry, entries; where in an entry type, offset and size of the notes are)
    let tables = [
        (number(32)?, count(54)?, count(56)?, [0, 8, 32], PT_NOTE),
        (number(40)?, count(58)?, count(60)?, [4, 24, 32], SHT_NOTE),
    ];
    for (offset, entry_len, entries, places, note) in tables {
        let Some(table_len) = entry_len.checked_mul(entries).filter(|&len| entry_len >= 40 && len <= MAX_TABLE) else {
            continue;
        };
        for entry in take(offset, table_len)?.chunks_exact(entry_len) {
            let at = |place: usize| Cursor::new(entry.get(place..).unwrap_or_default());
            let [kind, offset, len] = places;
            if at(kind).u32() == Some(note) {
                let notes = take(at(offset).u64()?, at(len).u64()?.min(MAX_NOTES) as usize)?;
                if let Some(id) = build_id_of_notes(&notes) {
                    return Some(id);
                }
            }
        }
    }
    None
}

fn build_id_of_notes(notes: &[u8]) -> Option<BuildId> {
    let mut notes = Cursor::new(notes);
    loop {
        let (name_len, len, kind) = (notes.u32()?, notes.u32()?, notes.u32()?);
        let name = notes.take((name_len as usize).checked_next_multiple_of(4)?)?;
        let body = notes.take((len as usize).checked_next_multiple_of(4)?)?;
        if kind == NT_GNU_BUILD_ID && name.starts_with(b"GNU\0") {
            return BuildId::new(body.get(..len as usize)?);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::FileExt;

    fn of_bytes(file: &[u8]) -> Option<BuildId> {
        build_id(|offset, buffer| {
            let rest = usize::try_from(offset).ok().and_then(|at| file.get(at..)).unwrap_or_default();
            let len = rest.len().min(buffer.len());
            buffer[..len].copy_from_slice(&rest[..len]);
            Ok(len)
        })
    }

    #[test]
    fn the_build_id_is_the_one_that_readelf_shows() {
        let path = std::env::current_exe().unwrap();
        let file = std::fs::File::open("/bin/true").unwrap();
        let shown = std::process::Command::new("readelf").args(["-n", "/bin/true"]).output();
        let Ok(shown) = shown.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()) else {
            eprintln!("no readelf here ({})", path.display());
            return;
        };
        let shown = shown.lines().find_map(|l| l.trim().strip_prefix("Build ID: ").map(str::to_owned));
        assert_eq!(build_id(|at, buffer| file.read_at(buffer, at)).map(|id| id.hex()), shown);
    }

    #[test]
    fn padded_ids_are_equal() {
        let id = |bytes: &[u8]| BuildId::new(bytes).unwrap();
        assert!(id(&[1, 2, 0, 0]).is(&id(&[1, 2])));
        assert!(!id(&[1, 2, 3]).is(&id(&[1, 2])));
        assert_eq!(BuildId::new(&[0; 20]), None);
        assert_eq!(BuildId::new(&[1; 21]), None);
        assert_eq!(BuildId::new(&[]), None);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(mut file in proptest::collection::vec(any::<u8>(), 0..400)) {
            for (to, from) in file.iter_mut().zip(b"\x7fELF\x02\x01") {
                *to = *from;
            }
            let _ = of_bytes(&file);
        }

        #[test]
        fn no_change_of_a_file_makes_it_panic(at in 0usize..1024, value: u64) {
            let mut file = std::fs::read("/bin/true").unwrap_or_default();
            if let Some(place) = file.get_mut(at..at + 8) {
                place.copy_from_slice(&value.to_le_bytes());
            }
            let _ = of_bytes(&file);
        }
    }
}
