//! The fast way over packets that only tell where the program went and what time it is.
//!
//! Most of a trace is TNT and IP packets. They are passed by tables of what a packet's first byte says; only the last IP
//! and the time are kept. What else there is, the plain decoder reads.

use super::{nearest_tsc, LastIp};

#[cfg(test)]
mod tests;

/// Bytes looked at together: 7 of short TNT packets, and an IP packet.
const WINDOW_LEN: usize = 16;

const LOW_BITS: u64 = 0x0101_0101_0101_0101;
const HIGH_BITS: u64 = LOW_BITS << 7;

/// What passes over packets leave behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scan {
    pub last_ip: LastIp,
    pub tsc: u64,
}

/// What a first byte says of its packet.
#[derive(Clone, Copy)]
struct First {
    class: Class,
    len: u8,
    /// How many of the 64 bits after it are filled with the highest of those below.
    filled: u8,
    /// Bits of the last IP that stay.
    keep: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    /// Its length and what it does to the last IP is all that there is to know.
    Plain,
    Tsc,
    Mode,
    Extended,
    Other,
}

static FIRST: [First; 256] = first_bytes();

/// Lengths of packets that begin with 0x02 and say nothing of values; 0: others.
static EXTENDED: [u8; 256] = extended_packets();

const LONG_TNT: u8 = 0xa3;

impl Scan {
    /// Passes over packets from the start of `bytes`, which must not be inside a block of items; how many bytes.
    ///
    /// Stops before a packet that may say more, before bytes that are none, and some bytes before the end.
    #[inline]
    pub fn pass(&mut self, bytes: &[u8]) -> usize {
        let mut at = 0;
        let Scan { last_ip: LastIp(mut last_ip), mut tsc } = *self;
        while let Some(window) = bytes.get(at..).and_then(|rest| rest.first_chunk::<WINDOW_LEN>()) {
            let window = u128::from_le_bytes(*window);
            let tnts = leading_tnts(window as u64);
            at += tnts;
            if tnts == 8 {
                continue;
            }
            let packet = window >> (8 * tnts);
            let payload = (packet >> 8) as u64;
            let first = &FIRST[usize::from(packet as u8)];
            match first.class {
                Class::Plain => {
                    let value = ((payload << (first.filled & 63)) as i64 >> (first.filled & 63)) as u64;
                    last_ip = last_ip & first.keep | value & !first.keep;
                    at += usize::from(first.len);
                }
                Class::Tsc => {
                    tsc = nearest_tsc(tsc, payload << 8 >> 8);
                    at += usize::from(first.len);
                }
                Class::Mode => {
                    let leaf = payload as u8;
                    if leaf >> 5 > 1 || leaf & 3 == 3 {
                        break;
                    }
                    at += usize::from(first.len);
                }
                Class::Extended => {
                    let op = payload as u8;
                    let len = EXTENDED[usize::from(op)];
                    // Without a stop bit, or with nothing but it.
                    let empty = op == LONG_TNT && payload >> 8 & 0xffff_ffff_ffff < 2;
                    if len == 0 || empty || bytes.len() - at < usize::from(len) {
                        break;
                    }
                    at += usize::from(len);
                }
                Class::Other => break,
            }
        }
        *self = Scan { last_ip: LastIp(last_ip), tsc };
        at
    }
}

/// How many of the 8 bytes, from the lowest on, are short TNT packets or PADs: even, and not 2.
#[inline]
fn leading_tnts(bytes: u64) -> usize {
    let odd = (bytes & LOW_BITS) << 7;
    // Set for a byte of 2, and maybe above one.
    let differs = bytes ^ LOW_BITS << 1;
    let twos = differs.wrapping_sub(LOW_BITS) & !differs & HIGH_BITS;
    ((odd | twos).trailing_zeros() / 8) as usize
}

const fn first_bytes() -> [First; 256] {
    let other = First { class: Class::Other, len: 0, filled: 0, keep: u64::MAX };
    let mut table = [other; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = match byte {
            0x02 => First { class: Class::Extended, ..other },
            0x19 => First { class: Class::Tsc, len: 8, ..other },
            0x59 => First { class: Class::Plain, len: 2, ..other },
            0x99 => First { class: Class::Mode, len: 2, ..other },
            // TNT and PAD; CYC that ends in its first byte.
            _ if byte & 1 == 0 || byte & 7 == 3 => First { class: Class::Plain, len: 1, ..other },
            _ if matches!(byte & 0x1f, 0x0d | 0x11 | 0x01 | 0x1d) => match byte >> 5 {
                0 => First { class: Class::Plain, len: 1, ..other },
                1 => First { class: Class::Plain, len: 3, filled: 0, keep: !0xffff },
                2 => First { class: Class::Plain, len: 5, filled: 0, keep: !0xffff_ffff },
                3 => First { class: Class::Plain, len: 7, filled: 16, keep: 0 },
                4 => First { class: Class::Plain, len: 7, filled: 0, keep: !0xffff_ffff_ffff },
                6 => First { class: Class::Plain, len: 9, filled: 0, keep: 0 },
                _ => other,
            },
            _ => other,
        };
        byte += 1;
    }
    table
}

const fn extended_packets() -> [u8; 256] {
    let mut len = [0; 256];
    len[0x23] = 2; // PSBEND
    len[0x03] = 4; // CBR
    len[0x83] = 2; // TraceStop
    len[LONG_TNT as usize] = 8;
    len[0x43] = 8; // PIP
    len[0xc8] = 7; // VMCS
    len[0x73] = 7; // TMA
    (len[0x62], len[0xe2]) = (2, 2); // EXSTOP
    len[0xc2] = 10; // MWAIT
    len[0x22] = 4; // PWRE
    len[0xa2] = 7; // PWRX
    (len[0x33], len[0xb3]) = (2, 2); // BEP
    len[0x13] = 4; // CFE
    len[0x53] = 11; // EVD
    len
}
