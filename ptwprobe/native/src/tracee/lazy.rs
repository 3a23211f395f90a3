//! Memory that a process fills itself when it is first touched (userfaultfd(2)). While the process stands still nobody
//! fills it, so that whoever reads such a page, or writes to it, would wait for ever: pages that are not there are not
//! touched then. What another process fills comes while ours stands, too.

use std::fs::{self, File};
use std::os::fd::AsFd;

use super::{procfs, sys};

const PAGE: u64 = 4096;
/// Pages that are looked up at a time.
const AT_ONCE: usize = 64;
/// Of an entry of /proc/PID/pagemap: the page is in memory, or in the swap (Documentation/admin-guide/mm/pagemap.rst).
const THERE: u64 = 3 << 62;

/// Which pages of such a process are there.
pub struct Lazy {
    pagemap: File,
}

impl Lazy {
    /// None where the process does not fill memory itself.
    pub fn of(pid: i32) -> Option<Lazy> {
        let descriptors = procfs::names(&format!("/proc/{pid}/fd")).unwrap_or_default();
        let link = |fd: &String| fs::read_link(format!("/proc/{pid}/fd/{fd}")).ok();
        let fills = descriptors.iter().filter_map(link).any(|l| l.as_os_str() == "anon_inode:[userfaultfd]");
        fills.then(|| File::open(format!("/proc/{pid}/pagemap")).ok().map(|pagemap| Lazy { pagemap }))?
    }

    /// Whether the page of `addr` is there, and up to where, at most `end`, it is the same with those that follow.
    pub fn run(&self, addr: u64, end: u64) -> (bool, u64) {
        let mut entries = [[0u8; 8]; AT_ONCE];
        let first = addr / PAGE;
        let count = usize::try_from(end.div_ceil(PAGE).saturating_sub(first)).unwrap_or(AT_ONCE).clamp(1, AT_ONCE);
        let wanted = entries.get_mut(..count).unwrap_or_default();
        if sys::read_at(self.pagemap.as_fd(), first * 8, wanted.as_flattened_mut()).is_err() {
            return (false, end);
        }
        let mut there = wanted.iter().map(|entry| u64::from_le_bytes(*entry) & THERE != 0);
        let is_there = there.next().unwrap_or(false);
        let pages = 1 + there.take_while(|t| *t == is_there).count() as u64;
        (is_there, end.min((first + pages) * PAGE))
    }

    /// Whether all of [`addr`, `addr + len`) is there.
    pub fn has(&self, addr: u64, len: u64) -> bool {
        let end = addr.saturating_add(len);
        let mut at = addr;
        while at < end {
            match self.run(at, end) {
                (true, next) => at = next,
                (false, _) => return false,
            }
        }
        true
    }

    /// As `sys::read_memory`; what is not there is read as 0.
    pub fn read_memory(&self, tid: i32, addr: u64, buf: &mut [u8]) -> usize {
        let end = addr.saturating_add(buf.len() as u64);
        let mut at = addr;
        while at < end {
            let (there, next) = self.run(at, end);
            let done = usize::try_from(at - addr).unwrap_or(buf.len());
            let size = usize::try_from(next - at).unwrap_or(0);
            let Some(piece) = buf.get_mut(done..).and_then(|rest| rest.get_mut(..size)) else { return done };
            if !there {
                piece.fill(0);
            } else {
                let got = sys::read_memory(tid, at, piece);
                if got < size {
                    return done + got;
                }
            }
            at = next;
        }
        buf.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_there_once_they_were_touched() {
        let pid = std::process::id() as i32;
        assert!(Lazy::of(pid).is_none());
        let lazy = Lazy { pagemap: File::open("/proc/self/pagemap").expect("our own") };
        let len = 8 * PAGE as usize;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, which is the test's alone; one byte of it is written.
        let base = unsafe {
            let base = libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(base, libc::MAP_FAILED);
            libc::madvise(base, len, libc::MADV_NOHUGEPAGE);
            base.cast::<u8>().add(2 * PAGE as usize + 5).write(7);
            base as u64
        };
        let end = base + 8 * PAGE;
        assert_eq!(lazy.run(base + 1, end), (false, base + 2 * PAGE));
        assert_eq!(lazy.run(base + 2 * PAGE, end), (true, base + 3 * PAGE));
        assert!(lazy.has(base + 2 * PAGE + 8, 100) && !lazy.has(base + 2 * PAGE + 8, PAGE));
        let mut read = vec![9u8; len];
        assert_eq!(lazy.read_memory(pid, base, &mut read), len);
        assert_eq!(read.iter().position(|b| *b == 7), Some(2 * PAGE as usize + 5));
        assert_eq!(read.iter().filter(|b| **b != 0).count(), 1);
        assert_eq!(lazy.run(base, end), (false, base + 2 * PAGE));
        // SAFETY: the mapping from above.
        unsafe { libc::munmap(base as *mut libc::c_void, len) };
    }
}
