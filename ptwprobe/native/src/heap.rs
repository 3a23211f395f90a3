//! The allocator of this library: the system's, up to the moment at which its locks may be held by nobody.
//!
//! The tracing task outlives the threads whose memory it shares. When they are killed, one of them may be in the midst of
//! `malloc`, with a lock that nobody releases any more. From then on the task takes memory from a room of its own.

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Sizes of the room, in bytes, the best first; only what is used of it takes memory.
const SIZES: [usize; 3] = [1 << 30, 1 << 26, 1 << 22];
const UNIT: usize = 16;

/// Memory that is handed out from one end. What was handed out last can be given back, or grow; the rest stays taken.
struct Room {
    start: AtomicUsize,
    len: AtomicUsize,
    used: AtomicUsize,
}

impl Room {
    const fn none() -> Room {
        Room { start: AtomicUsize::new(0), len: AtomicUsize::new(0), used: AtomicUsize::new(0) }
    }

    fn is_open(&self) -> bool {
        self.start.load(Ordering::Acquire) != 0
    }

    /// May be called in a signal handler.
    fn open(&self) {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        for size in SIZES {
            if self.is_open() {
                return;
            }
            // SAFETY: maps new memory, where there is none.
            let start = unsafe { libc::mmap(null_mut(), size, prot, flags, -1, 0) };
            if start != libc::MAP_FAILED {
                self.len.store(size, Ordering::Release);
                self.start.store(start as usize, Ordering::Release);
            }
        }
    }

    fn take(&self, layout: Layout) -> Option<*mut u8> {
        let (start, len) = (self.start.load(Ordering::Acquire), self.len.load(Ordering::Acquire));
        let mut place = 0;
        let fits = |used: usize| {
            place = (start + used).checked_next_multiple_of(layout.align().max(UNIT))?;
            let end = place.checked_add(layout.size().checked_next_multiple_of(UNIT)?)? - start;
            (end <= len).then_some(end)
        };
        self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits).ok()?;
        Some(std::ptr::with_exposed_provenance_mut(place))
    }

    /// True where `ptr`, of `size` bytes, was handed out last and now has `new` bytes.
    fn resize_last(&self, ptr: *mut u8, size: usize, new: usize) -> bool {
        let (start, len) = (self.start.load(Ordering::Acquire), self.len.load(Ordering::Acquire));
        let Some(offset) = ptr.addr().checked_sub(start).filter(|offset| *offset < len) else { return false };
        let end = |size: usize| offset.checked_add(size.checked_next_multiple_of(UNIT)?);
        let (Some(before), Some(after)) = (end(size), end(new).filter(|end| *end <= len)) else { return false };
        self.used.compare_exchange(before, after, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

static ROOM: Room = Room::none();

/// From now on nothing is asked of the system's allocator, and nothing given back to it. For a process in which only
/// tracing tasks are left. May be called in a signal handler, and more than once.
pub fn leave_system() {
    ROOM.open();
}

struct Heap;

#[global_allocator]
static HEAP: Heap = Heap;

// SAFETY: memory is the system's, or of the room, which hands out no byte twice before it is given back.
unsafe impl GlobalAlloc for Heap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if ROOM.is_open() {
            return ROOM.take(layout).unwrap_or(null_mut());
        }
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if !ROOM.is_open() {
            // SAFETY: as the caller promises.
            return unsafe { System.alloc_zeroed(layout) };
        }
        let ptr = ROOM.take(layout).unwrap_or(null_mut());
        if !ptr.is_null() {
            // SAFETY: so much was handed out.
            unsafe { ptr.write_bytes(0, layout.size()) };
        }
        ptr
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        if ROOM.is_open() {
            ROOM.resize_last(ptr, layout.size(), 0);
        } else {
            // SAFETY: as the caller promises; before the room was opened everything was the system's.
            unsafe { System.dealloc(ptr, layout) }
        }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if !ROOM.is_open() {
            // SAFETY: as the caller promises.
            return unsafe { System.realloc(ptr, layout, size) };
        }
        if ROOM.resize_last(ptr, layout.size(), size) {
            return ptr;
        }
        // SAFETY: `size` is right for this alignment, as the caller promises.
        let new = unsafe { self.alloc(Layout::from_size_align_unchecked(size, layout.align())) };
        if !new.is_null() {
            // SAFETY: both have so many bytes, and the new ones are nobody else's.
            unsafe { new.copy_from_nonoverlapping(ptr, size.min(layout.size())) };
        }
        new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_room_hands_out_each_byte_once_and_takes_back_the_last() {
        let room = Room::none();
        assert!(!room.is_open());
        room.open();
        room.open();
        let layout = |size, align| Layout::from_size_align(size, align).expect("a layout");
        let a = room.take(layout(5, 1)).expect("fits");
        let b = room.take(layout(100, 64)).expect("fits");
        assert_eq!((b.addr() % 64, b.addr() - a.addr()), (0, 64));
        assert!(!room.resize_last(a, 5, 40), "not the last");
        assert!(room.resize_last(b, 100, 5000) && !room.resize_last(b, 100, 0));
        // SAFETY: so much was handed out.
        unsafe { b.write_bytes(7, 5000) };
        assert!(room.resize_last(b, 5000, 0));
        assert_eq!(room.take(layout(16, 16)), Some(b));
        assert_eq!(room.take(layout(SIZES[0], 1)), None);
        let elsewhere = (&raw const room).cast_mut().cast();
        assert!(!room.resize_last(elsewhere, 1, 0));
    }
}
