//! Packets to bytes: what the recorder writes for the hits of a ring.

use super::{LastIp, PSB};

/// Payload of a PTW packet. A 4-byte one holds the low half of the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PtwSize {
    Four,
    Eight,
}

/// Longest bytes of one word of a hit: PTW with 8 bytes, FUP with 8 bytes.
const MAX_WORD_LEN: usize = 10 + 9;
const TSC_LEN: usize = 8;

pub fn encode_pad(out: &mut Vec<u8>) {
    out.push(0);
}

/// A PSB resets the last IP.
pub fn encode_psb(out: &mut Vec<u8>, last_ip: &mut LastIp) {
    *last_ip = LastIp::default();
    out.extend_from_slice(&PSB);
}

pub fn encode_psbend(out: &mut Vec<u8>) {
    out.extend_from_slice(&[0x02, 0x23]);
}

pub fn encode_ovf(out: &mut Vec<u8>) {
    out.extend_from_slice(&[0x02, 0xf3]);
}

/// The low 56 bits of `tsc`.
pub fn encode_tsc(out: &mut Vec<u8>, tsc: u64) {
    out.extend_from_slice(&(tsc << 8 | 0x19).to_le_bytes());
}

/// A chunk begins with this: PSB, the time, PSBEND.
pub fn encode_psb_plus(out: &mut Vec<u8>, last_ip: &mut LastIp, tsc: u64) {
    encode_psb(out, last_ip);
    encode_tsc(out, tsc);
    encode_psbend(out);
}

/// With `ip` the caller has to encode a FUP next.
pub fn encode_ptw(out: &mut Vec<u8>, value: u64, size: PtwSize, ip: bool) {
    let ip_bit = u8::from(ip) << 7;
    match size {
        PtwSize::Four => {
            out.extend_from_slice(&[0x02, 0x12 | ip_bit]);
            out.extend_from_slice(&(value as u32).to_le_bytes());
        }
        PtwSize::Eight => {
            out.extend_from_slice(&[0x02, 0x32 | ip_bit]);
            out.extend_from_slice(&value.to_le_bytes());
        }
    }
}

pub fn encode_fup(out: &mut Vec<u8>, last_ip: &mut LastIp, ip: u64) {
    let field = last_ip.compress(ip);
    let first = 0x1d | field.bytes << 5;
    let bytes = ip.to_le_bytes();
    match field.bytes {
        1 => out.extend_from_slice(&[first, bytes[0], bytes[1]]),
        2 => out.extend_from_slice(&[first, bytes[0], bytes[1], bytes[2], bytes[3]]),
        3 => out.extend_from_slice(&[first, bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5]]),
        _ => {
            out.push(first);
            out.extend_from_slice(&bytes);
        }
    }
}

/// One hit: its time, then `header` and `args`, each as PTW and FUP. `slot_addrs` are the addresses of the words in the
/// stub, header first; a word without one gets no FUP.
///
/// The hits of one thread have to be encoded in the order of their TSC, over chunks as well: perf takes a step
/// backwards for a wrap-around of the counter.
pub fn encode_hit(out: &mut Vec<u8>, last_ip: &mut LastIp, tsc: u64, slot_addrs: &[u64], header: u64, args: &[u64]) {
    out.reserve(TSC_LEN + MAX_WORD_LEN * (1 + args.len()));
    encode_tsc(out, tsc);
    let mut slots = slot_addrs.iter();
    for &word in std::iter::once(&header).chain(args) {
        match slots.next() {
            Some(&ip) => {
                encode_ptw(out, word, PtwSize::Eight, true);
                encode_fup(out, last_ip, ip);
            }
            None => encode_ptw(out, word, PtwSize::Eight, false),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pt::{header_word, parse_header_word, Decoder, Kind};
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
    fn a_four_byte_word_keeps_the_low_half() {
        let mut out = Vec::new();
        encode_ptw(&mut out, 0x1122_3344_5566_7788, PtwSize::Four, false);
        assert_eq!(out, [0x02, 0x12, 0x88, 0x77, 0x66, 0x55]);
    }

    proptest! {
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
