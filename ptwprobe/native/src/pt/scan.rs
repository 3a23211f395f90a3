//! The fast way over packets that only tell where the program went and what time it is.
//!
//! Most of a trace is TNT and IP packets. They are passed many at a time (see `blocks`), and those that are not so
//! frequent by tables of what a packet's first byte says; only the last IP and the time are kept. What else there is, the
//! plain decoder reads.

use super::{nearest_tsc, Clock, LastIp};

mod blocks;
#[cfg(test)]
mod tests;

/// Bytes that are there when a packet is looked at: none of those that are passed over is longer.
const WINDOW_LEN: usize = 16;

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
    /// MTC, and CYC of one byte, where somebody wants to know.
    Time,
    Mode,
    Extended,
    Other,
}

static FIRST: [First; 256] = first_bytes(false);

/// The same where every packet of time counts.
static FIRST_TIMED: [First; 256] = first_bytes(true);

/// Lengths of packets that begin with 0x02 and say nothing of values; 0: others.
static EXTENDED: [u8; 256] = extended_packets();

const LONG_TNT: u8 = 0xa3;
const TMA: u8 = 0x73;
const CBR: u8 = 0x03;
const MTC: u8 = 0x59;
const TSC: u8 = 0x19;

/// Who is told of packets of time.
trait Timer {
    /// Of all, not of TSC packets alone.
    const ALL: bool;
    fn tsc(&mut self, low: u64);
    fn mtc(&mut self, ctc: u8);
    fn cyc(&mut self, cycles: u64);

    /// A packet by its first byte and what follows.
    #[inline(always)]
    fn take(&mut self, first: u8, payload: u64) {
        match first {
            TSC => self.tsc(payload << 8 >> 8),
            MTC => self.mtc(payload as u8),
            cyc => self.cyc(u64::from(cyc >> 3)),
        }
    }
}

/// The last TSC.
impl Timer for u64 {
    const ALL: bool = false;

    #[inline(always)]
    fn tsc(&mut self, low: u64) {
        *self = nearest_tsc(*self, low);
    }

    fn mtc(&mut self, _ctc: u8) {}

    fn cyc(&mut self, _cycles: u64) {}
}

impl Timer for Clock {
    const ALL: bool = true;

    fn tsc(&mut self, low: u64) {
        Self::tsc(self, low);
    }

    fn mtc(&mut self, ctc: u8) {
        Self::mtc(self, ctc);
    }

    fn cyc(&mut self, cycles: u64) {
        Self::cyc(self, cycles);
    }
}

impl Scan {
    /// Passes over packets from the start of `bytes`, which must not be inside a block of items; how many bytes.
    ///
    /// Stops before a packet that may say more, before bytes that are none, and some bytes before the end.
    #[inline]
    pub fn pass(&mut self, bytes: &[u8]) -> usize {
        let mut tsc = self.tsc;
        let at = self.run(bytes, &mut tsc);
        self.tsc = tsc;
        at
    }

    /// The same, where `clock` counts the time.
    pub fn pass_timed(&mut self, bytes: &[u8], clock: &mut Clock) -> usize {
        self.run(bytes, clock)
    }

    fn run<T: Timer>(&mut self, bytes: &[u8], timer: &mut T) -> usize {
        let mut at = 0;
        loop {
            at += blocks::pass(&mut self.last_ip, timer, bytes.get(at..).unwrap_or_default());
            match packet(&mut self.last_ip, timer, bytes.get(at..).unwrap_or_default()) {
                Some(len) => at += len,
                None => return at,
            }
        }
    }
}

/// Passes over one packet; its length.
fn packet<T: Timer>(LastIp(last_ip): &mut LastIp, timer: &mut T, bytes: &[u8]) -> Option<usize> {
    let table = if T::ALL { &FIRST_TIMED } else { &FIRST };
    let window = u128::from_le_bytes(*bytes.first_chunk::<WINDOW_LEN>()?);
    let payload = (window >> 8) as u64;
    let first = &table[usize::from(window as u8)];
    match first.class {
        Class::Plain => {
            let value = ((payload << (first.filled & 63)) as i64 >> (first.filled & 63)) as u64;
            *last_ip = *last_ip & first.keep | value & !first.keep;
        }
        Class::Tsc | Class::Time => timer.take(window as u8, payload),
        Class::Mode => {
            let leaf = payload as u8;
            if leaf >> 5 > 1 || leaf & 3 == 3 {
                return None;
            }
        }
        Class::Extended => {
            let op = payload as u8;
            let len = EXTENDED[usize::from(op)];
            // Without a stop bit, or with nothing but it.
            let empty = op == LONG_TNT && payload >> 8 & 0xffff_ffff_ffff < 2;
            let timed = T::ALL && matches!(op, TMA | CBR);
            return (len != 0 && !timed && !empty).then_some(usize::from(len));
        }
        Class::Other => return None,
    }
    Some(usize::from(first.len))
}

const fn first_bytes(timed: bool) -> [First; 256] {
    let other = First { class: Class::Other, len: 0, filled: 0, keep: u64::MAX };
    let mut table = [other; 256];
    let mut byte = 0;
    while byte < 256 {
        table[byte] = match byte as u8 {
            0x02 => First { class: Class::Extended, ..other },
            TSC => First { class: Class::Tsc, len: 8, ..other },
            MTC if timed => First { class: Class::Time, len: 2, ..other },
            _ if timed && byte & 7 == 3 => First { class: Class::Time, len: 1, ..other },
            MTC => First { class: Class::Plain, len: 2, ..other },
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
    len[CBR as usize] = 4;
    len[0x83] = 2; // TraceStop
    len[LONG_TNT as usize] = 8;
    len[0x43] = 8; // PIP
    len[0xc8] = 7; // VMCS
    len[TMA as usize] = 7;
    (len[0x62], len[0xe2]) = (2, 2); // EXSTOP
    len[0xc2] = 10; // MWAIT
    len[0x22] = 4; // PWRE
    len[0xa2] = 7; // PWRX
    (len[0x33], len[0xb3]) = (2, 2); // BEP
    len[0x13] = 4; // CFE
    len[0x53] = 11; // EVD
    len
}
