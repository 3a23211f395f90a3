//! Linked blocks: built when first reached, found by address, followed by index.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::block::{build, Block, Extent, Offsets, Term, NONE};
use super::code::Code;
use super::node::{Ask, Node};

/// Blocks kept of one space, some 100 bytes each; then they are built anew.
const MAX_BLOCKS: usize = 1 << 18;

/// Addresses need no hash that resists an adversary: a bad one costs a hostile trace its own time.
#[derive(Default)]
pub struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ mixed >> 32;
    }
}

type ByAddress = HashMap<u64, u32, BuildHasherDefault<AddressHasher>>;

/// Addresses found last, by some of their bits: most indirect branches lead to few places.
const RECENT: usize = 1 << 13;

/// The blocks of one address space in code of one width.
#[derive(Default)]
pub struct Cache {
    bits: u32,
    blocks: Vec<Block>,
    /// Of each block.
    nodes: Vec<Node>,
    extents: Vec<Extent>,
    offsets: Offsets,
    by_address: ByAddress,
    /// (address, index), of `RECENT` places once there is a block.
    recent: Vec<(u64, u32)>,
}

impl Cache {
    /// For code of `bits`: 16, 32 or 64.
    #[must_use]
    pub fn new(bits: u32) -> Self {
        Self { bits, ..Self::default() }
    }

    /// It has grown so far that it should be left for a new one.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.blocks.len() >= MAX_BLOCKS
    }

    /// The block with this index. Indices come from this cache alone.
    #[inline]
    #[must_use]
    pub fn block(&self, index: u32) -> &Block {
        &self.blocks[index as usize]
    }

    /// What happens at a packet, by block.
    #[inline(always)]
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    pub fn node_mut(&mut self, index: u32) -> &mut Node {
        &mut self.nodes[index as usize]
    }

    /// The address of a block.
    #[must_use]
    pub fn start(&self, index: u32) -> u64 {
        self.extents[index as usize].start
    }

    /// The index of the block that begins at `ip`, if it was asked for not long ago.
    #[inline(always)]
    #[must_use]
    pub fn recent(&self, ip: u64) -> Option<u32> {
        match self.recent.get(place(ip)) {
            Some(&(address, index)) if address == ip && index != NONE => Some(index),
            _ => None,
        }
    }

    /// The index of the block that begins at `ip`.
    #[inline]
    pub fn at(&mut self, ip: u64, code: &dyn Code) -> u32 {
        match self.recent(ip) {
            Some(index) => index,
            None => self.find(ip, code),
        }
    }

    #[inline(never)]
    fn find(&mut self, ip: u64, code: &dyn Code) -> u32 {
        let index = match self.by_address.get(&ip) {
            Some(&index) => index,
            None => {
                let index = self.blocks.len() as u32;
                let (block, extent) = build(code, self.bits, ip, &mut self.offsets);
                self.blocks.push(block);
                self.nodes.push(Node::new(Ask::New));
                self.extents.push(extent);
                self.by_address.insert(ip, index);
                index
            }
        };
        self.recent.resize(RECENT, (0, NONE));
        if let Some(recent) = self.recent.get_mut(place(ip)) {
            *recent = (ip, index);
        }
        index
    }

    /// The block that the direct branch which ends `index` leads to.
    #[inline]
    pub fn taken(&mut self, index: u32, code: &dyn Code) -> u32 {
        let block = self.block(index);
        if block.taken != NONE {
            return block.taken;
        }
        let next = self.at(block.target, code);
        self.blocks[index as usize].taken = next;
        next
    }

    /// The block behind `index`.
    #[inline]
    pub fn fall(&mut self, index: u32, code: &dyn Code) -> u32 {
        let block = self.block(index);
        if block.fall != NONE {
            return block.fall;
        }
        let next = self.at(block.after(), code);
        self.blocks[index as usize].fall = next;
        next
    }

    /// Where a block leads without any branch packet: `Some((next, is a branch))`.
    #[inline]
    pub fn direct(&mut self, index: u32, code: &dyn Code) -> Option<(u32, bool)> {
        match self.block(index).term {
            Term::Jump | Term::Call => Some((self.taken(index, code), true)),
            Term::Split => Some((self.fall(index, code), false)),
            _ => None,
        }
    }

    /// The address behind the instruction at `ip`, where one of the block's instructions begins there.
    #[must_use]
    pub fn next_of(&self, index: u32, ip: u64) -> Option<u64> {
        self.offsets.find(self.block(index), &self.extents[index as usize], ip)
    }
}

fn place(ip: u64) -> usize {
    (ip ^ ip >> 12) as usize % RECENT
}
