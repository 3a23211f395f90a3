//! What the walk does at a packet, made ready: a block together with the direct jump or call that leads out of it.
//!
//! Following a trace costs most where the next step cannot be foreseen. One node is one step, whatever it is: all write
//! their branches, push their return address and go to the next by the same instructions, in which numbers of 0 and 1
//! take the place of decisions.

use super::block::{branch_kind, Block, Term, NONE};
use super::cache::Cache;
use super::code::Code;
use super::sink::BranchKind;

/// What a step asks for.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// One outcome.
    Cond,
    /// Nothing: another node comes next.
    Nothing,
    /// A taken outcome, or an address.
    Return,
    /// An address.
    Indirect,
    /// The end of tracing, or an address.
    Far,
    /// What only the walk from block to block can tell.
    Hard,
    /// It has not been made yet.
    New,
}

/// One step, in half a line of memory: the walk goes to and fro in more of them than the nearest caches hold.
///
/// A direct jump or call may come first, the lead, from `from`. What asks for a packet, the branch, is at `from` or
/// `branch_offset` behind where the lead leads to. Targets are relative to the instruction. `after` is the block at the
/// return address, where there is a call. `next`: the blocks after an outcome that is not taken, and one that is.
#[repr(C, align(32))]
#[derive(Clone, Copy, Debug)]
pub struct Node {
    from: u64,
    pub next: [u32; 2],
    pub after: u32,
    lead_to: i32,
    branch_to: i32,
    branch_offset: u16,
    /// An [`Ask`] in the low three bits, a [`BranchKind`] in the high four.
    asks: u8,
    leads: u8,
}

/// Bits of `leads`: there is a lead, it is a call, and a return address is pushed. `STEP_SHIFT`: a [`Step`].
const LEADS: u8 = 1;
const LEAD_IS_CALL: u8 = 2;
const CALLS_SHIFT: u32 = 2;
const STEP_SHIFT: u32 = 3;

/// What a node asks for once more, in three: more become a jump through a table, which foresees nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Cond,
    Return,
    Other,
}

impl Node {
    pub fn new(ask: Ask) -> Self {
        let mut node = Self {
            from: 0,
            next: [NONE; 2],
            after: NONE,
            lead_to: 0,
            branch_to: 0,
            branch_offset: 0,
            asks: 0,
            leads: 0,
        };
        node.set_ask(ask);
        node
    }

    fn set_ask(&mut self, ask: Ask) {
        let step = match ask {
            Ask::Cond => 0,
            Ask::Return => 1,
            _ => 2,
        };
        self.asks = self.asks & 0xf0 | ask as u8;
        self.leads = self.leads & ((1 << STEP_SHIFT) - 1) | step << STEP_SHIFT;
    }

    /// The direct jump or call that ends `block`.
    fn set_lead(&mut self, block: &Block) -> Option<()> {
        self.from = block.branch;
        self.lead_to = distance(block.branch, block.target)?;
        self.leads |= LEADS | if block.term == Term::Call { LEAD_IS_CALL } else { 0 };
        Some(())
    }

    /// What ends `block`, which is where the lead leads to, if there is one.
    fn set_branch(&mut self, block: &Block) -> Option<()> {
        if self.leads() == 0 {
            self.from = block.branch;
        } else {
            self.branch_offset = u16::try_from(block.branch.wrapping_sub(self.lead().1)).ok()?;
        }
        // Only this one has a target that is known.
        if block.term == Term::Cond {
            self.branch_to = distance(block.branch, block.target)?;
        }
        self.asks = self.asks & 0x0f | (branch_kind(block.term) as u8) << 4;
        Some(())
    }

    fn set_after(&mut self, block: u32) {
        self.after = block;
        self.leads |= 1 << CALLS_SHIFT;
    }

    pub fn ask(&self) -> Ask {
        match self.asks & 7 {
            0 => Ask::Cond,
            1 => Ask::Nothing,
            2 => Ask::Return,
            3 => Ask::Indirect,
            4 => Ask::Far,
            5 => Ask::Hard,
            _ => Ask::New,
        }
    }

    #[inline(always)]
    pub fn step(&self) -> Step {
        match self.leads >> STEP_SHIFT {
            0 => Step::Cond,
            1 => Step::Return,
            _ => Step::Other,
        }
    }

    /// 1 where there is a lead, else 0.
    #[inline(always)]
    pub fn leads(&self) -> u8 {
        self.leads & LEADS
    }

    /// Return addresses pushed: 1 or 0.
    #[inline(always)]
    pub fn calls(&self) -> u8 {
        self.leads >> CALLS_SHIFT & 1
    }

    /// From where the lead goes, and to where.
    #[inline(always)]
    pub fn lead(&self) -> (u64, u64) {
        (self.from, self.from.wrapping_add_signed(self.lead_to.into()))
    }

    #[inline(always)]
    pub fn lead_kind(&self) -> u8 {
        BranchKind::Jump as u8 + (self.leads & LEAD_IS_CALL)
    }

    /// From where the branch goes, and to where if that is known.
    #[inline(always)]
    pub fn branch(&self) -> (u64, u64) {
        let from = self.lead().1.wrapping_add(self.branch_offset.into());
        (from, from.wrapping_add_signed(self.branch_to.into()))
    }

    #[inline(always)]
    pub fn branch_kind(&self) -> u8 {
        self.asks >> 4
    }
}

fn distance(from: u64, to: u64) -> Option<i32> {
    i32::try_from(to.wrapping_sub(from) as i64).ok()
}

const _: () = assert!(BranchKind::Call as u8 == BranchKind::Jump as u8 + LEAD_IS_CALL);

/// Nodes in a row that ask for nothing: more are left to the walk from block to block, which finds a circle.
const MAX_ROW: usize = 64;

/// The node of the block `index`, whose links go as far as they are known.
pub fn make(cache: &mut Cache, index: u32, code: &dyn Code) -> Node {
    // Where it cannot be told in so few bytes, the walk goes from block to block.
    try_make(cache, index, code).unwrap_or(Node::new(Ask::Hard))
}

fn try_make(cache: &mut Cache, index: u32, code: &dyn Code) -> Option<Node> {
    let block = *cache.block(index);
    let mut node = Node::new(Ask::Nothing);
    let asking = match block.term {
        Term::Split => return Some(on_to(cache, index, node, code)),
        Term::Jump | Term::Call => {
            node.set_lead(&block)?;
            // The CPU does not keep the address behind a call of the next instruction.
            if block.term == Term::Call && block.target != block.after() {
                node.set_after(cache.fall(index, code));
            }
            let next = cache.taken(index, code);
            if matches!(cache.block(next).term, Term::Jump | Term::Call | Term::Split) {
                return Some(on_to(cache, index, node, code));
            }
            next
        }
        _ => index,
    };
    let block = *cache.block(asking);
    node.set_branch(&block)?;
    let ask = match block.term {
        Term::Cond => {
            node.next = [block.fall, block.taken];
            Ask::Cond
        }
        Term::Return => Ask::Return,
        Term::IndirectJump => Ask::Indirect,
        // Two return addresses are too many for one node.
        Term::IndirectCall if node.calls() == 0 => {
            node.set_after(cache.fall(asking, code));
            Ask::Indirect
        }
        Term::Syscall | Term::FarReturn | Term::FarOther => Ask::Far,
        _ => Ask::Hard,
    };
    node.set_ask(ask);
    Some(node)
}

/// `node` goes on from the block `index`, which asks for nothing, if that leads to one that does.
fn on_to(cache: &mut Cache, index: u32, node: Node, code: &dyn Code) -> Node {
    let mut at = index;
    for _ in 0..MAX_ROW {
        match cache.direct(at, code) {
            Some((further, _)) => at = further,
            None => {
                let next = cache.direct(index, code).map_or(NONE, |(next, _)| next);
                return Node { next: [next; 2], ..node };
            }
        }
    }
    Node::new(Ask::Hard)
}

/// The block after the outcome `taken` of the node of `index`, which asks for one: found, and kept.
#[cold]
pub fn link(cache: &mut Cache, index: u32, taken: bool, code: &dyn Code) -> u32 {
    let asking = match cache.block(index).term {
        Term::Jump | Term::Call => cache.taken(index, code),
        _ => index,
    };
    let next = if taken { cache.taken(asking, code) } else { cache.fall(asking, code) };
    cache.node_mut(index).next[usize::from(taken)] = next;
    next
}
