//! The walk from block to block: what the steps that were made ready cannot do.

use super::{Led, Outcomes, Walk};
use crate::flow::block::{branch_kind, Term, NONE};
use crate::flow::context::Spaces;
use crate::flow::sink::{Batch, BranchKind, Finding};

/// Direct jumps in a row, without a packet: more lead round in circles, or the code is made to waste time.
const MAX_DIRECT: u32 = 1 << 12;

impl<S: Spaces> Walk<S> {
    /// As `branches`, from block to block, to the end of the outcomes or to what ends them. Up to `sure` of `out` is.
    #[inline(never)]
    pub(super) fn branches_by_block(&mut self, outcomes: &mut Outcomes, mut sure: usize, out: &mut Batch) -> Led {
        let mut direct = 0;
        let Outcomes { mut bits, mut count } = *outcomes;
        let led = loop {
            if count == 0 {
                return Led::On;
            }
            let block = *self.cache.block(self.cur);
            match block.term {
                Term::Cond => {
                    let taken = bits >> 63 == 1;
                    if taken {
                        out.push(block.branch, block.target, BranchKind::Cond);
                    }
                    let next = if taken { block.taken } else { block.fall };
                    self.cur = if next == NONE { self.link(taken) } else { next };
                    bits <<= 1;
                    count -= 1;
                    sure = out.branches.len();
                    direct = 0;
                    continue;
                }
                Term::Jump => {
                    out.push(block.branch, block.target, BranchKind::Jump);
                    self.cur = if block.taken == NONE { self.link(true) } else { block.taken };
                }
                Term::Call => self.call(out),
                Term::Split => self.cur = self.cache.fall(self.cur, self.spaces.space(self.key.0)),
                Term::Return if self.compressed_returns && bits >> 63 == 1 && !self.returns.is_empty() => {
                    bits <<= 1;
                    count -= 1;
                    if let Some(next) = self.returns.pop() {
                        out.push(block.branch, self.cache.start(next), BranchKind::Return);
                        self.cur = next;
                    }
                    sure = out.branches.len();
                    direct = 0;
                    continue;
                }
                Term::Return | Term::IndirectJump | Term::IndirectCall => {
                    break Led::ToIndirect;
                }
                // Up to here there was no choice.
                Term::Unknown => break Led::Nowhere(Finding::NoCode { ip: block.branch }),
                Term::Syscall | Term::FarReturn | Term::FarOther | Term::Stop | Term::Invalid => {
                    out.branches.truncate(sure);
                    break Led::Nowhere(Finding::Mismatch { ip: block.branch });
                }
            }
            direct += 1;
            if direct > MAX_DIRECT {
                out.branches.truncate(sure);
                break Led::Nowhere(Finding::Endless { ip: block.branch });
            }
        };
        *outcomes = Outcomes { bits, count };
        led
    }

    /// Follows the indirect branch that outcomes led to; its target is told behind them.
    pub fn deferred(&mut self, ip: u64, out: &mut Batch) {
        self.indirect(ip, out);
    }

    /// The address of the instruction that ends the present block.
    pub fn branch(&self) -> u64 {
        self.cache.block(self.cur).branch
    }

    /// The block that comes after the present one, for the first time.
    #[cold]
    fn link(&mut self, taken: bool) -> u32 {
        let code = self.spaces.space(self.key.0);
        if taken {
            self.cache.taken(self.cur, code)
        } else {
            self.cache.fall(self.cur, code)
        }
    }

    /// The call that ends the present block returns behind it.
    fn push_return(&mut self) {
        self.returns.push(self.cache.fall(self.cur, self.spaces.space(self.key.0)));
    }

    /// Follows the direct call that ends the present block.
    fn call(&mut self, out: &mut Batch) {
        let block = *self.cache.block(self.cur);
        out.push(block.branch, block.target, BranchKind::Call);
        // A call of the next instruction is not kept by the CPU.
        if block.target != block.after() {
            self.push_return();
        }
        self.cur = if block.taken == NONE { self.link(true) } else { block.taken };
    }

    /// Follows the indirect branch or the return that ends the present block to `ip`.
    fn indirect(&mut self, ip: u64, out: &mut Batch) {
        let block = *self.cache.block(self.cur);
        match block.term {
            Term::IndirectCall => self.push_return(),
            Term::Return => {
                self.returns.pop();
            }
            _ => {}
        }
        out.push(block.branch, ip, branch_kind(block.term));
        self.arrive(ip);
    }

    /// A TIP: to `ip`, or to where the trace does not say.
    pub fn target(&mut self, ip: Option<u64>, out: &mut Batch) -> Result<(), Finding> {
        let sure = out.branches.len();
        self.pos = None;
        let wrong = match self.run_direct(out) {
            Err(finding) => finding,
            Ok(()) => {
                let block = *self.cache.block(self.cur);
                match block.term {
                    Term::IndirectJump | Term::IndirectCall | Term::Return => match ip {
                        Some(ip) => {
                            self.indirect(ip, out);
                            return Ok(());
                        }
                        None => {
                            out.push(block.branch, 0, branch_kind(block.term));
                            self.lose();
                            return Ok(());
                        }
                    },
                    Term::Syscall | Term::FarReturn | Term::FarOther => {
                        out.push(block.branch, ip.unwrap_or(0), branch_kind(block.term));
                        match ip {
                            Some(ip) => self.come_back(ip),
                            None => self.lose(),
                        }
                        return Ok(());
                    }
                    Term::Unknown => Finding::NoCode { ip: block.branch },
                    _ => Finding::Mismatch { ip: block.branch },
                }
            }
        };
        if !matches!(wrong, Finding::NoCode { .. }) {
            out.branches.truncate(sure);
        }
        match wrong {
            Finding::NoCode { ip } if ip >> 63 == 1 => self.leave_known(),
            _ => self.lose(),
        }
        if let Some(ip) = ip {
            self.enter(ip);
        }
        Err(wrong)
    }

    /// Follows what ends the present block, if no packet has a say in that; whether it did.
    fn follow_direct(&mut self, out: &mut Batch) -> bool {
        let block = self.cache.block(self.cur);
        match block.term {
            Term::Jump => {
                out.push(block.branch, block.target, BranchKind::Jump);
                self.cur = self.cache.taken(self.cur, self.spaces.space(self.key.0));
            }
            Term::Call => self.call(out),
            Term::Split => self.cur = self.cache.fall(self.cur, self.spaces.space(self.key.0)),
            _ => return false,
        }
        true
    }

    /// Follows direct jumps and calls up to what a packet has a say in.
    fn run_direct(&mut self, out: &mut Batch) -> Result<(), Finding> {
        for _ in 0..MAX_DIRECT {
            if !self.follow_direct(out) {
                return Ok(());
            }
        }
        Err(Finding::Endless { ip: self.cache.block(self.cur).branch })
    }

    /// Goes on to `ip`, where direct jumps lead there; else nothing moves. `executed`: the instruction there has run.
    pub fn go_to(&mut self, ip: u64, executed: bool, out: &mut Batch) -> Result<(), Finding> {
        let Some(from) = self.position() else { return Ok(()) };
        let (mut at, mut least, mut blocks) = (self.cur, from, 0);
        let next = loop {
            let start = self.cache.start(at);
            let ahead = ip.wrapping_sub(start) >= least.wrapping_sub(start);
            if let Some(next) = self.cache.next_of(at, ip).filter(|_| ahead) {
                break next;
            }
            match self.cache.direct(at, self.spaces.space(self.key.0)).filter(|_| blocks < MAX_DIRECT) {
                Some((next, _)) => at = next,
                None => return Err(Finding::Unreachable { from, ip }),
            }
            blocks += 1;
            least = self.cache.start(at);
        };
        for _ in 0..blocks {
            self.follow_direct(out);
        }
        self.pos = Some(if executed { next } else { ip });
        Ok(())
    }

    /// `ip` is in code that nothing is known of: goes on to the site of the stub there, where a session tells it.
    pub fn go_to_site(&mut self, ip: u64, out: &mut Batch) {
        if let Some(stub) = self.spaces.space(self.key.0).stub(ip) {
            // Where nothing leads there, nothing moves, and nothing is lost.
            let _ = self.go_to(stub.site, false, out);
        }
    }

    /// Tracing ends with a branch of the program, a TIP.PGD without a FUP: to `ip` where it says so.
    pub fn leave(&mut self, ip: Option<u64>, out: &mut Batch) {
        let sure = out.branches.len();
        self.pos = None;
        for _ in 0..MAX_DIRECT {
            let block = *self.cache.block(self.cur);
            let kind = branch_kind(block.term);
            match block.term {
                // It leaves the range that is traced.
                Term::Jump | Term::Call | Term::Cond if ip == Some(block.target) => {
                    out.push(block.branch, block.target, kind);
                    return self.stop(None);
                }
                // It may be this one that leaves it, or a later one, or something else.
                Term::Jump | Term::Call if ip.is_none() && self.errata.no_target => break,
                Term::Jump => {
                    out.push(block.branch, block.target, kind);
                    self.cur = self.cache.taken(self.cur, self.spaces.space(self.key.0));
                }
                Term::Call => self.call(out),
                Term::Split => self.cur = self.cache.fall(self.cur, self.spaces.space(self.key.0)),
                Term::Return | Term::IndirectJump | Term::IndirectCall => {
                    out.push(block.branch, ip.unwrap_or(0), kind);
                    return self.stop(None);
                }
                Term::Syscall | Term::FarReturn | Term::FarOther => {
                    out.push(block.branch, ip.unwrap_or(0), kind);
                    return self.stop(None);
                }
                _ => break,
            }
        }
        out.branches.truncate(sure);
        out.push(0, ip.unwrap_or(0), BranchKind::TraceEnd);
        self.stop(None);
    }

    /// An interrupt, a fault, the end of a transaction: from `from` to `to`, where it is traced.
    pub fn interrupt(&mut self, from: u64, to: Option<u64>, kind: BranchKind, out: &mut Batch) {
        out.push(from, to.unwrap_or(0), kind);
        if let Some(at) = self.position() {
            if !self.knows(from) {
                self.suspend(from, at);
            }
        }
        match to {
            Some(to) => self.enter(to),
            None => self.lose(),
        }
    }
}
