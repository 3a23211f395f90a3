//! Writes packets as a CPU does: gathers TNT bits, defers TIPs, compresses IPs, tells the time before what happens.
//!
//! Written apart from the crate's own encoder, so that a decoder is not tested against its sibling's idea of a packet.
//! Source: Intel SDM volume 3, "Intel Processor Trace", "Packet Definitions".

use crate::clock::Clock;
use crate::rng::Rng;

pub const PSB: [u8; 16] = [0x02, 0x82, 2, 0x82, 2, 0x82, 2, 0x82, 2, 0x82, 2, 0x82, 2, 0x82, 2, 0x82];

/// First bytes of the packets with an IP.
const TIP: u8 = 0x0d;
const PGE: u8 = 0x11;
const PGD: u8 = 0x01;
const FUP: u8 = 0x1d;

const SHORT_TNT: u8 = 6;
const LONG_TNT: u8 = 47;
/// TIPs that may wait for TNT bits that come after them.
const MAX_DEFERRED: usize = 8;

/// How packets are written.
#[derive(Clone, Copy, Default)]
pub struct Style {
    pub long_tnt: bool,
    pub defer: bool,
    /// Any form of an IP that yields it, not only the shortest.
    pub any_ip_form: bool,
    pub tsc: bool,
    pub mtc: bool,
    pub cyc: bool,
}

pub struct Emitter {
    pub out: Vec<u8>,
    pub clock: Clock,
    style: Style,
    rng: Rng,
    last_ip: u64,
    tnt: u64,
    count: u8,
    /// Bits at which the TNT packet is full.
    full: u8,
    deferred: Vec<u64>,
}

impl Emitter {
    pub fn new(style: Style, seed: u64, start_tsc: u64, capacity: usize) -> Self {
        Self {
            out: Vec::with_capacity(capacity),
            clock: Clock::new(start_tsc),
            style,
            rng: Rng::new(seed),
            last_ip: 0,
            tnt: 0,
            count: 0,
            full: SHORT_TNT,
            deferred: Vec::new(),
        }
    }

    #[inline]
    pub fn tnt(&mut self, taken: bool) {
        self.tnt = self.tnt << 1 | u64::from(taken);
        self.count += 1;
        if self.count >= self.full {
            self.flush();
        }
    }

    /// An indirect transfer. `deferrable`: the decoder can tell without a packet that no TNT bit is the answer to it.
    pub fn tip(&mut self, ip: u64, deferrable: bool) {
        if self.style.defer && deferrable && self.count > 0 && self.rng.chance(1, 2) {
            self.deferred.push(ip);
            if self.deferred.len() >= MAX_DEFERRED {
                self.flush();
            }
            return;
        }
        self.flush();
        self.time();
        self.ip_packet(TIP, Some(ip));
    }

    /// Writes what was held back; before any packet but a TNT or TIP.
    pub fn flush(&mut self) {
        if self.count > 0 {
            self.time();
            if self.count > SHORT_TNT || (self.style.long_tnt && self.rng.chance(1, 4)) {
                let payload = 1 << self.count | self.tnt;
                self.extended(0xa3, payload, 6);
            } else {
                self.out.push(((1u64 << self.count | self.tnt) << 1) as u8);
            }
            self.tnt = 0;
            self.count = 0;
            if self.style.long_tnt {
                self.full = if self.rng.chance(2, 3) { LONG_TNT } else { self.rng.between(1, 47) as u8 };
            }
        }
        if !self.deferred.is_empty() {
            // A decoder looks for them right behind the TNT: nothing may stand between.
            for ip in std::mem::take(&mut self.deferred) {
                self.ip_packet(TIP, Some(ip));
            }
        }
    }

    /// Drops what was held back, as an overflow does.
    fn drop_pending(&mut self) {
        self.tnt = 0;
        self.count = 0;
        self.deferred.clear();
    }

    /// Drops what was written from `len` on. The next IP has to be a full one.
    pub fn take_back(&mut self, len: usize) {
        self.drop_pending();
        self.out.truncate(len);
    }

    /// MTC and CYC as far as they are due.
    #[inline]
    fn time(&mut self) {
        if self.style.mtc || self.style.cyc {
            self.tell_time();
        }
    }

    fn tell_time(&mut self) {
        if self.style.mtc {
            while let Some(period) = self.clock.next_mtc() {
                self.out.extend_from_slice(&[0x59, period]);
            }
        }
        if self.style.cyc {
            let cycles = self.clock.take_cycles();
            if cycles > 0 {
                self.cyc(cycles);
            }
        }
    }

    fn cyc(&mut self, cycles: u64) {
        let mut rest = cycles >> 5;
        self.out.push(((cycles & 0x1f) << 3) as u8 | if rest > 0 { 0x07 } else { 0x03 });
        while rest > 0 {
            let more = rest >> 7 > 0;
            self.out.push(((rest & 0x7f) << 1) as u8 | u8::from(more));
            rest >>= 7;
        }
    }

    fn ip_packet(&mut self, first: u8, ip: Option<u64>) {
        let Some(ip) = ip else {
            self.out.push(first);
            return;
        };
        let form = if self.style.any_ip_form { self.any_form(ip) } else { self.shortest_form(ip) };
        self.ip_in_form(first, ip, form);
    }

    fn ip_in_form(&mut self, first: u8, ip: u64, form: u8) {
        self.last_ip = ip;
        self.out.push(first | form << 5);
        let len = match form {
            1 => 2,
            2 => 4,
            3 | 4 => 6,
            _ => 8,
        };
        self.out.extend_from_slice(&ip.to_le_bytes()[..len]);
    }

    fn forms(&self, ip: u64) -> [bool; 7] {
        let changed = self.last_ip ^ ip;
        let signed = ((ip << 16) as i64 >> 16) as u64 == ip;
        [false, changed >> 16 == 0, changed >> 32 == 0, signed, changed >> 48 == 0, false, true]
    }

    fn shortest_form(&self, ip: u64) -> u8 {
        self.forms(ip).iter().position(|fits| *fits).unwrap_or(6) as u8
    }

    fn any_form(&mut self, ip: u64) -> u8 {
        if self.rng.chance(2, 3) {
            return self.shortest_form(ip);
        }
        let fitting: Vec<u8> = (0..7u8).filter(|form| self.forms(ip)[usize::from(*form)]).collect();
        self.rng.pick(&fitting).copied().unwrap_or(6)
    }

    fn extended(&mut self, op: u8, payload: u64, len: usize) {
        self.out.extend_from_slice(&[0x02, op]);
        self.out.extend_from_slice(&payload.to_le_bytes()[..len]);
    }

    /// FUP of an event or of the packet before, to which it belongs.
    pub fn fup(&mut self, ip: u64) {
        self.ip_packet(FUP, Some(ip));
    }

    /// FUP with an IP that needs no other: after an overflow.
    pub fn full_fup(&mut self, ip: u64) {
        self.full_ip(FUP, ip);
    }

    pub fn full_pge(&mut self, ip: u64) {
        self.full_ip(PGE, ip);
    }

    fn full_ip(&mut self, first: u8, ip: u64) {
        let form = if self.forms(ip)[3] { 3 } else { 6 };
        self.ip_in_form(first, ip, form);
    }

    /// The second half of an event: where it went.
    pub fn event_tip(&mut self, ip: u64) {
        self.ip_packet(TIP, Some(ip));
    }

    pub fn event_pgd(&mut self) {
        self.ip_packet(PGD, None);
    }

    pub fn pgd(&mut self, ip: Option<u64>) {
        self.flush();
        self.time();
        self.ip_packet(PGD, ip);
    }

    pub fn pge(&mut self, ip: u64) {
        self.time();
        self.ip_packet(PGE, Some(ip));
    }

    /// Before the FUP of an asynchronous event.
    pub fn begin_event(&mut self) {
        self.flush();
        self.time();
    }

    /// PSB+ with all that belongs to it; `ip` where packets are enabled.
    pub fn psb_plus(&mut self, ip: Option<u64>, tsx: u8, mode: u8, extra: bool) {
        self.flush();
        self.time();
        self.out.extend_from_slice(&PSB);
        self.last_ip = 0;
        if self.style.tsc {
            self.tsc();
        }
        if extra {
            self.pip(0x1234_5000);
            self.vmcs(0x7_7700_0000);
        }
        if self.style.tsc {
            let cbr = self.clock.cbr;
            self.cbr(cbr);
        }
        self.mode_tsx(tsx);
        self.mode_exec(mode);
        if let Some(ip) = ip {
            self.fup(ip);
        }
        self.out.extend_from_slice(&[0x02, 0x23]);
    }

    /// TSC, and TMA where MTC packets count on from it.
    pub fn tsc(&mut self) {
        let tsc = self.clock.tsc();
        self.out.extend_from_slice(&(tsc << 8 | 0x19).to_le_bytes());
        if self.style.mtc {
            let (ctc, fast) = (self.clock.ctc() as u16, self.clock.fast());
            let [low, high] = ctc.to_le_bytes();
            let [fast_low, fast_high] = fast.to_le_bytes();
            self.out.extend_from_slice(&[0x02, 0x73, low, high, 0, fast_low, fast_high]);
            self.clock.told_crystal();
        }
    }

    pub fn cbr(&mut self, ratio: u8) {
        self.extended(0x03, u64::from(ratio), 2);
    }

    pub fn mode_exec(&mut self, mode: u8) {
        self.out.extend_from_slice(&[0x99, mode]);
    }

    /// Bit 0 in a transaction, bit 1 aborted.
    pub fn mode_tsx(&mut self, bits: u8) {
        self.out.extend_from_slice(&[0x99, 0x20 | bits]);
    }

    pub fn ptw(&mut self, value: u64, ip: Option<u64>) {
        self.flush();
        self.time();
        self.extended(if ip.is_some() { 0xb2 } else { 0x32 }, value, 8);
        if let Some(ip) = ip {
            self.fup(ip);
        }
    }

    pub fn ovf(&mut self) {
        self.extended(0xf3, 0, 0);
    }

    pub fn trace_stop(&mut self) {
        self.extended(0x83, 0, 0);
    }

    pub fn pip(&mut self, cr3: u64) {
        self.extended(0x43, cr3 >> 5 << 1, 6);
    }

    pub fn vmcs(&mut self, base: u64) {
        self.extended(0xc8, base >> 12, 5);
    }

    pub fn mnt(&mut self, payload: u64) {
        self.out.extend_from_slice(&[0x02, 0xc3, 0x88]);
        self.out.extend_from_slice(&payload.to_le_bytes());
    }

    pub fn pad(&mut self) {
        self.out.push(0);
    }

    /// With `ip` its FUP follows.
    pub fn exstop(&mut self, ip: Option<u64>) {
        self.extended(if ip.is_some() { 0xe2 } else { 0x62 }, 0, 0);
        if let Some(ip) = ip {
            self.fup(ip);
        }
    }

    pub fn mwait(&mut self, hints: u8) {
        self.extended(0xc2, u64::from(hints), 8);
    }

    pub fn pwre(&mut self, state: u8) {
        self.extended(0x22, u64::from(state) << 8, 2);
    }

    pub fn pwrx(&mut self, last: u8, deepest: u8) {
        self.extended(0xa2, u64::from(last) << 4 | u64::from(deepest) | 1 << 8, 5);
    }

    /// A block of general registers: `items` are (id, value).
    pub fn block(&mut self, items: &[(u8, u64)], ip: Option<u64>) {
        self.extended(0x63, 0x04, 1);
        for &(id, value) in items {
            self.out.push(id << 3 | 0x04);
            self.out.extend_from_slice(&value.to_le_bytes());
        }
        self.extended(if ip.is_some() { 0xb3 } else { 0x33 }, 0, 0);
        if let Some(ip) = ip {
            self.fup(ip);
        }
    }

    /// Control-flow event; with `ip` a FUP of its own follows.
    pub fn cfe(&mut self, kind: u8, vector: u8, ip: Option<u64>) {
        let first = kind | u8::from(ip.is_some()) << 7;
        self.out.extend_from_slice(&[0x02, 0x13, first, vector]);
        if let Some(ip) = ip {
            self.fup(ip);
        }
    }

    pub fn evd(&mut self, kind: u8, payload: u64) {
        self.out.extend_from_slice(&[0x02, 0x53, kind]);
        self.out.extend_from_slice(&payload.to_le_bytes());
    }
}
