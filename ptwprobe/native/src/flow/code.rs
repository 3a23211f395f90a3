//! What the walk asks about code. Implemented by `image`.

/// The code of one address space during one stretch of time.
pub trait Code: Send + Sync {
    /// Copies the code at `ip` into `buffer`; how many bytes are known there (0: none).
    fn read(&self, ip: u64, buffer: &mut [u8]) -> usize;
    /// The stub that `ip` lies in, as far as the session told.
    fn stub(&self, ip: u64) -> Option<Stub>;
    /// The first site from `ip` on whose stub has branches of its own and code that is not known. No flow passes it.
    fn closed_site(&self, _ip: u64) -> Option<u64> {
        None
    }
}

/// A stub of a probe: [`start`, `end`) holds its code; the probed program goes on at `continue_addr`, which is 0 where
/// branches of the stub have a say in that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stub {
    pub start: u64,
    pub end: u64,
    pub site: u64,
    pub continue_addr: u64,
}
