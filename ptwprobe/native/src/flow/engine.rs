//! The packets of a piece, one after the other.

mod effects;

use std::sync::Arc;

use super::context::{Schedule, Spaces};
use super::pieces::OwnedPiece;
use super::sink::{Batch, BranchKind, Finding, Mark, What};
use super::suspended::Suspended;
use super::walk::{Led, Outcomes, State, Walk};
use crate::pt::{
    behind_bad, find_psb, BadReason, Block, Clock, Decoder, Errata, IpField, Kind, LastIp, Packet, TimeConfig,
};

/// How a trace was recorded.
#[derive(Clone, Copy, Debug, Default)]
pub struct Config {
    /// Returns may be one taken branch of a TNT packet.
    pub compressed_returns: bool,
    pub time: TimeConfig,
    pub errata: Errata,
}

/// Types of CFE that are no instruction's doing, whose FUP is that of the transfer itself: INTR, SMI, INIT,
/// VMEXIT_INTR, SHUTDOWN, UINTR (Intel SDM, "Event Trace").
const ASYNCHRONOUS: [u8; 6] = [0x1, 0x3, 0x6, 0x9, 0xa, 0xc];

/// Bytes of a packet with an address, by its field `IPBytes`; 0: there is none such.
const ADDRESS_LEN: [u8; 8] = [1, 3, 5, 7, 7, 0, 9, 0];

/// Short TNT packets that are taken at once: 60 outcomes at most.
const MAX_TNT: usize = 10;

/// Whether an address is in the kernel's half.
fn is_kernel(ip: u64) -> bool {
    ip >> 63 == 1
}

/// What the next FUP belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiting {
    Nothing,
    Word { value: u64, offset: u64 },
    Event { packet: Packet },
    Overflow,
}

/// How far [`Engine::run`] came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The batch is full.
    More,
    /// [`Engine::resolve`] has to tell what was suspended before the piece.
    Waits,
    /// To the end of the piece.
    Done,
}

/// Walks pieces, one after the other. What is known of the code stays from one to the next.
pub struct Engine<S> {
    config: Config,
    walk: Walk<S>,
    schedule: Arc<Schedule>,
    clock: Clock,
    /// When the context changes next.
    next_context: u64,
    piece: OwnedPiece,
    pos: usize,
    /// `pos`, while the walk waits.
    halted: Option<usize>,
    /// Behind the packet that told the address, after a PSB or an overflow; 0: none.
    synced_at: usize,
    /// That the kernel's code is not known.
    told_kernel: bool,
    block: Block,
    last_ip: LastIp,
    waiting: Waiting,
    /// Where control is taken from, asynchronously, and why.
    from: Option<(u64, BranchKind)>,
    in_psb: bool,
    psb_ip: Option<u64>,
    /// TIPs whose branches came before the TNT packets in front of them: those taken, and where the next is looked for.
    ahead: usize,
    ahead_pos: usize,
    ended: bool,
}

impl<S: Spaces> Engine<S> {
    pub fn new(config: Config, spaces: S) -> Self {
        Self {
            config,
            walk: Walk::new(spaces, config.compressed_returns, config.errata),
            schedule: Arc::default(),
            clock: Clock::new(config.time, 0),
            next_context: 0,
            piece: OwnedPiece::default(),
            pos: 0,
            halted: None,
            synced_at: 0,
            told_kernel: false,
            block: Block::None,
            last_ip: LastIp::default(),
            waiting: Waiting::Nothing,
            from: None,
            in_psb: false,
            psb_ip: None,
            ahead: 0,
            ahead_pos: 0,
            ended: true,
        }
    }

    /// Begins `piece`. `schedule`: of the stream that it is of.
    pub fn start(&mut self, piece: OwnedPiece, schedule: &Arc<Schedule>) {
        self.walk.reset();
        self.schedule = Arc::clone(schedule);
        self.clock = Clock::new(self.config.time, piece.tsc);
        self.pos = 0;
        self.halted = None;
        self.synced_at = 0;
        self.told_kernel = false;
        self.block = Block::None;
        self.last_ip = LastIp::default();
        self.waiting = Waiting::Nothing;
        self.from = None;
        self.in_psb = false;
        self.psb_ip = None;
        self.ahead = 0;
        self.ahead_pos = 0;
        self.ended = false;
        self.set_context(piece.tsc);
        self.piece = piece;
    }

    /// The piece that is walked.
    #[must_use]
    pub fn piece(&self) -> &OwnedPiece {
        &self.piece
    }

    /// What is suspended, once the piece is done; whether that is all, or only what this piece knows of.
    pub fn suspended(&mut self) -> (Suspended, bool) {
        self.walk.suspended()
    }

    /// `earlier`: what was suspended before the piece. Only when the engine waits for it, so that what comes out does
    /// not depend on when it is known.
    pub fn resolve(&mut self, earlier: &Suspended) {
        self.walk.resolve(earlier);
    }

    /// Walks on until `out` is full, or to the end of the piece.
    pub fn run(&mut self, out: &mut Batch) -> Progress {
        if let Some(pos) = self.halted.filter(|_| !self.walk.waits()) {
            self.pos = pos;
            self.halted = None;
        }
        if self.pos == 0 {
            out.skipped(&self.piece.skipped);
        }
        out.time(self.clock.now());
        while !out.is_full() {
            self.walk.bound_memory();
            let Some(&first) = self.piece.bytes.get(self.pos) else {
                if self.halted.is_some() {
                    return Progress::Waits;
                }
                self.finish(out);
                return Progress::Done;
            };
            // Most of a trace are short TNT packets, and packets with an address.
            if first & 1 == 0 && first > 2 && self.block == Block::None {
                if self.waiting != Waiting::Nothing {
                    self.drop_waiting(out);
                }
                let mut outcomes = self.outcomes();
                if self.walk.state() == State::At {
                    self.from = None;
                    let led = self.walk.branches(&mut outcomes, out);
                    if led != Led::On {
                        self.led(led, outcomes, out);
                    }
                } else {
                    self.tnt(outcomes, out);
                }
            } else if !self.address(first, out) {
                self.packet(out);
            }
        }
        Progress::More
    }

    /// The program comes back to `ip`, where an interrupt may have left the walk.
    fn come_back(&mut self, ip: u64) {
        self.walk.come_back(ip);
        self.halt();
    }

    /// If the walk has to wait.
    fn halt(&mut self) {
        if self.walk.waits() {
            // No packet is there, so that the loop over them need not ask.
            self.halted = Some(std::mem::replace(&mut self.pos, usize::MAX));
        }
    }

    /// Takes the short TNT packets at `pos`, as many as come in a row and fit: how a row ends is hard to foresee.
    #[inline(always)]
    fn outcomes(&mut self) -> Outcomes {
        let (mut bits, mut count) = (0, 0);
        for &byte in self.piece.bytes.get(self.pos..).unwrap_or_default().iter().take(MAX_TNT) {
            if byte & 1 != 0 || byte <= 2 {
                break;
            }
            let stop = byte.leading_zeros();
            bits |= u64::from(byte) << (57 + stop) >> count;
            count += 6 - stop;
            self.pos += 1;
        }
        Outcomes { bits, count }
    }

    /// Takes the packet at `pos` if it is one with an address and not near the end.
    #[inline(always)]
    fn address(&mut self, first: u8, out: &mut Batch) -> bool {
        let op = first & 0x1f;
        if !matches!(op, 0x0d | 0x11 | 0x01 | 0x1d) || self.block != Block::None {
            return false;
        }
        let Some(payload) = self.piece.bytes.get(self.pos + 1..).and_then(|rest| rest.first_chunk()) else {
            return false;
        };
        let word = u64::from_le_bytes(*payload);
        let form = first >> 5;
        let len = ADDRESS_LEN[usize::from(form)];
        if len == 0 {
            return false;
        }
        let field = IpField { bytes: form, value: word };
        let offset = self.pos as u64;
        self.pos += usize::from(len);
        if op == 0x1d {
            let ip = self.last_ip.update(field);
            self.fup(ip, offset, out);
            return true;
        }
        if self.waiting != Waiting::Nothing {
            self.drop_waiting(out);
        }
        match op {
            0x0d => {
                if self.ahead == 0 && self.from.is_none() && self.walk.state() == State::At && form != 0 {
                    let mut last_ip = self.last_ip;
                    if let Some(ip) = last_ip.update(field) {
                        if self.walk.plain_target(ip, out) {
                            self.last_ip = last_ip;
                            return true;
                        }
                    }
                }
                self.tip(field, offset, out);
            }
            0x11 => {
                let ip = self.last_ip.update(field);
                self.start_trace(ip, offset, out);
            }
            _ => {
                let ip = self.last_ip.update(field);
                self.end_trace(ip, offset, out);
            }
        }
        true
    }

    fn packet(&mut self, out: &mut Batch) {
        let rest = self.piece.bytes.get(self.pos..).unwrap_or_default();
        if let [0x99, mode @ 0..0x20, ..] = *rest {
            self.pos += 2;
            return self.set_mode(mode);
        }
        let mut decoder = Decoder::resume(rest, self.pos as u64, self.block).with(self.config.errata);
        match decoder.next_packet() {
            Some(Ok(packet)) => {
                self.pos += usize::from(packet.len);
                self.block = decoder.block();
                self.take(packet, out);
            }
            Some(Err(bad)) => {
                let finding = match bad.reason {
                    BadReason::Cut => Finding::CutPacket,
                    BadReason::Unknown => Finding::BadPacket,
                };
                self.drop_waiting(out);
                self.find(finding, bad.offset, out);
                self.walk.lose();
                let bytes = &self.piece.bytes;
                self.pos = find_psb(bytes, behind_bad(bytes, self.pos)).unwrap_or(bytes.len());
                self.block = Block::None;
            }
            None => self.pos = self.piece.bytes.len(),
        }
    }

    fn mark(&self, what: What, offset: u64, out: &mut Batch) {
        let (at, offset) = (out.len(), self.piece.file_offset(offset));
        out.marks.push(Mark { at, tsc: self.clock.now(), offset, what });
    }

    fn find(&mut self, finding: Finding, offset: u64, out: &mut Batch) {
        let finding = match finding {
            Finding::NoCode { ip } if is_kernel(ip) => {
                if std::mem::replace(&mut self.told_kernel, true) {
                    return;
                }
                Finding::Kernel { ip }
            }
            other => other,
        };
        self.mark(What::Finding(finding), offset, out);
    }

    /// The offset in the piece behind the packet that was read last.
    fn here(&self) -> u64 {
        self.pos as u64
    }

    fn take(&mut self, packet: Packet, out: &mut Batch) {
        match packet.kind {
            Kind::Pad | Kind::Mnt(_) => return,
            Kind::Tsc(low) => {
                self.clock.tsc(low);
                return self.timed(out);
            }
            Kind::Tma { ctc, fast } => {
                self.clock.tma(ctc, fast);
                return self.timed(out);
            }
            Kind::Mtc(ctc) => {
                self.clock.mtc(ctc);
                return self.timed(out);
            }
            Kind::Cyc(cycles) => {
                self.clock.cyc(cycles);
                return self.timed(out);
            }
            Kind::Cbr(ratio) => {
                self.clock.cbr(ratio);
                return;
            }
            Kind::Fup(field) => {
                let ip = self.last_ip.update(field);
                return self.fup(ip, packet.offset, out);
            }
            _ => {}
        }
        // A FUP would have come before any of these.
        if self.waiting != Waiting::Nothing {
            self.drop_waiting(out);
        }
        match packet.kind {
            Kind::Tnt { bits, count, .. } => {
                let count = u32::from(count);
                self.tnt(Outcomes { bits: bits << (64 - count), count }, out);
            }
            Kind::Tip(field) => self.tip(field, packet.offset, out),
            Kind::TipPge(field) => {
                let ip = self.last_ip.update(field);
                self.start_trace(ip, packet.offset, out);
            }
            Kind::TipPgd(field) => {
                let ip = self.last_ip.update(field);
                self.end_trace(ip, packet.offset, out);
            }
            Kind::Ptw { value, ip: true, .. } => self.waiting = Waiting::Word { value, offset: packet.offset },
            Kind::Ptw { value, ip: false, .. } => self.mark(What::Word { value, ip: None }, packet.offset, out),
            Kind::ModeExec(mode) => self.set_mode(mode),
            Kind::ModeTsx(bits) => {
                // Inside a PSB+ it only tells the state.
                if !self.in_psb {
                    self.waiting = Waiting::Event { packet };
                    if bits & 2 == 0 && self.walk.state() != State::At {
                        self.waiting = Waiting::Nothing;
                    }
                }
            }
            Kind::ExStop { ip: true } | Kind::Bep { ip: true } | Kind::Cfe { ip: true, .. } => {
                self.waiting = Waiting::Event { packet };
            }
            Kind::Psb => self.begin_psb(),
            Kind::PsbEnd => self.end_psb(packet.offset, out),
            Kind::Ovf => self.overflow(packet.offset, out),
            Kind::Pip { .. } | Kind::Vmcs(_) if self.in_psb => {}
            _ => self.mark(What::Event { packet: packet.kind, ip: None }, packet.offset, out),
        }
    }

    /// The low two bits of a MODE.Exec are CS.L and CS.D.
    fn set_mode(&mut self, mode: u8) {
        self.walk.set_bits(match mode & 3 {
            0 => 16,
            2 => 32,
            _ => 64,
        });
    }

    fn timed(&mut self, out: &mut Batch) {
        let now = self.clock.now();
        out.time(now);
        if now >= self.next_context {
            self.set_context(now);
        }
    }

    fn set_context(&mut self, tsc: u64) {
        let (context, next) = self.schedule.during(tsc);
        self.next_context = next;
        self.walk.set_context(context.space, context.tid);
    }
}
