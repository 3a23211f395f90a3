//! Linked blocks: built when first reached, found by address, followed by index.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::block::{build, Block, Offsets, Term, NONE};
use super::code::Code;

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

/// The blocks of one address space in code of one width.
#[derive(Default)]
pub struct Cache {
    bits: u32,
    blocks: Vec<Block>,
    offsets: Offsets,
    by_address: ByAddress,
}

impl Cache {
    /// For code of `bits`: 16, 32 or 64.
    #[must_use]
    pub fn new(bits: u32) -> Self {
        Self { bits, ..Self::default() }
    }

    /// It has grown so far that it should be cleared; all indices are void then.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.blocks.len() >= MAX_BLOCKS
    }

    pub fn clear(&mut self) {
        self.blocks.clear();
        self.offsets.clear();
        self.by_address.clear();
    }

    /// The block with this index. Indices come from this cache alone.
    #[inline]
    #[must_use]
    pub fn block(&self, index: u32) -> &Block {
        &self.blocks[index as usize]
    }

    /// The index of the block that begins at `ip`.
    pub fn at(&mut self, ip: u64, code: &dyn Code) -> u32 {
        if let Some(&index) = self.by_address.get(&ip) {
            return index;
        }
        let index = self.blocks.len() as u32;
        self.blocks.push(build(code, self.bits, ip, &mut self.offsets));
        self.by_address.insert(ip, index);
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
        let next = self.at(block.after, code);
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
        self.offsets.find(self.block(index), ip)
    }
}
