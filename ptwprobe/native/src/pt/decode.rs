//! Bytes to packets, all of them. Hostile bytes give an error with an offset; decoding goes on at the next PSB.

use super::{Bad, BadReason, Clock, Errata, IpField, Kind, Packet, Scan, PSB};

/// Decodes `bytes` from the start, or from the next PSB after [`Decoder::sync`].
///
/// As an iterator it yields every packet; after an error it goes on at the next PSB, or ends.
#[derive(Clone, Debug)]
pub struct Decoder<'a> {
    bytes: &'a [u8],
    pos: usize,
    base: u64,
    block: Block,
    lost: bool,
    cut_cyc: bool,
}

/// Inside BBP ... BEP some bytes that would else be a short TNT are block items.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Block {
    #[default]
    None,
    Items4,
    Items8,
}

/// Offset of the first PSB in `bytes` from `from` on.
#[must_use]
pub fn find_psb(bytes: &[u8], from: usize) -> Option<usize> {
    memchr::memmem::find(bytes.get(from..)?, &PSB).map(|at| from + at)
}

/// Where to look for a PSB from, behind bytes at `bad` that are no packet: at the next, or at a PSB that has begun
/// already. A packet that lost its end takes what follows for it.
#[must_use]
pub fn behind_bad(bytes: &[u8], bad: usize) -> usize {
    let end = bytes.len().min(bad.saturating_add(PSB.len()));
    find_psb(bytes.get(..end).unwrap_or_default(), bad.saturating_sub(PSB.len() - 1)).unwrap_or(bad.saturating_add(1))
}

impl<'a> Decoder<'a> {
    /// `base` is added to all offsets.
    #[must_use]
    pub fn new(bytes: &'a [u8], base: u64) -> Self {
        Self { bytes, pos: 0, base, block: Block::None, lost: false, cut_cyc: false }
    }

    /// As [`Decoder::new`], going on inside a block of items.
    #[must_use]
    pub fn resume(bytes: &'a [u8], base: u64, block: Block) -> Self {
        Self { block, ..Self::new(bytes, base) }
    }

    /// Packets are what a CPU with these errata means by them.
    #[must_use]
    pub fn with(self, errata: Errata) -> Self {
        Self { cut_cyc: errata.cut_cyc, ..self }
    }

    /// Bytes consumed so far.
    #[must_use]
    pub fn position(&self) -> usize {
        self.pos
    }

    /// Whether the decoder is inside a block of items.
    #[must_use]
    pub fn block(&self) -> Block {
        self.block
    }

    /// Goes to the next PSB at or after the present position; false where there is none (then nothing moved).
    pub fn sync(&mut self) -> bool {
        match find_psb(self.bytes, self.pos) {
            Some(at) => {
                self.pos = at;
                self.block = Block::None;
                true
            }
            None => false,
        }
    }

    /// Passes over packets that only tell flow and time, as [`Scan::pass`] does.
    #[inline]
    pub fn pass(&mut self, scan: &mut Scan) {
        if self.block == Block::None {
            self.pos += scan.pass(self.bytes.get(self.pos..).unwrap_or_default());
        }
    }

    /// The same, where `clock` counts the time.
    pub fn pass_timed(&mut self, scan: &mut Scan, clock: &mut Clock) {
        if self.block == Block::None {
            self.pos += scan.pass_timed(self.bytes.get(self.pos..).unwrap_or_default(), clock);
        }
    }

    /// The packet at the present position, which moves past it; `None` at the end. On an error the position stays.
    pub fn next_packet(&mut self) -> Option<Result<Packet, Bad>> {
        let rest = self.bytes.get(self.pos..).filter(|r| !r.is_empty())?;
        let offset = self.base.wrapping_add(self.pos as u64);
        Some(match parse(rest, self.block) {
            Ok((kind, len)) => {
                let (kind, len) = if self.cut_cyc { whole_cyc(kind, len, rest) } else { (kind, len) };
                self.pos += len;
                self.block = next_block(self.block, kind);
                Ok(Packet { offset, len: len as u8, kind })
            }
            Err(reason) => Err(Bad { offset, reason }),
        })
    }
}

/// A CYC that runs into an OVF ends before it: else the two would be a CYC and another one, which never follow each other.
fn whole_cyc(kind: Kind, len: usize, bytes: &[u8]) -> (Kind, usize) {
    match (kind, bytes) {
        (Kind::Cyc(_), [first, 0x02, 0xf3, ..]) => (Kind::Cyc(u64::from(first >> 3)), 1),
        _ => (kind, len),
    }
}

impl Iterator for Decoder<'_> {
    type Item = Result<Packet, Bad>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.lost {
            // The bad bytes may look like the start of a PSB: go past their first one.
            self.pos += 1;
            if !self.sync() {
                return None;
            }
            self.lost = false;
        }
        let item = self.next_packet()?;
        self.lost = item.is_err();
        Some(item)
    }
}

/// A block goes on over packets of time and power, and over the address of its event. Its end may be missing where packets
/// were dropped: all other packets say that it is over.
fn next_block(block: Block, kind: Kind) -> Block {
    match kind {
        Kind::Bbp { short: true, .. } => Block::Items4,
        Kind::Bbp { short: false, .. } => Block::Items8,
        Kind::Bip { .. } | Kind::Pad | Kind::Tsc(_) | Kind::Tma { .. } | Kind::Mtc(_) | Kind::Cyc(_) | Kind::Cbr(_) => {
            block
        }
        Kind::Fup(_) | Kind::Mnt(_) | Kind::ExStop { .. } | Kind::Pwre { .. } | Kind::Pwrx { .. } => block,
        _ => Block::None,
    }
}

type Parsed = Result<(Kind, usize), BadReason>;

/// Little-endian number of the `len` (at most 8) bytes from `at` on.
fn number(bytes: &[u8], at: usize, len: usize) -> Result<u64, BadReason> {
    let field = bytes.get(at..at + len).ok_or(BadReason::Cut)?;
    Ok(field.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b)))
}

fn byte(bytes: &[u8], at: usize) -> Result<u8, BadReason> {
    bytes.get(at).copied().ok_or(BadReason::Cut)
}

fn parse(bytes: &[u8], block: Block) -> Parsed {
    let first = byte(bytes, 0)?;
    if block != Block::None && first & 0x07 == 0x04 {
        let size = if block == Block::Items4 { 4 } else { 8 };
        return Ok((Kind::Bip { id: first >> 3, value: number(bytes, 1, size)?, size: size as u8 }, 1 + size));
    }
    match first {
        0x00 => Ok((Kind::Pad, 1)),
        0x02 => parse_extended(bytes),
        0x99 => parse_mode(bytes),
        0x19 => Ok((Kind::Tsc(number(bytes, 1, 7)?), 8)),
        0x59 => Ok((Kind::Mtc(byte(bytes, 1)?), 2)),
        _ if first & 0x01 == 0 => Ok((short_tnt(first), 1)),
        _ if first & 0x03 == 0x03 => parse_cyc(bytes, first),
        _ => parse_ip_packet(bytes, first),
    }
}

/// `first` is even and neither 0 nor 2, so its highest bit, the stop bit, is bit 2 or above.
fn short_tnt(first: u8) -> Kind {
    let count = 6u8.saturating_sub(first.leading_zeros() as u8);
    Kind::Tnt { bits: u64::from(first >> 1) & ((1 << count) - 1), count, long: false }
}

fn parse_ip_packet(bytes: &[u8], first: u8) -> Parsed {
    let ip_bytes = first >> 5;
    let make = match first & 0x1f {
        0x0d => Kind::Tip,
        0x11 => Kind::TipPge,
        0x01 => Kind::TipPgd,
        0x1d => Kind::Fup,
        _ => return Err(BadReason::Unknown),
    };
    let len = IpField::payload_len(ip_bytes).ok_or(BadReason::Unknown)?;
    Ok((make(IpField { bytes: ip_bytes, value: number(bytes, 1, len)? }), 1 + len))
}

fn parse_mode(bytes: &[u8]) -> Parsed {
    let leaf = byte(bytes, 1)?;
    match leaf >> 5 {
        // Neither 64-bit and 32-bit code at once, nor in a transaction that is aborted.
        0 | 1 if leaf & 3 == 3 => Err(BadReason::Unknown),
        0 => Ok((Kind::ModeExec(leaf & 0x1f), 2)),
        1 => Ok((Kind::ModeTsx(leaf & 0x1f), 2)),
        _ => Err(BadReason::Unknown),
    }
}

/// 5 bits in the first byte, 7 in each that follows while the one before says so.
fn parse_cyc(bytes: &[u8], first: u8) -> Parsed {
    let mut value = u64::from(first >> 3);
    let mut more = first & 0x04 != 0;
    let mut shift = 5;
    let mut len = 1;
    while more {
        let next = byte(bytes, len)?;
        let bits = u64::from(next >> 1);
        // Bits beyond the 64th cannot be told apart from damage.
        if shift >= 64 || (bits << shift) >> shift != bits {
            return Err(BadReason::Unknown);
        }
        value |= bits << shift;
        shift += 7;
        more = next & 0x01 != 0;
        len += 1;
    }
    Ok((Kind::Cyc(value), len))
}

/// Packets that begin with 0x02.
fn parse_extended(bytes: &[u8]) -> Parsed {
    let op = byte(bytes, 1)?;
    match op {
        0x82 => parse_psb(bytes),
        0x23 => Ok((Kind::PsbEnd, 2)),
        0x03 => Ok((Kind::Cbr((number(bytes, 2, 2)? & 0xff) as u8), 4)),
        0x83 => Ok((Kind::TraceStop, 2)),
        0xa3 => parse_long_tnt(bytes),
        0x43 => {
            let payload = number(bytes, 2, 6)?;
            Ok((Kind::Pip { cr3: payload >> 1 << 5, nr: payload & 1 == 1 }, 8))
        }
        0xf3 => Ok((Kind::Ovf, 2)),
        0xc3 if byte(bytes, 2)? == 0x88 => Ok((Kind::Mnt(number(bytes, 3, 8)?), 11)),
        0xc8 => Ok((Kind::Vmcs(number(bytes, 2, 5)? << 12), 7)),
        0x73 => {
            let (ctc, fast) = (number(bytes, 2, 2)?, number(bytes, 5, 2)?);
            Ok((Kind::Tma { ctc: ctc as u16, fast: (fast & 0x1ff) as u16 }, 7))
        }
        0x62 | 0xe2 => Ok((Kind::ExStop { ip: op & 0x80 != 0 }, 2)),
        0xc2 => {
            let payload = number(bytes, 2, 8)?;
            Ok((Kind::Mwait { hints: payload as u8, ext: (payload >> 32) as u8 & 0x03 }, 10))
        }
        0x22 => {
            let payload = number(bytes, 2, 2)?;
            Ok((Kind::Pwre { hw: payload & 0x80 != 0, state: (payload >> 8) as u8 }, 4))
        }
        0xa2 => {
            let payload = number(bytes, 2, 5)?;
            let (last, deepest) = ((payload >> 4) as u8 & 0x0f, payload as u8 & 0x0f);
            Ok((Kind::Pwrx { last, deepest, wake: (payload >> 8) as u8 & 0x0f }, 7))
        }
        0x63 => {
            let payload = byte(bytes, 2)?;
            Ok((Kind::Bbp { kind: payload & 0x1f, short: payload & 0x80 != 0 }, 3))
        }
        0x33 | 0xb3 => Ok((Kind::Bep { ip: op & 0x80 != 0 }, 2)),
        0x13 => {
            let (kind, vector) = (byte(bytes, 2)?, byte(bytes, 3)?);
            Ok((Kind::Cfe { kind: kind & 0x1f, vector, ip: kind & 0x80 != 0 }, 4))
        }
        0x53 => Ok((Kind::Evd { kind: byte(bytes, 2)? & 0x3f, value: number(bytes, 3, 8)? }, 11)),
        _ if op & 0x1f == 0x12 => {
            let size = match op >> 5 & 0x03 {
                0 => 4,
                1 => 8,
                _ => return Err(BadReason::Unknown),
            };
            Ok((Kind::Ptw { value: number(bytes, 2, size)?, size: size as u8, ip: op & 0x80 != 0 }, 2 + size))
        }
        _ => Err(BadReason::Unknown),
    }
}

fn parse_psb(bytes: &[u8]) -> Parsed {
    match bytes.get(..PSB.len()) {
        Some(start) if start == PSB => Ok((Kind::Psb, PSB.len())),
        Some(_) => Err(BadReason::Unknown),
        None if PSB.starts_with(bytes) => Err(BadReason::Cut),
        None => Err(BadReason::Unknown),
    }
}

/// 47 branches at most; the highest set bit is the stop bit.
fn parse_long_tnt(bytes: &[u8]) -> Parsed {
    let payload = number(bytes, 2, 6)?;
    let stop = payload.checked_ilog2().ok_or(BadReason::Unknown)?;
    if stop == 0 {
        return Err(BadReason::Unknown);
    }
    Ok((Kind::Tnt { bits: payload & ((1 << stop) - 1), count: stop as u8, long: true }, 8))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn one(bytes: &[u8]) -> Kind {
        let mut decoder = Decoder::new(bytes, 0);
        let packet = decoder.next_packet().expect("not empty").expect("known");
        assert_eq!(packet.len as usize, bytes.len());
        packet.kind
    }

    #[test]
    fn behind_bytes_that_are_no_packet_a_psb_that_has_begun_counts() {
        let bytes = [&[0x4d, 0x05, 0x34, 0x06][..], &PSB, &[0x02, 0x23]].concat();
        assert_eq!(behind_bad(&bytes, 6), 4);
        assert_eq!(behind_bad(&bytes, 4), 4);
        assert_eq!(behind_bad(&bytes, 20), 21);
        assert_eq!(behind_bad(&[], 0), 1);
    }

    #[test]
    fn a_cyc_that_an_overflow_cuts_ends_there_on_cpus_that_do_so() {
        let bytes = [0x1f, 0x02, 0xf3, 0x06];
        let kinds = |errata| -> Vec<_> {
            Decoder::new(&bytes, 0).with(errata).map(|packet| packet.expect("a packet").kind).collect()
        };
        let tnt = Kind::Tnt { bits: 1, count: 1, long: false };
        assert_eq!(kinds(Errata { cut_cyc: true, ..Errata::default() }), [Kind::Cyc(3), Kind::Ovf, tnt]);
        assert_eq!(kinds(Errata::default())[1..], [Kind::Cyc(30), tnt]);
    }

    #[test]
    fn every_packet_type_has_its_size_and_payload() {
        let ip = |bytes, value| IpField { bytes, value };
        assert_eq!(one(&[0x00]), Kind::Pad);
        assert_eq!(one(&[0x06]), Kind::Tnt { bits: 1, count: 1, long: false });
        assert_eq!(one(&[0xfc]), Kind::Tnt { bits: 0b11_1110, count: 6, long: false });
        assert_eq!(one(&[0x02, 0xa3, 0x05, 0, 0, 0, 0, 0x80]), Kind::Tnt { bits: 5, count: 47, long: true });
        assert_eq!(one(&[0x0d]), Kind::Tip(ip(0, 0)));
        assert_eq!(one(&[0x2d, 0x34, 0x12]), Kind::Tip(ip(1, 0x1234)));
        assert_eq!(one(&[0x51, 4, 3, 2, 1]), Kind::TipPge(ip(2, 0x0102_0304)));
        assert_eq!(one(&[0x61, 6, 5, 4, 3, 2, 1]), Kind::TipPgd(ip(3, 0x0102_0304_0506)));
        assert_eq!(one(&[0x9d, 6, 5, 4, 3, 2, 1]), Kind::Fup(ip(4, 0x0102_0304_0506)));
        assert_eq!(one(&[0xdd, 8, 7, 6, 5, 4, 3, 2, 1]), Kind::Fup(ip(6, 0x0102_0304_0506_0708)));
        assert_eq!(one(&[0x02, 0x43, 3, 0, 0, 0, 0, 0]), Kind::Pip { cr3: 0x20, nr: true });
        assert_eq!(one(&[0x99, 0x05]), Kind::ModeExec(5));
        assert_eq!(one(&[0x99, 0x21]), Kind::ModeTsx(1));
        assert_eq!(one(&[0x02, 0x83]), Kind::TraceStop);
        assert_eq!(one(&[0x02, 0x03, 0x1e, 0]), Kind::Cbr(30));
        assert_eq!(one(&[0x19, 7, 6, 5, 4, 3, 2, 1]), Kind::Tsc(0x01_0203_0405_0607));
        assert_eq!(one(&[0x02, 0x73, 2, 1, 0, 0xff, 0x01]), Kind::Tma { ctc: 0x102, fast: 0x1ff });
        assert_eq!(one(&[0x59, 0x42]), Kind::Mtc(0x42));
        assert_eq!(one(&[0xfb]), Kind::Cyc(31));
        assert_eq!(one(&[0x0f, 0x04]), Kind::Cyc(2 << 5 | 1));
        assert_eq!(one(&[0x02, 0xc8, 1, 0, 0, 0, 0]), Kind::Vmcs(0x1000));
        assert_eq!(one(&[0x02, 0xf3]), Kind::Ovf);
        assert_eq!(one(&PSB), Kind::Psb);
        assert_eq!(one(&[0x02, 0x23]), Kind::PsbEnd);
        assert_eq!(one(&[0x02, 0xc3, 0x88, 1, 0, 0, 0, 0, 0, 0, 0]), Kind::Mnt(1));
        assert_eq!(one(&[0x02, 0x92, 1, 0, 0, 0]), Kind::Ptw { value: 1, size: 4, ip: true });
        assert_eq!(one(&[0x02, 0x32, 1, 0, 0, 0, 0, 0, 0, 1]), Kind::Ptw { value: 1 << 56 | 1, size: 8, ip: false });
        assert_eq!(one(&[0x02, 0xe2]), Kind::ExStop { ip: true });
        assert_eq!(one(&[0x02, 0xc2, 0x60, 0, 0, 0, 1, 0, 0, 0]), Kind::Mwait { hints: 0x60, ext: 1 });
        assert_eq!(one(&[0x02, 0x22, 0x80, 0x21]), Kind::Pwre { hw: true, state: 0x21 });
        assert_eq!(one(&[0x02, 0xa2, 0x34, 0x08, 0, 0, 0]), Kind::Pwrx { last: 3, deepest: 4, wake: 8 });
        assert_eq!(one(&[0x02, 0x63, 0x84]), Kind::Bbp { kind: 4, short: true });
        assert_eq!(one(&[0x02, 0xb3]), Kind::Bep { ip: true });
        assert_eq!(one(&[0x02, 0x13, 0x81, 0x0e]), Kind::Cfe { kind: 1, vector: 14, ip: true });
        assert_eq!(one(&[0x02, 0x53, 0, 9, 0, 0, 0, 0, 0, 0, 0]), Kind::Evd { kind: 0, value: 9 });
    }

    #[test]
    fn block_items_are_read_only_between_bbp_and_bep() {
        let bytes = [0x02, 0x63, 0x84, 0x0c, 1, 0, 0, 0, 0x02, 0x33, 0x0c];
        let kinds: Vec<Kind> = Decoder::new(&bytes, 0).map(|p| p.expect("known").kind).collect();
        assert_eq!(kinds[1], Kind::Bip { id: 1, value: 1, size: 4 });
        assert_eq!(kinds[3], Kind::Tnt { bits: 2, count: 2, long: false });
    }

    #[test]
    fn a_block_is_over_with_a_packet_that_cannot_be_in_it() {
        let kinds = |between: Kind| -> Vec<Kind> {
            let mut bytes = vec![0x02, 0x63, 0x04];
            super::super::encode(&mut bytes, between);
            bytes.extend_from_slice(&[0x0c, 1, 2, 3, 4, 5, 6, 7, 8]);
            Decoder::new(&bytes, 0).flatten().skip(2).map(|p| p.kind).collect()
        };
        assert_eq!(kinds(Kind::Mtc(1)), [Kind::Bip { id: 1, value: 0x0807_0605_0403_0201, size: 8 }]);
        assert_eq!(kinds(Kind::Ovf)[0], Kind::Tnt { bits: 2, count: 2, long: false });
        assert_eq!(kinds(Kind::Ptw { value: 0, size: 4, ip: false })[0], Kind::Tnt { bits: 2, count: 2, long: false });
    }

    #[test]
    fn after_unknown_bytes_decoding_goes_on_at_the_next_psb() {
        let mut bytes = vec![0x02, 0xff, 0x00, 0x02];
        bytes.extend_from_slice(&PSB);
        bytes.extend_from_slice(&[0x02, 0xf3]);
        let all: Vec<_> = Decoder::new(&bytes, 100).collect();
        assert_eq!(all[0], Err(Bad { offset: 100, reason: BadReason::Unknown }));
        assert_eq!(all[1].map(|p| (p.offset, p.kind)), Ok((104, Kind::Psb)));
        assert_eq!(all[2].map(|p| p.kind), Ok(Kind::Ovf));
        assert_eq!(all.len(), 3);
    }

    #[test]
    fn a_cut_packet_is_an_error_at_its_start() {
        let all: Vec<_> = Decoder::new(&[0x00, 0x19, 1, 2], 0).collect();
        assert_eq!(all[1], Err(Bad { offset: 1, reason: BadReason::Cut }));
        assert_eq!(all.len(), 2);
    }

    proptest! {
        #[test]
        fn no_bytes_panic_and_all_positions_move(bytes in proptest::collection::vec(
            prop_oneof![any::<u8>(), Just(0x02), Just(0x82)], 0..600)) {
            let mut next = 0;
            for packet in Decoder::new(&bytes, 0).flatten() {
                prop_assert!(packet.offset >= next);
                next = packet.offset + u64::from(packet.len);
                prop_assert!(!packet.kind.to_string().is_empty());
            }
            prop_assert!(next <= bytes.len() as u64);
        }
    }
}
