//! What the walk does at a packet, made ready: a block together with the direct jump or call that leads out of it.
//!
//! Following a trace costs most where the next step cannot be foreseen. One node is one step, whatever it is: all write
//! their branches, push their return address and go to the next by the same instructions, in which numbers of 0 and 1
//! take the place of decisions.

use super::block::{branch_kind, Term, NONE};
use super::cache::Cache;
use super::code::Code;
use super::sink::{Branch, BranchKind};

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

/// One step. `lead` is a direct jump or call that comes first; it counts `leads` times (0 or 1). `branch` is what asks for
/// a packet. The block at the return address, `after`, is pushed `calls` times (0 or 1). `next`: the blocks after an
/// outcome that is not taken, and one that is.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub struct Node {
    pub lead: Branch,
    pub branch: Branch,
    pub next: [u32; 2],
    pub after: u32,
    pub ask: Ask,
    /// The same once more in three: more become a jump through a table, which foresees nothing.
    pub step: Step,
    pub leads: u8,
    pub calls: u8,
}

#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Cond,
    Return,
    Other,
}

impl Node {
    pub fn new(ask: Ask) -> Self {
        let none = Branch::new(0, 0, BranchKind::Jump);
        Self { lead: none, branch: none, next: [NONE; 2], after: NONE, ask, step: Step::Other, leads: 0, calls: 0 }
    }
}

/// Nodes in a row that ask for nothing: more are left to the walk from block to block, which finds a circle.
const MAX_ROW: usize = 64;

/// The node of the block `index`, whose links go as far as they are known.
pub fn make(cache: &mut Cache, index: u32, code: &dyn Code) -> Node {
    let block = *cache.block(index);
    let mut node = Node::new(Ask::Nothing);
    let asking = match block.term {
        Term::Split => return on_to(cache, index, node, code),
        Term::Jump | Term::Call => {
            (node.leads, node.lead) = (1, Branch::new(block.branch, block.target, branch_kind(block.term)));
            // The CPU does not keep the address behind a call of the next instruction.
            if block.term == Term::Call && block.target != block.after() {
                (node.calls, node.after) = (1, cache.fall(index, code));
            }
            let next = cache.taken(index, code);
            if matches!(cache.block(next).term, Term::Jump | Term::Call | Term::Split) {
                return on_to(cache, index, node, code);
            }
            next
        }
        _ => index,
    };
    let block = *cache.block(asking);
    node.branch = Branch::new(block.branch, block.target, branch_kind(block.term));
    node.ask = match block.term {
        Term::Cond => {
            node.next = [block.fall, block.taken];
            node.step = Step::Cond;
            Ask::Cond
        }
        Term::Return => {
            node.step = Step::Return;
            Ask::Return
        }
        Term::IndirectJump => Ask::Indirect,
        // Two return addresses are too many for one node.
        Term::IndirectCall if node.calls == 0 => {
            (node.calls, node.after) = (1, cache.fall(asking, code));
            Ask::Indirect
        }
        Term::Syscall | Term::FarReturn | Term::FarOther => Ask::Far,
        _ => Ask::Hard,
    };
    node
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
    Node { ask: Ask::Hard, ..node }
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
