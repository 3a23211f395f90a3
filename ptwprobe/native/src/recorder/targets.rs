//! The processes that are recorded: their rings, and the stubs whose records may come through them.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use super::identity::Identity;
use super::threads::Known;
use super::RecorderError;
use crate::ring::{counted_since, Mark, Reader, RingMemory, MAX_ARGS};

/// Ids below are the kernel's.
pub const FIRST_EVENT_ID: u16 = 0x8000;

/// One ring and what the rounds know about it.
pub struct Ring {
    pub index: u16,
    pub reader: Reader,
    /// Every record with an earlier time has been read.
    pub clear_tsc: u64,
    /// The hole at which the reader stands, and since when.
    pub hole: Option<(Mark, Instant)>,
    /// The thread word of the last record, and what it stands for.
    pub last_thread: Option<(u64, Known)>,
    /// Counted, but not told in the file yet.
    pub torn: u64,
}

impl Ring {
    fn new(memory: &Arc<RingMemory>, index: u32, since_tsc: u64) -> Option<Self> {
        let reader = Reader::new(Arc::clone(memory), index)?;
        // A ring's number has 12 bits.
        Some(Ring { index: index as u16, reader, clear_tsc: since_tsc, hole: None, last_thread: None, torn: 0 })
    }
}

/// The stubs of one target.
#[derive(Default)]
pub struct Stubs {
    /// By event id, from `FIRST_EVENT_ID` up: the address of each word in the stub, header first.
    by_event: Vec<Option<Box<[u64]>>>,
}

impl Stubs {
    /// The addresses of the words of `event_id`, header first.
    #[inline]
    pub fn slots(&self, event_id: u16) -> Option<&[u64]> {
        self.by_event.get(usize::from(event_id.checked_sub(FIRST_EVENT_ID)?))?.as_deref()
    }

    fn set(&mut self, event_id: u16, slots: Vec<u64>) {
        let index = usize::from(event_id.saturating_sub(FIRST_EVENT_ID));
        if self.by_event.len() <= index {
            self.by_event.resize_with(index + 1, || None);
        }
        if let Some(stub) = self.by_event.get_mut(index) {
            *stub = Some(slots.into());
        }
    }
}

/// Number of arguments of each event.
#[derive(Default)]
pub struct Events(HashMap<u16, usize>);

impl Events {
    pub fn add(&mut self, event_id: u16, nargs: usize) -> Result<(), RecorderError> {
        if event_id < FIRST_EVENT_ID || nargs > MAX_ARGS {
            return Err(RecorderError::Event { event_id, nargs });
        }
        self.0.insert(event_id, nargs);
        Ok(())
    }
}

pub struct Target {
    pub pid: i32,
    pub identity: Identity,
    pub memory: Option<Arc<RingMemory>>,
    /// Empty once the target was dropped; its threads may have held hits.
    pub rings: Vec<Ring>,
    /// No hit is older.
    pub since_tsc: u64,
    pub stubs: Stubs,
    lost_no_ring: u64,
}

impl Target {
    pub fn new(pid: i32, memory: Arc<RingMemory>, comm: Vec<u8>) -> Self {
        let since_tsc = memory.created_tsc();
        let rings = (0..memory.layout().rings).filter_map(|index| Ring::new(&memory, index, since_tsc)).collect();
        let identity = Identity::new(pid, comm);
        Target { pid, identity, memory: Some(memory), rings, lost_no_ring: 0, since_tsc, stubs: Stubs::default() }
    }

    pub fn is_live(&self) -> bool {
        self.memory.is_some()
    }

    /// The stub of `event_id` has its words at `slots`.
    pub fn add_stub(&mut self, events: &Events, event_id: u16, slots: Vec<u64>) -> Result<(), RecorderError> {
        match events.0.get(&event_id) {
            Some(nargs) if slots.len() == nargs + 1 => self.stubs.set(event_id, slots),
            _ => return Err(RecorderError::Stub { event_id, slots: slots.len() }),
        }
        Ok(())
    }

    /// Hits on CPUs without a ring since the last call.
    pub fn take_lost_no_ring(&mut self) -> u64 {
        let Some(memory) = &self.memory else { return 0 };
        let now = memory.lost_no_ring();
        let new = counted_since(self.lost_no_ring, now);
        self.lost_no_ring = now;
        new
    }
}
