//! Records that were compressed (`perf record -z`): one zstd stream through all COMPRESSED records of a file, whose
//! records may begin in one and end in another.
//!
//! The stream is hostile input. It is unpacked a piece at a time, and only when the records before have been taken.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use zstd_safe::{DCtx, InBuffer, OutBuffer};

use super::bytes::Cursor;
use super::header::read_into;
use super::layout::{record, RECORD_HEADER_LEN};

/// Bytes unpacked at once: one block of zstd, and more than a record has.
const PIECE_LEN: usize = 1 << 17;
/// No recorder packs tighter than this, beyond a first stretch; a bomb does.
const MAX_RATIO: u64 = 1024;
const FREE_LEN: u64 = 64 << 20;
/// Trace in compressed records goes to a file of its own, at offsets that no file has.
const SPILL_BASE: u64 = 1 << 62;
const MAX_SPILL: u64 = 1 << 34;

/// What comes next out of the compressed records so far.
pub(super) enum Unpacked {
    /// The header of a whole record; its bytes are [`Unpacker::record`].
    Record { kind: u32, misc: u16 },
    /// Another COMPRESSED record is needed.
    Empty,
    /// This is no stream of records: told once, nothing follows.
    Damaged,
}

/// See the module.
#[derive(Default)]
pub(super) struct Unpacker {
    context: Option<DCtx<'static>>,
    input: Vec<u8>,
    input_pos: usize,
    output: Vec<u8>,
    output_pos: usize,
    /// Bytes of the record that was returned last.
    record_len: usize,
    total_in: u64,
    total_out: u64,
    /// In the file, of the COMPRESSED record that is being unpacked.
    file_offset: u64,
    damaged: bool,
    spill: Option<File>,
    spilled: u64,
}

impl Unpacker {
    /// `payload` of a COMPRESSED or COMPRESSED2 record at `file_offset`. All before it has to be taken.
    pub fn feed(&mut self, kind: u32, payload: &[u8], file_offset: u64) {
        let packed = match kind {
            record::COMPRESSED2 => {
                let mut fields = Cursor::new(payload);
                let told = fields.u64().map_or(0, |len| usize::try_from(len).unwrap_or(usize::MAX));
                let rest = fields.rest();
                rest.get(..told).unwrap_or(rest)
            }
            _ => payload,
        };
        self.file_offset = file_offset;
        self.input_pos = 0;
        self.input.clear();
        self.input.extend_from_slice(packed);
        self.total_in += packed.len() as u64;
    }

    #[must_use]
    pub fn file_offset(&self) -> u64 {
        self.file_offset
    }

    /// The bytes of the last record.
    #[must_use]
    pub fn record(&self) -> &[u8] {
        self.output.get(self.output_pos..self.output_pos + self.record_len).unwrap_or_default()
    }

    /// Bytes of a record whose rest has not come.
    #[must_use]
    pub fn has_rest(&self) -> bool {
        !self.damaged && self.output_pos + self.record_len < self.output.len()
    }

    /// Goes to the next record.
    pub fn next_record(&mut self) -> Unpacked {
        self.output_pos += std::mem::take(&mut self.record_len);
        while !self.damaged {
            let rest = self.output.get(self.output_pos..).unwrap_or_default();
            let mut fields = Cursor::new(rest);
            if let Some(((kind, misc), size)) = fields.u32().zip(fields.u16()).zip(fields.u16()) {
                let nested = matches!(kind, record::AUXTRACE | record::COMPRESSED | record::COMPRESSED2);
                if usize::from(size) < RECORD_HEADER_LEN || kind > record::MAX_TYPE || nested {
                    return self.damage();
                }
                if rest.len() >= usize::from(size) {
                    self.record_len = usize::from(size);
                    return Unpacked::Record { kind, misc };
                }
            }
            match self.unpack_piece() {
                Some(0) => return Unpacked::Empty,
                Some(_) => {}
                None => return self.damage(),
            }
        }
        Unpacked::Empty
    }

    fn damage(&mut self) -> Unpacked {
        self.give_up();
        Unpacked::Damaged
    }

    /// Nothing more is unpacked: what follows in the stream cannot be understood without what is missing.
    pub fn give_up(&mut self) {
        self.damaged = true;
        self.output = Vec::new();
        self.output_pos = 0;
        self.context = None;
    }

    /// Appends a piece to the output: how many bytes.
    fn unpack_piece(&mut self) -> Option<usize> {
        self.output.drain(..self.output_pos);
        self.output_pos = 0;
        if self.context.is_none() {
            self.context = Some(DCtx::try_create()?);
        }
        let context = self.context.as_mut()?;
        let held = self.output.len();
        let mut done = 0;
        self.output.resize(held + PIECE_LEN, 0);
        while done == 0 {
            let mut input = InBuffer::around(self.input.get(self.input_pos..)?);
            let mut output = OutBuffer::around(self.output.get_mut(held..)?);
            let result = context.decompress_stream(&mut output, &mut input);
            let (read, written) = (input.pos(), output.pos());
            self.input_pos += read;
            done = written;
            result.ok()?;
            if read == 0 && written == 0 {
                break;
            }
        }
        self.output.truncate(held + done);
        self.total_out += done as u64;
        let free = FREE_LEN.saturating_add(self.total_in.saturating_mul(MAX_RATIO));
        (self.total_out <= free).then_some(done)
    }

    /// Keeps `len` bytes of trace at the offset `from` of the last record; where [`read`](Self::read) has them.
    pub fn keep(&mut self, from: usize, len: usize) -> io::Result<u64> {
        if self.spilled + len as u64 > MAX_SPILL {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let start = self.output_pos + from;
        let bytes = self.output.get(start..start + len).unwrap_or_default();
        let file = match &mut self.spill {
            Some(file) => file,
            none => none.insert(unnamed_file()?),
        };
        file.write_all_at(bytes, self.spilled)?;
        let at = SPILL_BASE + self.spilled;
        self.spilled += bytes.len() as u64;
        Ok(at)
    }

    /// As [`read_into`], of what was kept; `None` for an offset in the file itself.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Option<io::Result<usize>> {
        let at = offset.checked_sub(SPILL_BASE)?;
        Some(self.spill.as_ref().map_or(Ok(0), |file| read_into(file, at, buffer)))
    }
}

fn unnamed_file() -> io::Result<File> {
    let flags = libc::O_TMPFILE | libc::O_CLOEXEC;
    OpenOptions::new().read(true).write(true).mode(0o600).custom_flags(flags).open(std::env::temp_dir())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use zstd_safe::{CCtx, CParameter};

    /// As perf packs: one stream, flushed at the end of each record.
    fn pack(parts: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut context = CCtx::create();
        context.set_parameter(CParameter::CompressionLevel(1)).expect("a level");
        let pack_one = |part: &&[u8]| {
            let mut bytes = vec![0; part.len() + 1024];
            let mut output = OutBuffer::around(&mut bytes[..]);
            context.compress_stream(&mut output, &mut InBuffer::around(part)).expect("room");
            assert_eq!(context.flush_stream(&mut output), Ok(0));
            let len = output.pos();
            bytes.truncate(len);
            bytes
        };
        parts.iter().map(pack_one).collect()
    }

    fn record(kind: u32, payload: &[u8]) -> Vec<u8> {
        let size = (8 + payload.len()) as u16;
        [&kind.to_le_bytes()[..], &[0, 0], &size.to_le_bytes(), payload].concat()
    }

    fn kinds(unpacker: &mut Unpacker) -> Vec<(u32, usize)> {
        let mut found = Vec::new();
        loop {
            match unpacker.next_record() {
                Unpacked::Record { kind, .. } => found.push((kind, unpacker.record().len())),
                Unpacked::Empty => return found,
                Unpacked::Damaged => found.push((u32::MAX, 0)),
            }
        }
    }

    #[test]
    fn a_record_may_end_in_a_later_one() {
        let records = [record(3, &[1; 24]), record(10, &[2; 72]), record(9, &vec![3; 60_000])].concat();
        let packed = pack(&[&records[..50], &records[50..700], &records[700..]]);
        let mut unpacker = Unpacker::default();
        let mut found = Vec::new();
        for (index, part) in packed.iter().enumerate() {
            unpacker.feed(record::COMPRESSED, part, 100 * index as u64);
            found.push(kinds(&mut unpacker));
        }
        assert_eq!(found, [vec![(3, 32)], vec![(10, 80)], vec![(9, 60_008)]]);
        assert_eq!((unpacker.file_offset(), unpacker.has_rest()), (200, false));
    }

    #[test]
    fn padding_of_the_newer_kind_is_no_part_of_it() {
        let packed = pack(&[&record(3, &[1; 24])]).concat();
        let payload = [&(packed.len() as u64).to_le_bytes()[..], &packed, &[0xee; 5]].concat();
        let mut unpacker = Unpacker::default();
        unpacker.feed(record::COMPRESSED2, &payload, 0);
        assert_eq!(kinds(&mut unpacker), [(3, 32)]);
    }

    #[test]
    fn a_bomb_is_taken_a_piece_at_a_time_and_ends() {
        let many = record(68, &[]).repeat(1 << 24);
        let mut packed = pack(&[&many]).concat();
        packed.truncate(1 << 16);
        let mut unpacker = Unpacker::default();
        unpacker.feed(record::COMPRESSED, &packed, 0);
        let mut count = 0u64;
        while let Unpacked::Record { .. } = unpacker.next_record() {
            count += 1;
            assert!(unpacker.output.capacity() <= 4 * PIECE_LEN);
        }
        assert!(8 * count <= FREE_LEN + MAX_RATIO * packed.len() as u64);
        assert!(unpacker.damaged);
    }

    #[test]
    fn trace_is_kept_in_a_file() {
        let packed = pack(&[&record(9, b"abcdefgh")]).concat();
        let mut unpacker = Unpacker::default();
        unpacker.feed(record::COMPRESSED, &packed, 0);
        assert!(matches!(unpacker.next_record(), Unpacked::Record { .. }));
        let at = unpacker.keep(8, 4).expect("a place");
        assert!(matches!(unpacker.next_record(), Unpacked::Empty));
        let mut buffer = [0; 8];
        assert_eq!(unpacker.read(at + 1, &mut buffer).map(Result::ok), Some(Some(3)));
        assert_eq!(&buffer[..3], b"bcd");
        assert!(unpacker.read(1000, &mut buffer).is_none());
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..300), flips in prop::collection::vec(any::<(usize, u8)>(), 0..4)) {
            let mut unpacker = Unpacker::default();
            unpacker.feed(record::COMPRESSED, &bytes, 0);
            kinds(&mut unpacker);
            let mut packed = pack(&[&record(3, &bytes).repeat(9)]).concat();
            for (at, byte) in flips {
                let at = at % packed.len();
                packed[at] ^= byte;
            }
            let mut unpacker = Unpacker::default();
            let mut count = 0;
            for part in packed.chunks(100) {
                unpacker.feed(record::COMPRESSED, part, 0);
                count += kinds(&mut unpacker).len() as u64;
            }
            // A flipped byte may make many small records of one: only the output is bounded.
            prop_assert!(8 * count <= FREE_LEN + MAX_RATIO * packed.len() as u64);
        }
    }
}
