//! The return addresses that the CPU keeps for RET compression.

use super::block::NONE;

/// The CPU's depth (Intel SDM, "Intel Processor Trace", indirect transfer compression for returns).
const DEPTH: usize = 64;

/// A return address, and the block there if it is known by now.
#[derive(Clone, Copy, Debug)]
pub struct Return {
    pub ip: u64,
    pub block: u32,
}

/// A full stack forgets its oldest address.
#[derive(Clone, Debug)]
pub struct Returns {
    ring: [Return; DEPTH],
    top: usize,
    len: usize,
}

impl Default for Returns {
    fn default() -> Self {
        Self { ring: [Return { ip: 0, block: NONE }; DEPTH], top: 0, len: 0 }
    }
}

impl Returns {
    #[inline]
    pub fn push(&mut self, ip: u64, block: u32) {
        self.top = (self.top + 1) % DEPTH;
        self.ring[self.top] = Return { ip, block };
        self.len = (self.len + 1).min(DEPTH);
    }

    #[inline]
    pub fn pop(&mut self) -> Option<Return> {
        self.len = self.len.checked_sub(1)?;
        let last = self.ring[self.top];
        self.top = (self.top + DEPTH - 1) % DEPTH;
        Some(last)
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn clear(&mut self) {
        self.len = 0;
    }

    /// Blocks are numbered anew.
    pub fn forget_blocks(&mut self) {
        for entry in &mut self.ring {
            entry.block = NONE;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_of_65_is_forgotten() {
        let mut returns = Returns::default();
        for ip in 0..65 {
            returns.push(ip, NONE);
        }
        for ip in (1..65).rev() {
            assert_eq!(returns.pop().map(|entry| entry.ip), Some(ip));
        }
        assert!(returns.is_empty() && returns.pop().is_none());
    }
}
