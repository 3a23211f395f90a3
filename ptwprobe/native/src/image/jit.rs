//! jitdump files: code that a runtime made, when and where.
//!
//! Format: `tools/perf/Documentation/jitdump-specification.txt` of Linux.

use std::collections::HashMap;

use super::files::Content;
use crate::perfdata::Cursor;

/// Code at [`start`, `end`) from `time` on; its bytes are at `offset` of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loaded {
    pub time: Time,
    pub start: u64,
    pub end: u64,
    pub offset: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Time {
    Tsc(u64),
    /// Of the clock that the recording used, if all is well.
    Ns(u64),
}

const MAGIC: u32 = u32::from_le_bytes(*b"DTiJ");
const ARCH_TIMESTAMP: u64 = 1;
const HEADER_LEN: usize = 40;
const RECORD_LEN: usize = 16;
const LOAD_LEN: usize = 56;
const CODE_LOAD: u32 = 0;
const CODE_MOVE: u32 = 1;
const CODE_CLOSE: u32 = 3;
/// More are not read.
const MAX_RECORDS: usize = 1 << 21;

/// Whether a mapping of a file with this name tells that its process writes a jitdump.
#[must_use]
pub fn is_marker(path: &[u8]) -> bool {
    let name = path.rsplit(|&b| b == b'/').next().unwrap_or_default();
    let pid = name.strip_prefix(b"jit-").and_then(|rest| rest.strip_suffix(b".dump"));
    pid.is_some_and(|pid| !pid.is_empty() && pid.iter().all(u8::is_ascii_digit))
}

/// All code that `dump` tells of, in its order, up to where it ends or makes no sense.
#[must_use]
pub fn loaded(dump: &Content) -> Vec<Loaded> {
    let mut out = Vec::new();
    walk(dump, &mut out);
    out
}

fn walk(dump: &Content, out: &mut Vec<Loaded>) -> Option<()> {
    let take = |offset: u64, buffer: &mut [u8]| (dump.read(offset, buffer).ok()? == buffer.len()).then_some(());
    let mut header = [0; HEADER_LEN];
    take(0, &mut header)?;
    let mut fields = Cursor::new(&header);
    let (magic, _version, header_len) = (fields.u32()?, fields.u32()?, fields.u32()?);
    let (_machine, _pad, _pid, _timestamp) = (fields.u32()?, fields.u32()?, fields.u32()?, fields.u64()?);
    let is_tsc = fields.u64()? & ARCH_TIMESTAMP != 0;
    if magic != MAGIC || (header_len as usize) < HEADER_LEN {
        return None;
    }
    let mut offset = u64::from(header_len);
    // Index of the code and where it is in the file.
    let mut by_index = HashMap::new();
    for _ in 0..MAX_RECORDS {
        let mut bytes = [0; LOAD_LEN];
        take(offset, bytes.get_mut(..RECORD_LEN)?)?;
        let mut fields = Cursor::new(&bytes);
        let (kind, len, time) = (fields.u32()?, u64::from(fields.u32()?), fields.u64()?);
        let end = offset.checked_add(len).filter(|_| len >= RECORD_LEN as u64)?;
        let time = if is_tsc { Time::Tsc(time) } else { Time::Ns(time) };
        if matches!(kind, CODE_LOAD | CODE_MOVE) {
            take(offset, &mut bytes)?;
            let mut fields = Cursor::new(bytes.get(RECORD_LEN..)?);
            let (_pid, _tid, _vma) = (fields.u32()?, fields.u32()?, fields.u64()?);
            let words = (fields.u64()?, fields.u64()?, fields.u64()?);
            let code = if kind == CODE_LOAD {
                let (start, size, index) = words;
                // The name is before the code, which ends the record.
                let at = end.checked_sub(size).filter(|&at| at >= offset + LOAD_LEN as u64)?;
                by_index.insert(index, (at, size));
                Some((start, size, at))
            } else {
                let (_old, start, size) = words;
                let mut index = [0; 8];
                take(offset.checked_add(LOAD_LEN as u64)?, &mut index)?;
                by_index.get(&u64::from_le_bytes(index)).map(|&(at, loaded)| (start, size.min(loaded), at))
            };
            let place = code.and_then(|(start, size, offset)| Some((start, start.checked_add(size)?, offset)));
            if let Some((start, end, offset)) = place {
                out.push(Loaded { time, start, end, offset });
            }
        }
        if kind == CODE_CLOSE {
            break;
        }
        offset = end;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header(flags: u64) -> Vec<u8> {
        let mut out = MAGIC.to_le_bytes().to_vec();
        for word in [1u32, 40, 62, 0, 7] {
            out.extend(word.to_le_bytes());
        }
        out.extend(1u64.to_le_bytes());
        out.extend(flags.to_le_bytes());
        out
    }

    fn record(kind: u32, time: u64, body: &[u8]) -> Vec<u8> {
        let mut out = kind.to_le_bytes().to_vec();
        out.extend((16 + body.len() as u32).to_le_bytes());
        out.extend(time.to_le_bytes());
        out.extend(body);
        out
    }

    fn words(words: &[u64], rest: &[u8]) -> Vec<u8> {
        let ids = [7u32.to_le_bytes(), 8u32.to_le_bytes()].concat();
        [ids, words.iter().flat_map(|w| w.to_le_bytes()).collect(), rest.to_vec()].concat()
    }

    fn dump(flags: u64) -> Vec<u8> {
        [
            header(flags),
            record(CODE_LOAD, 100, &words(&[0x1000, 0x1000, 3, 5], b"name\0abc")),
            record(2, 150, b"debug information"),
            record(CODE_MOVE, 200, &words(&[0x1000, 0x1000, 0x2000, 3, 5], b"")),
            record(CODE_MOVE, 250, &words(&[0x1000, 0x1000, 0x2000, 3, 6], b"")),
            record(CODE_CLOSE, 300, b""),
            record(CODE_LOAD, 400, &words(&[0x1000, 0x1000, 3, 5], b"name\0abc")),
        ]
        .concat()
    }

    #[test]
    fn code_is_told_where_it_was_put_and_moved() {
        let bytes = dump(0);
        let offset = 40 + 56 + 5;
        assert_eq!(&bytes[offset..offset + 3], b"abc");
        let offset = offset as u64;
        let told = [
            Loaded { time: Time::Ns(100), start: 0x1000, end: 0x1003, offset },
            Loaded { time: Time::Ns(200), start: 0x2000, end: 0x2003, offset },
        ];
        assert_eq!(loaded(&Content::Bytes(bytes)), told);
        assert_eq!(loaded(&Content::Bytes(dump(1)))[0].time, Time::Tsc(100));
    }

    #[test]
    fn a_dump_that_is_still_written_is_read_up_to_its_last_whole_record() {
        let bytes = dump(0);
        for len in 0..bytes.len() {
            assert!(loaded(&Content::Bytes(bytes[..len].to_vec())).len() <= 2);
        }
    }

    #[test]
    fn a_marker_has_the_name_of_a_dump() {
        for name in [b"/root/.debug/jit/x/jit-12.dump".as_slice(), b"jit-1.dump"] {
            assert!(is_marker(name));
        }
        for name in [b"/x/jit-.dump".as_slice(), b"/x/jit-1x.dump", b"/jit-1.dump/x", b""] {
            assert!(!is_marker(name));
        }
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_or_go_on_forever(at in 40usize..300, change: u64) {
            let mut bytes = dump(0);
            if let Some(place) = bytes.get_mut(at..at + 8) {
                place.copy_from_slice(&change.to_le_bytes());
            }
            let _ = loaded(&Content::Bytes(bytes));
        }
    }
}
