//! What each packet means for the walk.

use super::{is_kernel, Engine, Waiting, ASYNCHRONOUS};
use crate::flow::context::Spaces;
use crate::flow::sink::{Batch, BranchKind, Finding, What};
use crate::flow::walk::{Led, Outcomes, State};
use crate::pt::{Decoder, IpField, Kind, LastIp};

impl<S: Spaces> Engine<S> {
    pub(super) fn tnt(&mut self, mut outcomes: Outcomes, out: &mut Batch) {
        self.from = None;
        match self.walk.state() {
            State::At => {
                let led = self.walk.branches(&mut outcomes, out);
                self.led(led, outcomes, out);
            }
            State::Off => self.fail(Finding::TracingOff, out),
            State::Lost => {}
        }
    }

    /// Goes on with what `outcomes` have left.
    pub(super) fn led(&mut self, mut led: Led, mut outcomes: Outcomes, out: &mut Batch) {
        loop {
            match led {
                Led::On => return,
                Led::ToIndirect => match self.target_ahead() {
                    Some(ip) => self.walk.deferred(ip, out),
                    None => {
                        let ip = self.walk.branch();
                        return self.fail(Finding::Mismatch { ip }, out);
                    }
                },
                Led::Nowhere(finding) => return self.fail(finding, out),
            }
            led = self.walk.branches(&mut outcomes, out);
        }
    }

    fn fail(&mut self, finding: Finding, out: &mut Batch) {
        match finding {
            Finding::NoCode { ip } if is_kernel(ip) => self.walk.leave_known(),
            _ => self.walk.lose(),
        }
        self.find(finding, self.here(), out);
    }

    pub(super) fn tip(&mut self, field: IpField, offset: u64, out: &mut Batch) {
        if self.ahead > 0 {
            // It moved the walk in the TNT packet before.
            self.ahead -= 1;
            return;
        }
        let in_kernel = is_kernel(self.last_ip.0);
        let ip = self.last_ip.update(field);
        if let Some((from, kind)) = self.from.take() {
            return self.walk.interrupt(from, ip, kind, out);
        }
        match (self.walk.state(), ip) {
            (state, Some(ip)) if in_kernel && !is_kernel(ip) && (state == State::Lost || self.walk.is_nowhere()) => {
                // Which `sysret` or `iret` it was only the kernel's code would tell.
                out.push(0, ip, BranchKind::FarReturn);
                self.come_back(ip);
            }
            (State::At, ip) => {
                if let Err(finding) = self.walk.target(ip, out) {
                    self.find(finding, offset, out);
                }
                self.halt();
            }
            (State::Lost, Some(ip)) if is_kernel(ip) && !self.walk.knows(ip) => {}
            (State::Lost, Some(ip)) => self.walk.enter(ip),
            (State::Lost, None) => {}
            (State::Off, ip) => {
                self.find(Finding::TracingOff, offset, out);
                if let Some(ip) = ip {
                    self.walk.enter(ip);
                }
            }
        }
    }

    pub(super) fn start_trace(&mut self, ip: Option<u64>, offset: u64, out: &mut Batch) {
        self.from = None;
        // That a PSB or an overflow told an address, tracing being off (BDM70, APL12), says nothing.
        if self.walk.state() == State::At && !self.only_time_since_sync(offset) {
            self.find(Finding::TracingOn, offset, out);
        }
        self.walk.clear_returns();
        match ip {
            Some(ip) => {
                out.push(0, ip, BranchKind::TraceStart);
                self.come_back(ip);
            }
            None => self.walk.lose(),
        }
    }

    /// Whether nothing that moves control came between the last sync and the packet at `offset`.
    fn only_time_since_sync(&self, offset: u64) -> bool {
        let between = self.piece.bytes.get(self.synced_at..offset as usize).filter(|_| self.synced_at > 0);
        between.is_some_and(|bytes| {
            Decoder::new(bytes, 0).all(|packet| {
                packet.is_ok_and(|packet| {
                    let kind = packet.kind;
                    matches!(kind, Kind::Pad | Kind::Tsc(_) | Kind::Tma { .. } | Kind::Mtc(_) | Kind::Cyc(_))
                        || matches!(kind, Kind::Cbr(_) | Kind::ModeExec(_) | Kind::Mnt(_))
                })
            })
        })
    }

    pub(super) fn end_trace(&mut self, ip: Option<u64>, offset: u64, out: &mut Batch) {
        if let Some((from, kind)) = self.from.take() {
            out.push(from, ip.unwrap_or(0), kind);
            return self.walk.stop(Some(from));
        }
        match self.walk.state() {
            State::At if !self.is_untold(ip) && self.walk.plain_leave(ip, out) => {}
            State::At => self.walk.leave(ip, out),
            State::Lost => {
                out.push(0, ip.unwrap_or(0), BranchKind::TraceEnd);
                self.walk.stop(None);
            }
            State::Off => self.find(Finding::TracingOff, offset, out),
        }
    }

    /// Whether a direct jump may have left the filter, to where the packet should have told.
    fn is_untold(&self, ip: Option<u64>) -> bool {
        ip.is_none() && self.config.errata.no_target
    }

    pub(super) fn fup(&mut self, ip: Option<u64>, offset: u64, out: &mut Batch) {
        if self.in_psb {
            self.psb_ip = ip;
            return;
        }
        match std::mem::replace(&mut self.waiting, Waiting::Nothing) {
            Waiting::Word { value, offset } => {
                if let Some(ip) = ip {
                    self.go_to(ip, true, offset, out);
                }
                self.mark(What::Word { value, ip }, offset, out);
            }
            Waiting::Event { packet } => {
                let kind = match packet.kind {
                    Kind::ModeTsx(bits) if bits & 2 != 0 => Some(BranchKind::TxAbort),
                    Kind::Cfe { kind, .. } if ASYNCHRONOUS.contains(&kind) => Some(BranchKind::Interrupt),
                    _ => None,
                };
                self.from = ip.zip(kind);
                if let Some(ip) = ip {
                    self.go_to(ip, false, packet.offset, out);
                }
                self.mark(What::Event { packet: packet.kind, ip }, packet.offset, out);
            }
            Waiting::Overflow => {
                if let Some(ip) = ip {
                    self.walk.enter(ip);
                    self.synced_at = self.pos;
                }
            }
            Waiting::Nothing => {
                let Some(ip) = ip else { return };
                self.from = Some((ip, BranchKind::Interrupt));
                self.go_to(ip, false, offset, out);
            }
        }
    }

    /// A FUP tells that the walk is at `ip`. One into code that nothing is known of moves nothing.
    fn go_to(&mut self, ip: u64, executed: bool, offset: u64, out: &mut Batch) {
        match self.walk.state() {
            State::At if self.walk.knows(ip) => {
                if let Err(finding) = self.walk.go_to(ip, executed, out) {
                    self.find(finding, offset, out);
                }
            }
            State::At => self.walk.go_to_site(ip, out),
            State::Lost if self.walk.knows(ip) => {
                self.walk.enter(ip);
                // Behind the instruction, where it has run.
                let _ = self.walk.go_to(ip, executed, out);
            }
            _ => {}
        }
    }

    /// The FUP of a packet did not come.
    pub(super) fn drop_waiting(&mut self, out: &mut Batch) {
        match std::mem::replace(&mut self.waiting, Waiting::Nothing) {
            Waiting::Word { value, offset } => self.mark(What::Word { value, ip: None }, offset, out),
            Waiting::Event { packet } => {
                self.mark(What::Event { packet: packet.kind, ip: None }, packet.offset, out);
            }
            Waiting::Overflow | Waiting::Nothing => {}
        }
    }

    pub(super) fn begin_psb(&mut self) {
        self.last_ip = LastIp::default();
        self.clock.psb();
        self.from = None;
        self.in_psb = true;
        self.psb_ip = None;
        self.ahead = 0;
    }

    pub(super) fn end_psb(&mut self, offset: u64, out: &mut Batch) {
        self.in_psb = false;
        self.walk.clear_returns();
        match (self.psb_ip, self.walk.state()) {
            (Some(ip), State::At) => {
                // In a stub that cannot be read, the walk is where it was.
                if self.walk.knows(ip) {
                    if let Err(finding) = self.walk.go_to(ip, false, out) {
                        self.find(finding, offset, out);
                    }
                    self.walk.clear_returns();
                    self.walk.enter(ip);
                }
            }
            (Some(ip), _) => {
                self.walk.enter(ip);
                self.synced_at = self.pos;
            }
            (None, State::At | State::Lost) => self.walk.stop(None),
            (None, State::Off) => {}
        }
    }

    pub(super) fn overflow(&mut self, offset: u64, out: &mut Batch) {
        self.mark(What::Overflow, offset, out);
        self.walk.lose();
        self.clock.ovf();
        self.from = None;
        self.ahead = 0;
        self.in_psb = false;
        self.waiting = Waiting::Overflow;
    }

    pub(super) fn finish(&mut self, out: &mut Batch) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        self.drop_waiting(out);
        if let (Some(ip), State::At) = (self.piece.next_ip, self.walk.state()) {
            if self.walk.knows(ip) {
                if let Err(finding) = self.walk.go_to(ip, false, out) {
                    self.find(finding, self.here(), out);
                }
            }
        }
    }

    /// The address of the next TIP, if one comes before anything else that moves control: it belongs to a branch in
    /// front of TNT packets that came first.
    fn target_ahead(&mut self) -> Option<u64> {
        let start = if self.ahead == 0 { self.pos } else { self.ahead_pos };
        let mut decoder = Decoder::new(self.piece.bytes.get(start..)?, 0);
        loop {
            match decoder.next_packet()?.ok()?.kind {
                Kind::Tip(field) => {
                    self.ahead_pos = start + decoder.position();
                    self.ahead += 1;
                    return self.last_ip.update(field);
                }
                Kind::Tnt { .. } | Kind::Pad | Kind::Cyc(_) | Kind::Mtc(_) | Kind::Tsc(_) | Kind::Tma { .. } => {}
                Kind::Cbr(_) | Kind::Mnt(_) => {}
                _ => return None,
            }
        }
    }
}
