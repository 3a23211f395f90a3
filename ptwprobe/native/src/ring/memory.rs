//! The ring's memory: making it over a memfd, and the recorder's mappings of it.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::*;
use crate::clock;

/// The ring could not be made.
#[derive(Debug)]
pub enum RingError {
    /// Number of rings or their size out of range.
    Layout { rings: u32, ring_bits: u32 },
    /// The descriptor is no memfd of ordinary pages.
    NotMemfd,
    /// A system call failed; what it was for.
    Os(&'static str, io::Error),
}

impl fmt::Display for RingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RingError::Layout { rings, ring_bits } => {
                write!(f, "{rings} rings of 2^{ring_bits} bytes: out of range (1..=4096 rings of 2^12..=2^30 bytes)")
            }
            RingError::NotMemfd => write!(f, "the ring's descriptor is not a memfd of ordinary pages"),
            RingError::Os(what, error) => write!(f, "ring memory: {what}: {error}"),
        }
    }
}

impl std::error::Error for RingError {}

fn last_error(what: &'static str) -> RingError {
    RingError::Os(what, io::Error::last_os_error())
}

/// An owned mapping, unmapped on drop. Always page-aligned and `len` bytes long.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain shared memory; it is only accessed through atomics.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes of the file from `offset`, `times` times in a row.
    pub(super) fn repeated(
        fd: BorrowedFd<'_>,
        offset: usize,
        len: usize,
        times: usize,
        prot: i32,
    ) -> Result<Self, RingError> {
        let total = len * times;
        // SAFETY: a fresh anonymous reservation at an address of the kernel's choice.
        let base = unsafe {
            libc::mmap(ptr::null_mut(), total, libc::PROT_NONE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
        };
        let base = match NonNull::new(base.cast::<u8>()) {
            Some(base) if base.as_ptr().cast() != libc::MAP_FAILED => base,
            _ => return Err(last_error("mmap")),
        };
        let mapping = Mapping { base, len: total };
        for copy in 0..times {
            // SAFETY: MAP_FIXED replaces pages of our own reservation only: copy * len + len <= total.
            let mapped = unsafe {
                libc::mmap(
                    base.as_ptr().add(copy * len).cast(),
                    len,
                    prot,
                    libc::MAP_SHARED | libc::MAP_FIXED | libc::MAP_POPULATE,
                    fd.as_raw_fd(),
                    offset as libc::off_t,
                )
            };
            if mapped == libc::MAP_FAILED {
                return Err(last_error("mmap"));
            }
        }
        Ok(mapping)
    }

    /// The word at byte offset `offset`; out of range or unaligned is a bug of ours, never the target's doing.
    #[inline]
    pub(super) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.len);
        // SAFETY: in range and aligned (checked above); shared memory is only accessed as atomics.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    #[inline]
    pub(super) fn half(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.len);
        // SAFETY: in range and aligned (checked above); shared memory is only accessed as atomics.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is ours alone, and no reference into it outlives `self`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// The recorder's view of one target's rings: control pages writable, data only readable.
#[derive(Debug)]
pub struct RingMemory {
    layout: Layout,
    created_tsc: u64,
    /// Where each ring starts; the copy in the control block is the target's to spoil.
    starts: Vec<Mark>,
    control: Mapping,
    data: Vec<Mapping>,
}

impl RingMemory {
    /// Makes the rings in `fd`, an empty memfd of the target (created with `MFD_ALLOW_SEALING`), and maps them.
    ///
    /// All pages are allocated here, so that they are charged to us and not to the target's memory cgroup, and the
    /// size is sealed before anything is mapped, so that the target cannot make our accesses fault.
    pub fn create_over(fd: BorrowedFd<'_>, rings: u32, ring_bits: u32) -> Result<Self, RingError> {
        let layout = Layout::new(rings, ring_bits).ok_or(RingError::Layout { rings, ring_bits })?;
        seal_at_size(fd, layout.total_len())?;
        let read_write = libc::PROT_READ | libc::PROT_WRITE;
        // Read-only data is what tells our view of a ring from a target's, so it comes first, and goes last.
        let data = (0..rings)
            .map(|ring| Mapping::repeated(fd, layout.data_offset(ring), layout.data_len(), 2, libc::PROT_READ))
            .collect::<Result<_, _>>()?;
        let control = Mapping::repeated(fd, 0, layout.control_len(), 1, read_write)?;
        let starts =
            (0..rings).map(|_| Ok(Mark::start(random_word()?, ring_bits))).collect::<Result<_, RingError>>()?;
        let memory = RingMemory { layout, created_tsc: clock::rdtsc(), starts, control, data };
        memory.write_header();
        Ok(memory)
    }

    fn write_header(&self) {
        for (ring, start) in (0..self.layout.rings).zip(&self.starts) {
            self.control_word(ring, CONTROL_TAIL).store(start.0, Ordering::Relaxed);
            self.control_word(ring, CONTROL_HEAD).store(start.0, Ordering::Relaxed);
        }
        self.control.half(HEADER_VERSION).store(VERSION, Ordering::Relaxed);
        self.control.half(HEADER_RINGS).store(self.layout.rings, Ordering::Relaxed);
        self.control.half(HEADER_RING_BITS).store(self.layout.ring_bits, Ordering::Relaxed);
        self.control.word(HEADER_MAGIC).store(MAGIC, Ordering::Release);
    }

    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// When it was made: no record is older.
    pub fn created_tsc(&self) -> u64 {
        self.created_tsc
    }

    /// Hits on a CPU that has no ring, as the stubs count them.
    pub fn lost_no_ring(&self) -> u64 {
        self.control.word(HEADER_LOST_NO_RING).load(Ordering::Relaxed)
    }

    /// The load-gate word in our own address space.
    pub fn load_gate(&self) -> &AtomicU32 {
        self.control.half(HEADER_LOAD_GATE)
    }

    /// The word that says whether somebody records, in our own address space.
    pub fn recorder(&self) -> &AtomicU32 {
        self.control.half(HEADER_RECORDER)
    }

    /// A word of ring `ring`'s control block. `ring` is below `layout().rings`.
    pub(super) fn control_word(&self, ring: u32, field: usize) -> &AtomicU64 {
        self.control.word(self.layout.control_offset(ring) + field)
    }

    /// Ring `ring`'s data, twice in a row; `None` if there is no such ring.
    pub(super) fn data(&self, ring: u32) -> Option<&Mapping> {
        self.data.get(ring as usize)
    }

    /// Where ring `ring` started.
    pub(super) fn start(&self, ring: u32) -> Option<Mark> {
        self.starts.get(ring as usize).copied()
    }
}

/// Gives the memfd its size, allocates all of it, and seals the size.
fn seal_at_size(fd: BorrowedFd<'_>, total: usize) -> Result<(), RingError> {
    const TMPFS_MAGIC: i64 = 0x0102_1994;
    let raw = fd.as_raw_fd();
    // SAFETY: the calls only take the descriptor and, for fstat/fstatfs, fill the struct they are given.
    unsafe {
        let mut filesystem: libc::statfs = std::mem::zeroed();
        if libc::fstatfs(raw, &mut filesystem) != 0 || filesystem.f_type != TMPFS_MAGIC {
            return Err(RingError::NotMemfd);
        }
        if libc::ftruncate(raw, total as libc::off_t) != 0 {
            return Err(last_error("ftruncate"));
        }
        if libc::fallocate(raw, 0, 0, total as libc::off_t) != 0 {
            return Err(last_error("fallocate"));
        }
        // F_ADD_SEALS exists for memfds only: on anything else the ring is refused here.
        if libc::fcntl(raw, libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL) != 0 {
            return Err(last_error("F_ADD_SEALS"));
        }
        let mut status: libc::stat = std::mem::zeroed();
        if libc::fstat(raw, &mut status) != 0 {
            return Err(last_error("fstat"));
        }
        if status.st_size != total as libc::off_t {
            return Err(RingError::NotMemfd);
        }
    }
    Ok(())
}

fn random_word() -> Result<u64, RingError> {
    let mut bytes = [0u8; 8];
    // SAFETY: getrandom fills the eight bytes it is given.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got != bytes.len() as isize {
        return Err(last_error("getrandom"));
    }
    Ok(u64::from_ne_bytes(bytes))
}
