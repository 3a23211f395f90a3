//! What the walk asks about code. Implemented by `image`.

/// The code of one address space during one stretch of time.
pub trait Code: Send + Sync {
    /// Copies the code at `ip` into `buffer`; how many bytes are known there (0: none).
    fn read(&self, ip: u64, buffer: &mut [u8]) -> usize;
    /// The stub that `ip` lies in, as far as the session told.
    fn stub(&self, ip: u64) -> Option<Stub>;
}

/// A stub of a probe: [`start`, `end`) holds its code; the probed program goes on at `continue_addr`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stub {
    pub start: u64,
    pub end: u64,
    pub site: u64,
    pub continue_addr: u64,
}
