//! Packets to bytes: any packet, and what the recorder writes for the hits of a ring.

use super::{IpField, Kind, LastIp, PSB};

/// Longest bytes of one word of a hit: PTW with 8 bytes, FUP with 8 bytes.
const MAX_WORD_LEN: usize = 10 + 9;
const TSC_LEN: usize = 8;

/// Writes one packet. Fields are cut to the bits that the packet has for them, and a TNT to the branches that it has room
/// for: 6, or 47 if long. What this writes decodes to the same packet, but for reserved
/// values of an IP field or a mode.
///
/// The IP of a packet is compressed by [`LastIp::compress`]. A BIP is read back only inside its block.
#[inline]
pub fn encode(out: &mut Vec<u8>, kind: Kind) {
    let flag = |set: bool, bit: u8| u8::from(set) << bit;
    match kind {
        Kind::Pad => out.push(0),
        Kind::Tnt { bits, count, long: false } => {
            let count = count.clamp(1, 6);
            out.push((stopped(bits, count) << 1) as u8);
        }
        Kind::Tnt { bits, count, long: true } => extended(out, 0xa3, stopped(bits, count.clamp(1, 47)), 6),
        Kind::Tip(field) => ip_packet(out, 0x0d, field),
        Kind::TipPge(field) => ip_packet(out, 0x11, field),
        Kind::TipPgd(field) => ip_packet(out, 0x01, field),
        Kind::Fup(field) => ip_packet(out, 0x1d, field),
        Kind::Pip { cr3, nr } => extended(out, 0x43, cr3 >> 5 << 1 | u64::from(nr), 6),
        Kind::ModeExec(bits) => out.extend_from_slice(&[0x99, bits & 0x1f]),
        Kind::ModeTsx(bits) => out.extend_from_slice(&[0x99, 0x20 | bits & 0x1f]),
        Kind::TraceStop => extended(out, 0x83, 0, 0),
        Kind::Cbr(ratio) => extended(out, 0x03, ratio.into(), 2),
        Kind::Tsc(tsc) => out.extend_from_slice(&(tsc << 8 | 0x19).to_le_bytes()),
        Kind::Tma { ctc, fast } => extended(out, 0x73, u64::from(ctc) | u64::from(fast & 0x1ff) << 24, 5),
        Kind::Mtc(ctc) => out.extend_from_slice(&[0x59, ctc]),
        Kind::Cyc(cycles) => cyc(out, cycles),
        Kind::Vmcs(addr) => extended(out, 0xc8, addr >> 12, 5),
        Kind::Ovf => extended(out, 0xf3, 0, 0),
        Kind::Psb => out.extend_from_slice(&PSB),
        Kind::PsbEnd => extended(out, 0x23, 0, 0),
        Kind::Mnt(value) => {
            extended(out, 0xc3, 0x88, 1);
            out.extend_from_slice(&value.to_le_bytes());
        }
        Kind::Ptw { value, size: 4, ip } => extended(out, 0x12 | flag(ip, 7), value, 4),
        Kind::Ptw { value, ip, .. } => extended(out, 0x32 | flag(ip, 7), value, 8),
        Kind::ExStop { ip } => extended(out, 0x62 | flag(ip, 7), 0, 0),
        Kind::Mwait { hints, ext } => extended(out, 0xc2, u64::from(hints) | u64::from(ext & 3) << 32, 8),
        Kind::Pwre { hw, state } => out.extend_from_slice(&[0x02, 0x22, flag(hw, 7), state]),
        Kind::Pwrx { last, deepest, wake } => {
            out.extend_from_slice(&[0x02, 0xa2, last << 4 | deepest & 0x0f, wake & 0x0f, 0, 0, 0]);
        }
        Kind::Bbp { kind, short } => out.extend_from_slice(&[0x02, 0x63, kind & 0x1f | flag(short, 7)]),
        Kind::Bip { id, value, size } => {
            out.push(id << 3 | 0x04);
            little_endian(out, value, if size == 4 { 4 } else { 8 });
        }
        Kind::Bep { ip } => extended(out, 0x33 | flag(ip, 7), 0, 0),
        Kind::Cfe { kind, vector, ip } => out.extend_from_slice(&[0x02, 0x13, kind & 0x1f | flag(ip, 7), vector]),
        Kind::Evd { kind, value } => {
            extended(out, 0x53, u64::from(kind & 0x3f), 1);
            out.extend_from_slice(&value.to_le_bytes());
        }
    }
}

/// The low `count` bits with the stop bit above them.
fn stopped(bits: u64, count: u8) -> u64 {
    1 << count | bits & ((1 << count) - 1)
}

/// A packet that begins with 0x02, with the low `len` bytes of `payload`.
#[inline]
fn extended(out: &mut Vec<u8>, op: u8, payload: u64, len: usize) {
    out.extend_from_slice(&[0x02, op]);
    little_endian(out, payload, len);
}

#[inline]
fn little_endian(out: &mut Vec<u8>, value: u64, len: usize) {
    let bytes = value.to_le_bytes();
    out.extend_from_slice(bytes.get(..len).unwrap_or(&bytes));
}

#[inline]
fn ip_packet(out: &mut Vec<u8>, op: u8, field: IpField) {
    out.push(op | field.bytes << 5);
    little_endian(out, field.value, IpField::payload_len(field.bytes).unwrap_or(0));
}

fn cyc(out: &mut Vec<u8>, cycles: u64) {
    let mut rest = cycles >> 5;
    let first = (cycles as u8) << 3 | 0x03;
    out.push(first | u8::from(rest != 0) << 2);
    while rest != 0 {
        let low = (rest as u8) << 1;
        rest >>= 7;
        out.push(low | u8::from(rest != 0));
    }
}

/// A PSB resets the last IP.
pub fn encode_psb(out: &mut Vec<u8>, last_ip: &mut LastIp) {
    *last_ip = LastIp::default();
    encode(out, Kind::Psb);
}

/// A chunk begins with this: PSB, the time, PSBEND.
pub fn encode_psb_plus(out: &mut Vec<u8>, last_ip: &mut LastIp, tsc: u64) {
    encode_psb(out, last_ip);
    encode(out, Kind::Tsc(tsc));
    encode(out, Kind::PsbEnd);
}

pub fn encode_fup(out: &mut Vec<u8>, last_ip: &mut LastIp, ip: u64) {
    encode(out, Kind::Fup(last_ip.compress(ip)));
}

/// One hit: its time, then `header` and `args`, each as PTW and FUP. `slot_addrs` are the addresses of the words in the
/// stub, header first; a word without one gets no FUP.
///
/// The hits of one thread have to be encoded in the order of their TSC, over chunks as well: perf takes a step
/// backwards for a wrap-around of the counter.
pub fn encode_hit(out: &mut Vec<u8>, last_ip: &mut LastIp, tsc: u64, slot_addrs: &[u64], header: u64, args: &[u64]) {
    out.reserve(TSC_LEN + MAX_WORD_LEN * (1 + args.len()));
    encode(out, Kind::Tsc(tsc));
    let mut slots = slot_addrs.iter();
    for &word in std::iter::once(&header).chain(args) {
        match slots.next() {
            Some(&ip) => {
                encode(out, Kind::Ptw { value: word, size: 8, ip: true });
                encode_fup(out, last_ip, ip);
            }
            None => encode(out, Kind::Ptw { value: word, size: 8, ip: false }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pt::arbitrary::kind;
    use crate::pt::{header_word, parse_header_word, Block, Decoder, Packet};
    use proptest::prelude::*;

    #[test]
    fn a_hit_is_read_back_with_its_addresses() {
        let slots = [0x7f00_0000_1000, 0x7f00_0000_1010, 0x7f00_0001_0000];
        let header = header_word(0x8001, 2);
        let mut out = Vec::new();
        let mut last = LastIp::default();
        encode_psb_plus(&mut out, &mut last, 1000);
        encode_hit(&mut out, &mut last, 1001, &slots, header, &[5, u64::MAX]);
        let mut ips = Vec::new();
        let mut words = Vec::new();
        let mut last = LastIp::default();
        for packet in Decoder::new(&out, 0) {
            match packet.expect("all known").kind {
                Kind::Psb => last = LastIp::default(),
                Kind::Ptw { value, ip: true, .. } => words.push(value),
                Kind::Fup(field) => ips.extend(last.update(field)),
                _ => {}
            }
        }
        assert_eq!(words, [header, 5, u64::MAX]);
        assert_eq!(ips, slots);
        assert_eq!(parse_header_word(header), Some((0x8001, 2)));
    }

    #[test]
    fn fields_are_cut_to_their_packet() {
        let bytes = |kind| {
            let mut out = Vec::new();
            encode(&mut out, kind);
            out
        };
        let value = 0x1122_3344_5566_7788;
        assert_eq!(bytes(Kind::Ptw { value, size: 4, ip: false }), [0x02, 0x12, 0x88, 0x77, 0x66, 0x55]);
        assert_eq!(bytes(Kind::Tnt { bits: u64::MAX, count: 99, long: false }), [0xfe]);
        assert_eq!(bytes(Kind::Bbp { kind: 0xff, short: false }), [0x02, 0x63, 0x1f]);
        assert_eq!(bytes(Kind::Cyc(u64::MAX)).len(), 10);
    }

    proptest! {
        #[test]
        fn every_packet_is_read_back(kind in kind()) {
            let mut out = Vec::new();
            encode(&mut out, kind);
            let block = match kind {
                Kind::Bip { size: 4, .. } => Block::Items4,
                Kind::Bip { .. } => Block::Items8,
                _ => Block::None,
            };
            let read = Decoder::resume(&out, 0, block).next_packet();
            prop_assert_eq!(read, Some(Ok(Packet { offset: 0, len: out.len() as u8, kind })));
        }

        #[test]
        fn compressed_ips_are_read_back(ips in proptest::collection::vec(
            prop_oneof![any::<u64>(), 0x5500_0000_0000u64..0x5500_0002_0000, (u64::MAX - 0x10_0000)..], 1..50)) {
            let mut out = Vec::new();
            let mut last = LastIp::default();
            encode_psb(&mut out, &mut last);
            for &ip in &ips {
                encode_fup(&mut out, &mut last, ip);
            }
            let mut last = LastIp::default();
            let read: Vec<u64> = Decoder::new(&out, 0)
                .filter_map(|p| match p.expect("all known").kind {
                    Kind::Fup(field) => last.update(field),
                    _ => None,
                })
                .collect();
            prop_assert_eq!(read, ips);
        }
    }
}
