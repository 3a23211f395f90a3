//! The CPU's stack of return addresses for RET compression: 64 entries, the oldest is lost.

const DEPTH: usize = 64;

pub struct ReturnStack {
    entries: [u64; DEPTH],
    top: usize,
    len: usize,
    /// A decoder may know addresses that are gone here.
    forgotten: bool,
}

impl ReturnStack {
    pub fn new() -> Self {
        Self { entries: [0; DEPTH], top: 0, len: 0, forgotten: false }
    }

    #[inline]
    pub fn push(&mut self, addr: u64) {
        self.top = (self.top + 1) % DEPTH;
        self.entries[self.top] = addr;
        self.len = (self.len + 1).min(DEPTH);
    }

    #[inline]
    pub fn pop(&mut self) -> Option<u64> {
        if self.len == 0 {
            return None;
        }
        let addr = self.entries[self.top];
        self.top = (self.top + DEPTH - 1) % DEPTH;
        self.len -= 1;
        Some(addr)
    }

    /// A decoder knows no address either.
    pub fn is_surely_empty(&self) -> bool {
        self.len == 0 && !self.forgotten
    }

    /// As a decoder does: PSB, OVF, tracing off.
    pub fn clear(&mut self) {
        self.len = 0;
        self.forgotten = false;
    }

    /// No return is compressed over this.
    pub fn forget(&mut self) {
        self.forgotten |= self.len != 0;
        self.len = 0;
    }
}
