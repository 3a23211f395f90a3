//! Load gates: words in rings that tell the stubs "somebody is here to catch a fault". Each is a robust futex of the
//! owner, so the kernel marks it (FUTEX_OWNER_DIED) at any death of the owner, before it lets the targets go.
//!
//! The kernel's list has one distance between an entry and its futex word for all entries
//! (Documentation/locking/robust-futex-ABI.rst). So every gate gets two pages of ours in a row: one, private, for the entry, where no
//! target can reach it, and a second view of the shared page that the word is in.

use std::ptr::{null_mut, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

use super::{sys, Error, Owner, Result};

const PAGE: usize = 4096;

#[repr(C)]
struct Entry {
    next: *mut Entry,
}

/// `struct robust_list_head`, linux/futex.h.
#[repr(C)]
struct Head {
    list: Entry,
    futex_offset: i64,
    pending: *mut Entry,
}

struct Gate {
    /// The address that the caller knows the word by.
    word_addr: usize,
    pages: NonNull<u8>,
}

impl Gate {
    fn entry(&self) -> *mut Entry {
        // SAFETY: the offset is within the first of the two pages.
        unsafe { self.pages.as_ptr().add(self.word_addr % PAGE).cast() }
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: the second page is mapped as long as the gate lives; `hold` checked the alignment.
        unsafe { &*self.pages.as_ptr().add(PAGE + self.word_addr % PAGE).cast::<AtomicU32>() }
    }

    /// Close unless somebody else wrote there.
    fn close(&self, tid: u32) {
        let _ = self.word().compare_exchange(tid, 0, Ordering::SeqCst, Ordering::SeqCst);
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        // SAFETY: the pages are this gate's, and it was unlinked before.
        unsafe { libc::munmap(self.pages.as_ptr().cast(), 2 * PAGE) };
    }
}

/// The gates that are held.
#[derive(Default)]
pub struct Gates {
    head: Option<Box<Head>>,
    held: Vec<Gate>,
}

// SAFETY: the pointers lead to memory that only the owner, which the table moves to once, touches.
unsafe impl Send for Gates {}

impl Gates {
    /// Rebuild the chain over what is held. `pending` covers the entry that comes or goes meanwhile.
    fn link(&mut self, pending: *mut Entry) -> Result<()> {
        let new = self.head.is_none();
        let head = self.head.get_or_insert_with(|| {
            let mut head =
                Box::new(Head { list: Entry { next: null_mut() }, futex_offset: PAGE as i64, pending: null_mut() });
            head.list.next = &raw mut head.list;
            head
        });
        head.pending = pending;
        let mut next = &raw mut head.list;
        for gate in &self.held {
            // SAFETY: entries are ours and mapped while the gate is held.
            unsafe { (*gate.entry()).next = next };
            next = gate.entry();
        }
        head.list.next = next;
        if new {
            // SAFETY: the head stays where it is (boxed) for as long as the owner lives.
            let set =
                unsafe { libc::syscall(libc::SYS_set_robust_list, std::ptr::from_mut(&mut **head), size_of::<Head>()) };
            if set < 0 {
                self.head = None;
                return Err(Error::new("failed", format!("set_robust_list failed (errno {})", sys::errno())));
            }
        }
        Ok(())
    }

    fn done(&mut self) {
        if let Some(head) = &mut self.head {
            head.pending = null_mut();
        }
    }

    pub fn close_all(&mut self) {
        // SAFETY: reads an id.
        let tid = unsafe { libc::gettid() } as u32;
        self.held.iter().for_each(|gate| gate.close(tid));
    }
}

impl Owner {
    /// Hold the gate whose word is at `word_addr` of our memory, in a MAP_SHARED mapping; returns the value that means open.
    pub fn hold_gate(&mut self, word_addr: usize) -> Result<u32> {
        let invalid = |why: &str| Error::new("invalid", format!("the gate word at {word_addr:#x} {why}"));
        if !word_addr.is_multiple_of(size_of::<usize>()) {
            return Err(invalid("is not aligned"));
        }
        if self.gates.held.iter().any(|g| g.word_addr == word_addr) {
            return Ok(self.me as u32);
        }
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: two new pages; the second is replaced by a second view of the shared page (mremap with old size 0).
        let gate = unsafe {
            let pages = libc::mmap(null_mut(), 2 * PAGE, prot, flags, -1, 0);
            if pages == libc::MAP_FAILED {
                return Err(invalid("cannot be held: no memory"));
            }
            let shared = (word_addr - word_addr % PAGE) as *mut libc::c_void;
            let move_to = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
            if libc::mremap(shared, 0, PAGE, move_to, pages.byte_add(PAGE)) == libc::MAP_FAILED {
                let errno = sys::errno();
                libc::munmap(pages, 2 * PAGE);
                return Err(invalid(&format!("is in no shared mapping (errno {errno})")));
            }
            NonNull::new(pages.cast::<u8>()).map(|pages| Gate { word_addr, pages })
        };
        let gate = gate.ok_or_else(|| invalid("cannot be held"))?;
        let entry = gate.entry();
        self.gates.held.push(gate);
        self.gates.link(entry)?;
        if let Some(gate) = self.gates.held.last() {
            gate.word().store(self.me as u32, Ordering::SeqCst);
        }
        self.gates.done();
        Ok(self.me as u32)
    }

    /// Close a gate and let go of it; one that is not held is left alone.
    pub fn release_gate(&mut self, word_addr: usize) -> Result<()> {
        let Some(at) = self.gates.held.iter().position(|g| g.word_addr == word_addr) else {
            return Ok(());
        };
        let gate = self.gates.held.swap_remove(at);
        self.gates.link(gate.entry())?;
        gate.close(self.me as u32);
        self.gates.done();
        Ok(())
    }
}
