//! The rarer ends of a block: system calls, faults, far transfers, transactions, the edge of an address range.

use crate::blocks::{Block, End};
use crate::cpu::Cpu;
use crate::truth::Branch;

/// MODE.TSX bits.
const IN_TX: u8 = 1;
const ABORT: u8 = 2;

impl Cpu<'_> {
    pub fn rare(&mut self, block: &Block) {
        if self.transaction.is_some() {
            // None of these can happen inside a transaction.
            self.abort(block.last);
            return;
        }
        match block.end {
            End::Syscall => self.syscall(block),
            End::Fault => {
                self.interrupt(block.last);
                self.restart();
            }
            End::FarReturn => {
                let to = self.target(block.last);
                self.far(block, to, Branch::FarReturn);
            }
            // The SDM names INT n and INT 3 among what sends a FUP.
            _ if self.is_software_interrupt(block) => {
                self.interrupt(block.last);
                self.restart();
            }
            _ => {
                let to = self.target(block.last);
                self.far(block, to, Branch::FarOther);
            }
        }
    }

    fn is_software_interrupt(&self, block: &Block) -> bool {
        matches!(self.world.image.at(block.last).first(), Some(0xcc | 0xcd | 0xf1))
    }

    fn far(&mut self, block: &Block, to: u64, kind: Branch) {
        self.truth.branch(block.last, to, kind);
        self.em.tip(to, false);
        self.retc.forget();
        self.go(to);
    }

    /// Only user mode is traced: packets end with the instruction and begin with the next.
    fn syscall(&mut self, block: &Block) {
        self.em.pgd(None);
        self.truth.branch(block.last, 0, Branch::Syscall);
        self.retc.clear();
        self.away();
        let returns_from_signal = self.world.sigreturn.is_some_and(|at| block.start == at || block.last == at + 7);
        if returns_from_signal {
            if let Some(ip) = self.frames.pop() {
                self.resume_event(ip);
                self.go(ip);
                return;
            }
        }
        // Such as an exit that the kernel is asked for again and again.
        if std::mem::replace(&mut self.last_syscall, block.last) == block.last && self.rng.chance(1, 2) {
            self.restart();
            return;
        }
        let signals = self.world.options.features.signals;
        if signals && self.rng.chance(1, 8) && self.enter_handler(block.next) {
            return;
        }
        self.resume_event(block.next);
        self.go(block.next);
    }

    /// A branch to `to`, outside of what is traced, was taken; `back` is where a call returns to.
    pub fn leave(&mut self, to: u64, back: Option<u64>) {
        self.em.pgd(Some(to));
        self.retc.clear();
        self.transaction = None;
        if self.world.options.features.stop && self.rng.chance(1, 8) {
            self.em.trace_stop();
        }
        self.away();
        let inside = |addr: &u64| self.world.range.is_some_and(|(low, high)| low <= *addr && *addr < high);
        let next = match back.filter(inside) {
            Some(addr) if self.rng.chance(3, 4) => addr,
            _ => self.some_entry(),
        };
        self.resume_event(next);
        self.go(next);
    }

    pub fn tsx(&mut self, block: &Block) {
        match (block.end, self.transaction) {
            (End::Xbegin, None) => {
                self.mode(block.last, IN_TX);
                self.transaction = Some(block.target);
            }
            (End::Xend, Some(_)) => {
                self.mode(block.last, 0);
                self.transaction = None;
            }
            (End::Xabort, Some(_)) => {
                self.abort(block.last);
                return;
            }
            // XEND outside of a transaction is a fault.
            (End::Xend, None) => {
                self.interrupt(block.last);
                self.restart();
                return;
            }
            _ => {}
        }
        self.cur = self.blocks.fall(self.world.image, self.cur);
    }

    fn mode(&mut self, ip: u64, bits: u8) {
        self.settle(ip);
        self.em.begin_event();
        self.em.mode_tsx(bits);
        self.em.fup(ip);
        self.cur = self.block(ip);
        self.pin();
    }

    pub fn abort_by_chance(&mut self, block: &Block) -> bool {
        if !self.world.options.features.tsx || !self.rng.chance(1, 12) {
            return false;
        }
        self.abort(block.last);
        true
    }

    /// The transaction is as if it had not been.
    pub fn abort(&mut self, ip: u64) {
        let Some(fallback) = self.transaction.take() else { return };
        self.settle(ip);
        self.em.begin_event();
        self.em.mode_tsx(ABORT);
        self.em.fup(ip);
        self.em.event_tip(fallback);
        self.truth.branch(ip, fallback, Branch::TxAbort);
        self.retc.forget();
        self.go(fallback);
    }
}
