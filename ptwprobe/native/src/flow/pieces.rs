//! Cuts a stream into pieces, each of which begins with a PSB.
//!
//! A PSB resets the decoder, so a piece can be walked without what came before it. It is cut only where that loses
//! nothing: where the PSB tells an address in known code. In a stub that cannot be read, or while tracing is off, the
//! walk needs to know where the program was.

use std::collections::VecDeque;

use crate::perfdata::{AuxChunk, ChunkKind};
use crate::pt::{find_psb, nearest_tsc, Decoder, Kind, LastIp, PSB};

/// A piece has as many bytes at least, if the stream goes on.
const PIECE_LEN: usize = 1 << 17;
/// Where no PSB is a good place to cut, the next is taken from here on.
const LONG_PIECE_LEN: usize = 1 << 22;
/// Bytes without any PSB: what follows up to the next is not read. The longest period that hardware knows is 64 MiB.
const MAX_PIECE_LEN: usize = 1 << 26;
const READ_LEN: usize = 1 << 17;
/// Bytes of a PSB+ that are looked at for its time and its address.
const PSB_PLUS_LEN: usize = 256;

/// Where the bytes of a trace come from.
pub trait Source {
    /// Reads at `file_offset`: how many bytes there were, at most `buffer.len()`.
    fn read(&self, file_offset: u64, buffer: &mut [u8]) -> usize;
}

/// A trace that lies in memory.
impl Source for &[u8] {
    fn read(&self, file_offset: u64, buffer: &mut [u8]) -> usize {
        let rest = usize::try_from(file_offset).ok().and_then(|at| self.get(at..)).unwrap_or_default();
        for (to, &from) in buffer.iter_mut().zip(rest) {
            *to = from;
        }
        rest.len().min(buffer.len())
    }
}

/// Why a piece does not begin where the last one ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skipped {
    /// Bytes before a PSB.
    NoPsb { bytes: u64 },
    /// A chunk is missing.
    MissingChunk,
}

/// A piece that owns its bytes.
#[derive(Clone, Debug, Default)]
pub struct OwnedPiece {
    pub bytes: Vec<u8>,
    /// (index of a byte, its offset in the file), for the first byte of each part that lies together.
    parts: Vec<(usize, u64)>,
    /// A time near its first one.
    pub tsc: u64,
    /// The address that the next piece begins with.
    pub next_ip: Option<u64>,
    /// What was left out before it.
    pub skipped: Vec<(u64, Skipped)>,
}

impl OwnedPiece {
    /// The offset in the file of the byte with this index.
    #[must_use]
    pub fn file_offset(&self, index: u64) -> u64 {
        let index = index as usize;
        let part = self.parts.partition_point(|&(start, _)| start <= index).saturating_sub(1);
        self.parts.get(part).map_or(0, |&(start, offset)| offset.wrapping_add(index.saturating_sub(start) as u64))
    }
}

/// The time and the address of a PSB+.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PsbPlus {
    tsc: Option<u64>,
    ip: Option<u64>,
}

/// See the module. `good_cut(ip, tsc)`: whether the code at `ip` is known.
pub struct Pieces<S> {
    source: S,
    chunks: VecDeque<AuxChunk>,
    /// What of the first chunk is not read.
    next: u64,
    left: u64,
    expected: Option<u64>,
    bytes: Vec<u8>,
    parts: Vec<(usize, u64)>,
    /// Where `bytes` end for good: the stream has a gap there, or ends.
    broken: bool,
    skipped: Vec<(u64, Skipped)>,
    tsc: u64,
}

impl<'a> Pieces<&'a [u8]> {
    /// Of a whole stream in memory.
    #[must_use]
    pub fn of_bytes(bytes: &'a [u8]) -> Self {
        let len = bytes.len() as u64;
        let chunk = AuxChunk {
            file_offset: 0,
            len,
            stream_offset: 0,
            tsc_reference: 0,
            idx: 0,
            tid: None,
            cpu: None,
            kind: ChunkKind::Stream,
        };
        Self::new(bytes, [chunk])
    }
}

impl<S: Source> Pieces<S> {
    pub fn new(source: S, chunks: impl IntoIterator<Item = AuxChunk>) -> Self {
        Self {
            source,
            chunks: chunks.into_iter().collect(),
            next: 0,
            left: 0,
            expected: None,
            bytes: Vec::new(),
            parts: Vec::new(),
            broken: false,
            skipped: Vec::new(),
            tsc: 0,
        }
    }

    /// The next piece; `None` at the end of the stream, where `skipped` may still tell of bytes.
    pub fn next_piece(&mut self, mut good_cut: impl FnMut(u64, u64) -> bool) -> Option<OwnedPiece> {
        self.sync()?;
        let tsc = self.tsc;
        let mut from = PSB.len();
        let mut at = PIECE_LEN;
        let (cut, next) = loop {
            let Some(psb) = self.find(at.max(from)) else { break (self.bytes.len(), None) };
            from = psb + PSB.len();
            at = from;
            self.fill(psb + PSB_PLUS_LEN);
            let plus = psb_plus(self.bytes.get(psb..).unwrap_or_default());
            let time = plus.tsc.map_or(self.tsc, |low| nearest_tsc(self.tsc, low));
            if plus.ip.is_some_and(|ip| good_cut(ip, time)) || psb >= LONG_PIECE_LEN {
                self.tsc = time;
                break (psb, plus.ip);
            }
        };
        let rest = self.bytes.split_off(cut);
        let bytes = std::mem::replace(&mut self.bytes, rest);
        let parts = self.drop_parts(cut);
        let skipped = std::mem::take(&mut self.skipped);
        Some(OwnedPiece { bytes, parts, tsc, next_ip: next, skipped })
    }

    /// What was left out since the last piece, at the end.
    #[must_use]
    pub fn skipped(&self) -> &[(u64, Skipped)] {
        &self.skipped
    }

    /// Makes `bytes` begin with a PSB.
    fn sync(&mut self) -> Option<()> {
        loop {
            if let Some(psb) = self.find(0) {
                self.skip(psb);
                return Some(());
            }
            let (len, broken) = (self.bytes.len(), self.broken);
            // What is left may be the start of a PSB.
            let keep = if broken { 0 } else { PSB.len() - 1 };
            self.skip(len.saturating_sub(keep));
            if broken {
                self.broken = false;
                if self.chunks.is_empty() {
                    return None;
                }
            }
        }
    }

    fn skip(&mut self, len: usize) {
        if len == 0 {
            return;
        }
        let offset = self.parts.first().map_or(0, |part| part.1);
        self.bytes.drain(..len);
        self.drop_parts(len);
        match self.skipped.last_mut() {
            Some((_, Skipped::NoPsb { bytes })) => *bytes += len as u64,
            _ => self.skipped.push((offset, Skipped::NoPsb { bytes: len as u64 })),
        }
    }

    /// Takes the parts of the first `len` bytes away.
    fn drop_parts(&mut self, len: usize) -> Vec<(usize, u64)> {
        let within = self.parts.partition_point(|&(start, _)| start < len);
        let mut taken = std::mem::take(&mut self.parts);
        let mut rest: Vec<_> =
            taken.split_off(within).into_iter().map(|(start, offset)| (start - len, offset)).collect();
        if let Some(&(start, offset)) = taken.last() {
            if rest.first().is_none_or(|&(start, _)| start > 0) && !self.bytes.is_empty() {
                rest.insert(0, (0, offset.wrapping_add((len - start) as u64)));
            }
        }
        self.parts = rest;
        taken
    }

    /// The first PSB at or after `from`; reads on as far as it has to.
    fn find(&mut self, mut from: usize) -> Option<usize> {
        loop {
            if let Some(psb) = find_psb(&self.bytes, from) {
                return Some(psb);
            }
            from = from.max(self.bytes.len().saturating_sub(PSB.len() - 1));
            if self.bytes.len() >= MAX_PIECE_LEN || !self.read() {
                return None;
            }
        }
    }

    /// Reads on up to `len` bytes.
    fn fill(&mut self, len: usize) {
        while self.bytes.len() < len && self.read() {}
    }

    /// Reads on; false at the end, and at a gap.
    fn read(&mut self) -> bool {
        if self.broken {
            return false;
        }
        while self.left == 0 {
            let Some(&chunk) = self.chunks.front() else {
                self.broken = true;
                return false;
            };
            let joins = |expected| chunk.kind == ChunkKind::Stream && expected == chunk.stream_offset;
            if self.expected.is_some_and(|expected| !joins(expected)) {
                if !self.bytes.is_empty() {
                    self.broken = true;
                    return false;
                }
                self.expected = None;
                self.skipped.push((chunk.file_offset, Skipped::MissingChunk));
            }
            self.chunks.pop_front();
            self.expected = Some(chunk.stream_offset.wrapping_add(chunk.len));
            (self.next, self.left) = (chunk.file_offset, chunk.len);
            self.parts.push((self.bytes.len(), chunk.file_offset));
            if chunk.tsc_reference != 0 && self.bytes.is_empty() {
                self.tsc = chunk.tsc_reference;
            }
        }
        let start = self.bytes.len();
        let want = self.left.min(READ_LEN as u64) as usize;
        self.bytes.resize(start + want, 0);
        let read = self.bytes.get_mut(start..).map_or(0, |rest| self.source.read(self.next, rest).min(want));
        self.bytes.truncate(start + read);
        self.next += read as u64;
        // What the file does not have is not waited for.
        self.left = if read == 0 { 0 } else { self.left - read as u64 };
        true
    }
}

/// What the PSB+ at the start of `bytes` tells.
fn psb_plus(bytes: &[u8]) -> PsbPlus {
    let mut plus = PsbPlus::default();
    let mut last_ip = LastIp::default();
    let mut decoder = Decoder::new(bytes, 0);
    while let Some(Ok(packet)) = decoder.next_packet() {
        match packet.kind {
            Kind::Tsc(tsc) => plus.tsc = Some(tsc),
            Kind::Fup(field) => plus.ip = last_ip.update(field),
            Kind::PsbEnd | Kind::Ovf => break,
            _ => {}
        }
    }
    plus
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pt::{encode, encode_fup, encode_psb};
    use proptest::prelude::*;

    fn chunk(file_offset: u64, stream_offset: u64, len: u64) -> AuxChunk {
        AuxChunk {
            kind: crate::perfdata::ChunkKind::Stream,
            idx: 0,
            tid: None,
            cpu: None,
            stream_offset,
            file_offset,
            len,
            tsc_reference: 7,
        }
    }

    /// `lens`: bytes from one PSB to the next; the addresses are 0x1000 times the number of the PSB.
    fn stream(lens: &[usize]) -> Vec<u8> {
        let mut out = Vec::new();
        for (number, &len) in lens.iter().enumerate() {
            let (mut last_ip, end) = (LastIp::default(), out.len() + len);
            encode_psb(&mut out, &mut last_ip);
            encode(&mut out, Kind::Tsc(1000 + number as u64));
            encode_fup(&mut out, &mut last_ip, 0x1000 * number as u64);
            encode(&mut out, Kind::PsbEnd);
            while out.len() < end {
                encode(&mut out, Kind::Pad);
            }
        }
        out
    }

    fn all(pieces: &mut Pieces<&[u8]>, good: impl Fn(u64) -> bool) -> Vec<OwnedPiece> {
        std::iter::from_fn(|| pieces.next_piece(|ip, _| good(ip))).collect()
    }

    #[test]
    fn pieces_are_cut_where_the_code_is_known() {
        let bytes = stream(&[100_000, 100_000, 100_000, 100_000]);
        let mut pieces = Pieces::new(bytes.as_slice(), [chunk(0, 0, bytes.len() as u64)]);
        let found = all(&mut pieces, |ip| ip != 0x2000);
        let lens: Vec<_> = found.iter().map(|piece| piece.bytes.len()).collect();
        assert_eq!(lens, [300_000, 100_000]);
        assert_eq!(found[0].next_ip, Some(0x3000));
        assert_eq!((found[0].tsc, found[1].tsc), (7, 1003));
        assert_eq!(found[1].file_offset(10), 300_010);
    }

    #[test]
    fn bytes_before_the_first_psb_and_gaps_are_told() {
        let bytes = [vec![0; 500], stream(&[1000]), vec![1; 50], stream(&[1000])].concat();
        let chunks = [chunk(0, 0, 1500), chunk(1500, 9000, 1050)];
        let mut pieces = Pieces::new(bytes.as_slice(), chunks);
        let found = all(&mut pieces, |_| true);
        assert_eq!(found.len(), 2);
        assert_eq!(found[0].skipped, [(0, Skipped::NoPsb { bytes: 500 })]);
        assert_eq!(found[1].skipped, [(1500, Skipped::MissingChunk), (1500, Skipped::NoPsb { bytes: 50 })]);
        assert_eq!(found[1].file_offset(0), 1550);
        assert!(pieces.skipped().is_empty());
        let mut none = Pieces::new([3u8; 40].as_slice(), [chunk(0, 0, 40)]);
        assert!(all(&mut none, |_| true).is_empty());
        assert_eq!(none.skipped(), [(0, Skipped::NoPsb { bytes: 40 })]);
    }

    proptest! {
        #[test]
        fn nothing_is_lost_and_no_byte_comes_twice(
            lens in proptest::collection::vec(60usize..200_000, 1..8),
            cuts in proptest::collection::vec(0usize..1_000_000, 0..5),
            bad in 0u64..8,
        ) {
            let bytes = stream(&lens);
            let mut cuts: Vec<_> = cuts.into_iter().map(|cut| cut % bytes.len()).chain([0, bytes.len()]).collect();
            cuts.sort_unstable();
            let chunks = cuts.windows(2).map(|w| chunk(w[0] as u64, w[0] as u64, (w[1] - w[0]) as u64));
            let mut pieces = Pieces::new(bytes.as_slice(), chunks);
            let found = all(&mut pieces, |ip| ip != 0x1000 * bad);
            let mut at = 0;
            for piece in &found {
                prop_assert!(piece.skipped.is_empty());
                prop_assert_eq!(piece.file_offset(0), at);
                prop_assert_eq!(piece.file_offset(piece.bytes.len() as u64 - 1), at + piece.bytes.len() as u64 - 1);
                prop_assert!(piece.bytes.starts_with(&PSB));
                at += piece.bytes.len() as u64;
            }
            prop_assert_eq!(at, bytes.len() as u64);
        }
    }
}
