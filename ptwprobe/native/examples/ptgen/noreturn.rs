//! Functions that do not come back: a walk by coin tosses would end in `abort` all the time if it did not know them.

use std::collections::HashMap;

use crate::blocks::{Block, Blocks, End};
use crate::image::Image;

/// Bounds what is looked at of one function, and how deep.
const MAX_BLOCKS: usize = 400;
const MAX_DEPTH: usize = 40;

#[derive(Default)]
pub struct Returning {
    known: HashMap<u64, bool>,
}

impl Returning {
    /// Whether the block leads to a function that does not return, or to a fault, whatever happens.
    pub fn is_doomed(&mut self, blocks: &Blocks, image: &Image, block: &Block) -> bool {
        match block.end {
            End::Fault => true,
            End::Call | End::Jump => !self.returns(blocks, image, block.target, 0),
            _ => false,
        }
    }

    /// Whether some way from `entry` leads back to the caller; in doubt it does.
    fn returns(&mut self, blocks: &Blocks, image: &Image, entry: u64, depth: usize) -> bool {
        if let Some(&known) = self.known.get(&entry) {
            return known;
        }
        if depth > MAX_DEPTH {
            return true;
        }
        // A function that calls itself returns if it does so on another way.
        self.known.insert(entry, false);
        let answer = self.search(blocks, image, entry, depth);
        self.known.insert(entry, answer);
        answer
    }

    fn search(&mut self, blocks: &Blocks, image: &Image, entry: u64, depth: usize) -> bool {
        let mut open = vec![entry];
        let mut seen = vec![entry];
        while let Some(addr) = open.pop() {
            let block = blocks.read(image, addr);
            let mut next = [None, None];
            match block.end {
                End::Cond => next = [Some(block.target), Some(block.next)],
                End::Jump => next[0] = Some(block.target),
                End::Call if self.returns(blocks, image, block.target, depth + 1) => next[0] = Some(block.next),
                End::Call | End::Fault => {}
                End::Return | End::IndirectJump | End::FarReturn | End::FarOther => return true,
                _ => next[0] = Some(block.next),
            }
            for addr in next.into_iter().flatten() {
                if !seen.contains(&addr) {
                    seen.push(addr);
                    open.push(addr);
                }
            }
            if seen.len() > MAX_BLOCKS {
                return true;
            }
        }
        false
    }
}
