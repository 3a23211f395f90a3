//! The walk in steps that were made ready: what most packets of a trace need.

use super::{Led, Outcomes, Walk};
use crate::flow::block::NONE;
use crate::flow::context::Spaces;
use crate::flow::node::{link, make, Ask, Node, Step};
use crate::flow::sink::{Batch, BranchKind};

/// Branches that the outcomes of one packet can lead to, two each, and then some without any.
const ROOM: usize = 4 * 64;

/// Why a row of steps ended.
enum Ended {
    /// All outcomes are used.
    Used,
    Special,
    New,
    /// It is not known where the present node leads after this outcome.
    Unlinked(bool),
    NoRoom,
}

impl<S: Spaces> Walk<S> {
    /// Follows `outcomes`, of which those used are taken away.
    #[inline(always)]
    pub fn branches(&mut self, outcomes: &mut Outcomes, out: &mut Batch) -> Led {
        self.forget_pos();
        let mut sure = out.branches.len();
        loop {
            match self.steps(outcomes, &mut sure, out) {
                Ended::Used => return Led::On,
                Ended::Special => return self.branches_by_block(outcomes, sure, out),
                ended => self.make_ready(ended, out),
            }
        }
    }

    #[cold]
    fn make_ready(&mut self, ended: Ended, out: &mut Batch) {
        match ended {
            Ended::New => drop(self.node()),
            Ended::Unlinked(taken) => {
                self.cur = link(&mut self.cache, self.cur, taken, self.spaces.space(self.key.0));
            }
            Ended::NoRoom => out.make_room(),
            Ended::Used | Ended::Special => {}
        }
        self.bound_memory();
    }

    /// As far as the nodes are there. What changes at every step is at hand, and in its place again at the end.
    #[inline(always)]
    fn steps(&mut self, outcomes: &mut Outcomes, sure: &mut usize, out: &mut Batch) -> Ended {
        let Outcomes { mut bits, mut count } = *outcomes;
        let mut cur = self.cur;
        let mut sink = out.open();
        if !sink.has_room(ROOM) {
            return Ended::NoRoom;
        }
        let ended = loop {
            if count == 0 {
                break Ended::Used;
            }
            let node = &self.cache.nodes()[cur as usize];
            let taken = bits >> 63;
            if node.step() == Step::Cond {
                self.returns.push_if(node.calls(), node.after);
                // SAFETY: there was room for two at each of at most 64 outcomes, and what asks for none looks again.
                unsafe {
                    sink.push_if(node.leads(), node.lead(), node.lead_kind());
                    sink.push_if(taken as u8, node.branch(), BranchKind::Cond as u8);
                }
                *sure = sink.len();
                bits <<= 1;
                count -= 1;
                let next = node.next[taken as usize];
                if next == NONE {
                    break Ended::Unlinked(taken != 0);
                }
                cur = next;
            } else if node.step() == Step::Return {
                if taken == 0 || !self.compressed_returns {
                    break Ended::Special;
                }
                let top = self.returns.top();
                self.returns.push_if(node.calls(), node.after);
                let Some(next) = self.returns.pop() else {
                    self.returns.cut(top);
                    break Ended::Special;
                };
                let to = self.cache.start(next);
                // SAFETY: as above.
                unsafe {
                    sink.push_if(node.leads(), node.lead(), node.lead_kind());
                    sink.push_if(1, (node.branch().0, to), BranchKind::Return as u8);
                }
                *sure = sink.len();
                bits <<= 1;
                count -= 1;
                cur = next;
            } else {
                match node.ask() {
                    Ask::Nothing if !sink.has_room(ROOM) => break Ended::NoRoom,
                    Ask::Nothing => {
                        self.returns.push_if(node.calls(), node.after);
                        // SAFETY: there is room.
                        unsafe { sink.push_if(node.leads(), node.lead(), node.lead_kind()) };
                        cur = node.next[0];
                    }
                    Ask::New => break Ended::New,
                    _ => break Ended::Special,
                }
            }
        };
        let len = sink.len();
        out.close(len);
        self.cur = cur;
        *outcomes = Outcomes { bits, count };
        ended
    }

    /// The present node, made if it is new.
    #[inline(always)]
    fn node(&mut self) -> Node {
        let node = self.cache.nodes()[self.cur as usize];
        if node.ask() != Ask::New {
            return node;
        }
        let node = make(&mut self.cache, self.cur, self.spaces.space(self.key.0));
        *self.cache.node_mut(self.cur) = node;
        node
    }

    /// As `target`, where an indirect branch comes next, or behind one jump or call; else nothing happens.
    #[inline(always)]
    pub fn plain_target(&mut self, ip: u64, out: &mut Batch) -> bool {
        let mut node = &self.cache.nodes()[self.cur as usize];
        if !matches!(node.ask(), Ask::Return | Ask::Indirect) {
            if node.ask() != Ask::New {
                return false;
            }
            self.make_ready(Ended::New, out);
            node = &self.cache.nodes()[self.cur as usize];
            if !matches!(node.ask(), Ask::Return | Ask::Indirect) {
                return false;
            }
        }
        let mut sink = out.open();
        if !sink.has_room(2) {
            return false;
        }
        self.returns.push_if(node.calls(), node.after);
        // SAFETY: there is room for two.
        unsafe {
            sink.push_if(node.leads(), node.lead(), node.lead_kind());
            sink.push_if(1, (node.branch().0, ip), node.branch_kind());
        }
        let len = sink.len();
        out.close(len);
        if node.ask() == Ask::Return {
            self.returns.pop();
        }
        self.arrive(ip);
        true
    }
    /// As `leave`, where a system call or its like comes next, or behind one jump or call; else nothing happens.
    #[inline(always)]
    pub fn plain_leave(&mut self, ip: Option<u64>, out: &mut Batch) -> bool {
        let node = &self.cache.nodes()[self.cur as usize];
        // Where it leads may be where it leaves what is traced.
        if node.ask() != Ask::Far || node.leads() != 0 && ip == Some(node.lead().1) {
            return false;
        }
        let mut sink = out.open();
        if !sink.has_room(2) {
            return false;
        }
        // SAFETY: there is room for two.
        unsafe {
            sink.push_if(node.leads(), node.lead(), node.lead_kind());
            sink.push_if(1, (node.branch().0, ip.unwrap_or(0)), node.branch_kind());
        }
        let len = sink.len();
        out.close(len);
        self.stop(None);
        true
    }

    /// As `come_back`, where the walk has been of late; else nothing happens.
    #[inline(always)]
    pub fn come_back_soon(&mut self, ip: u64) -> bool {
        if !self.is_selected() {
            return false;
        }
        match self.cache.recent(ip) {
            Some(index) if !matches!(self.cache.nodes()[index as usize].ask(), Ask::New | Ask::Hard) => {
                self.be_at(index);
                true
            }
            _ => false,
        }
    }
}
