//! What the walk yields.

use std::fmt;
use std::mem::MaybeUninit;

use super::pieces::Skipped;
use crate::pt::Kind;

/// Why control went elsewhere.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BranchKind {
    Cond = 0,
    Jump = 1,
    IndirectJump = 2,
    Call = 3,
    IndirectCall = 4,
    Return = 5,
    /// Into the kernel: `syscall`, `sysenter`.
    Syscall = 6,
    /// `sysret`, `sysexit`, `iret`, `uiret`, `retf`.
    FarReturn = 7,
    /// Asynchronous: an interrupt, a fault, a signal. `from` is the instruction that was to run next.
    Interrupt = 8,
    /// Tracing goes on: `from` is 0.
    TraceStart = 9,
    /// Tracing ends, and no instruction explains it.
    TraceEnd = 10,
    /// A transaction is aborted.
    TxAbort = 11,
    /// Far jump or call, `int`, `vmcall` and their like.
    FarOther = 12,
}

/// A taken branch, direct jumps and calls included. `to` is 0 where the trace does not tell it: the kernel, say.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Branch {
    pub from: u64,
    pub to: u64,
    pub kind: BranchKind,
    padding: [u8; 7],
}

impl Branch {
    #[must_use]
    pub fn new(from: u64, to: u64, kind: BranchKind) -> Self {
        Self { from, to, kind, padding: [0; 7] }
    }

    /// As it stands in memory on a little-endian machine.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 24] {
        let mut bytes = [0; 24];
        let words = [self.from, self.to, u64::from(self.kind as u8)];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }
}

/// What the walk cannot know, or could not expect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finding {
    /// Bytes that are no packet; decoding goes on at the next PSB.
    BadPacket,
    /// The trace ends inside a packet.
    CutPacket,
    /// Control is in code that nothing is known of.
    NoCode { ip: u64 },
    /// The packet does not fit the instruction at `ip`.
    Mismatch { ip: u64 },
    /// Direct jumps lead round in circles, and no packet tells how the program left them.
    Endless { ip: u64 },
    /// A packet that cannot come while tracing is off.
    TracingOff,
    /// A packet that cannot come while tracing is on.
    TracingOn,
    /// Nothing leads from `from` to the address that a packet tells. The packet is believed, and nothing is lost.
    Unreachable { from: u64, ip: u64 },
    /// Here is the kernel, whose code is not known: its branches are left out, those of programs are not. Told once for
    /// a part of the trace.
    Kernel { ip: u64 },
}

impl Finding {
    /// Whether branches may be missing.
    #[must_use]
    pub fn loses_branches(self) -> bool {
        !matches!(self, Self::Unreachable { .. } | Self::TracingOn | Self::Kernel { .. })
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadPacket => f.write_str("bytes that are no packet; the flow goes on at the next PSB"),
            Self::CutPacket => f.write_str("the trace ends inside a packet"),
            Self::NoCode { ip } => write!(f, "no code is known at {ip:#x}"),
            Self::Kernel { ip } => write!(f, "the kernel's code is not known, at {ip:#x}: its branches are left out"),
            Self::Mismatch { ip } => write!(f, "the trace does not fit the instruction at {ip:#x}"),
            Self::Endless { ip } => write!(f, "direct jumps at {ip:#x} lead round in circles"),
            Self::TracingOff => f.write_str("a branch while tracing is off"),
            Self::TracingOn => f.write_str("tracing starts while it is on"),
            Self::Unreachable { from, ip } => {
                write!(f, "nothing leads from {from:#x} to {ip:#x}, which the trace tells")
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A PTWRITE; `ip` where the trace has it.
    Word {
        value: u64,
        ip: Option<u64>,
    },
    /// Power states, transactions, VMs, events of event trace: the packet, and the address that came with it.
    Event {
        packet: Kind,
        ip: Option<u64>,
    },
    /// The CPU dropped packets.
    Overflow,
    /// A part of the stream was left out.
    Skipped(Skipped),
    Finding(Finding),
}

/// Something that is not a branch; it comes after `at` branches of the batch. `offset` in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    pub at: u32,
    pub tsc: u64,
    pub offset: u64,
    pub what: What,
}

/// A stretch of one stream, in program order.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    pub branches: Vec<Branch>,
    /// (branches before, TSC): it holds from there on.
    pub times: Vec<(u32, u64)>,
    pub marks: Vec<Mark>,
}

/// The end of a batch, at hand.
pub(super) struct Open<'a> {
    room: &'a mut [MaybeUninit<Branch>],
    before: usize,
    len: usize,
}

impl Open<'_> {
    /// There is room for `more` after the branches so far.
    #[inline(always)]
    pub fn has_room(&self, more: usize) -> bool {
        self.len + more <= self.room.len()
    }

    /// How many branches the batch has now.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.before + self.len
    }

    /// Pushes `times` (0 or 1) of it, by the same instructions in both cases.
    ///
    /// # Safety
    ///
    /// There is room for one more, and `kind` is one of [`BranchKind`].
    #[inline(always)]
    pub unsafe fn push_if(&mut self, times: u8, (from, to): (u64, u64), kind: u8) {
        debug_assert!(self.has_room(1) && times <= 1 && kind <= BranchKind::FarOther as u8);
        // SAFETY: there is room; these are a branch's 24 bytes on a little-endian machine, its padding 0.
        unsafe {
            let room = self.room.as_mut_ptr().add(self.len).cast::<[u64; 3]>();
            room.write([from, to, kind.into()]);
        }
        self.len += usize::from(times);
    }
}

const _: () = assert!(cfg!(target_endian = "little") && size_of::<Branch>() == 24);

/// Branches of a batch, and marks: then it is handed over.
const FULL: usize = 1 << 13;

impl Batch {
    pub fn clear(&mut self) {
        self.branches.clear();
        self.times.clear();
        self.marks.clear();
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.branches.is_empty() && self.marks.is_empty()
    }

    #[must_use]
    pub fn is_full(&self) -> bool {
        self.branches.len() >= FULL || self.marks.len() >= FULL || self.times.len() >= FULL
    }

    pub(super) fn len(&self) -> u32 {
        // A batch is handed over long before.
        self.branches.len() as u32
    }

    #[inline]
    pub(super) fn push(&mut self, from: u64, to: u64, kind: BranchKind) {
        self.branches.push(Branch::new(from, to, kind));
    }

    /// For many branches in a row; `close` takes how many there are then.
    #[inline(always)]
    pub(super) fn open(&mut self) -> Open<'_> {
        let len = self.branches.len();
        Open { room: self.branches.spare_capacity_mut(), before: len, len: 0 }
    }

    #[inline(always)]
    pub(super) fn close(&mut self, len: usize) {
        debug_assert!(len >= self.branches.len() && len <= self.branches.capacity());
        // SAFETY: an `Open` of this batch has written all up to there, in the room that there was.
        unsafe { self.branches.set_len(len) };
    }

    #[cold]
    pub(super) fn make_room(&mut self) {
        self.branches.reserve(2 * FULL);
    }

    /// What was left out of a stream before what comes next.
    pub(super) fn skipped(&mut self, skipped: &[(u64, Skipped)]) {
        let at = self.len();
        self.marks.extend(skipped.iter().map(|&(offset, what)| Mark { at, tsc: 0, offset, what: What::Skipped(what) }));
    }

    /// The time from here on.
    pub(super) fn time(&mut self, tsc: u64) {
        let at = self.len();
        match self.times.last_mut() {
            Some(last) if last.0 == at => last.1 = tsc,
            _ => self.times.push((at, tsc)),
        }
    }
}
