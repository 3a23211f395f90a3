//! What records say. Kinds that neither values nor flow need are `Other`.

use super::names::Name;
use crate::clock::TimeConv;

/// Longest name the kernel gives a thread, without its zero.
pub const MAX_COMM: usize = 15;
/// Longest build id: a SHA-1.
pub const MAX_BUILD_ID: usize = 20;

/// A thread's name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Comm {
    bytes: [u8; MAX_COMM],
    len: u8,
}

impl Comm {
    pub const EMPTY: Self = Self { bytes: [0; MAX_COMM], len: 0 };

    #[must_use]
    pub fn new(name: &[u8]) -> Self {
        let mut comm = Self::default();
        for (to, from) in comm.bytes.iter_mut().zip(name) {
            *to = *from;
            comm.len += 1;
        }
        comm
    }

    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.len)).unwrap_or_default()
    }
}

/// Who, when and where; what a record does not tell is `None`. perf writes zeros in all of them for what it gathered
/// itself before it recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleId {
    pub pid: Option<u32>,
    pub tid: Option<u32>,
    /// ns of the clock of the recording.
    pub ns: Option<u64>,
    pub cpu: Option<u32>,
}

/// What a chunk of trace is a part of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ChunkKind {
    /// A stream without holes, but for those that are told.
    #[default]
    Stream,
    /// A picture of the last trace: holes before it, or bytes that the one before had already.
    Snapshot,
    /// The last trace before a sample; the same holds.
    Sample,
}

/// Where the bytes of a chunk of trace are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuxChunk {
    pub file_offset: u64,
    /// Bytes.
    pub len: u64,
    /// Of the chunk in its stream, in bytes. Means something in a `Stream` only.
    pub stream_offset: u64,
    /// A TSC at or after the end of the chunk; 0 where it has none.
    pub tsc_reference: u64,
    pub idx: u32,
    /// `None` for a stream of a CPU.
    pub tid: Option<u32>,
    /// `None` for a stream of a thread.
    pub cpu: Option<u32>,
    pub kind: ChunkKind,
}

/// In which mode of the CPU a record was made, or what an MMAP is part of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CpuMode {
    #[default]
    Unknown,
    Kernel,
    User,
    Hypervisor,
    GuestKernel,
    GuestUser,
}

/// Which file a mapping shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileId {
    Unknown,
    Inode { major: u32, minor: u32, inode: u64, generation: u64 },
    BuildId(BuildId),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct BuildId {
    bytes: [u8; MAX_BUILD_ID],
    len: u8,
}

impl BuildId {
    /// What is longer than 20 bytes is cut.
    #[must_use]
    pub fn new(id: &[u8]) -> Self {
        let mut build_id = Self::default();
        for (to, from) in build_id.bytes.iter_mut().zip(id) {
            *to = *from;
            build_id.len += 1;
        }
        build_id
    }

    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..usize::from(self.len)).unwrap_or_default()
    }
}

/// MMAP and MMAP2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mmap {
    /// `u32::MAX` for the kernel's own.
    pub pid: u32,
    pub tid: u32,
    pub addr: u64,
    pub len: u64,
    /// Bytes.
    pub file_offset: u64,
    /// `PROT_*`. An MMAP tells only whether it can be executed.
    pub prot: u32,
    /// `MAP_*`; 0 in an MMAP.
    pub flags: u32,
    pub mode: CpuMode,
    pub file: FileId,
    pub path: Name,
}

/// FORK and EXIT: the thread, and its parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Task {
    pub pid: u32,
    pub tid: u32,
    pub parent_pid: u32,
    pub parent_tid: u32,
    /// Of a FORK: another program than the parent's runs in it, as perf tells of processes that it found.
    pub exec: bool,
}

/// Flags of an AUX record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AuxFlags(pub u64);

impl AuxFlags {
    /// The buffer was full: trace is missing after it.
    pub const TRUNCATED: u64 = 1;
    /// The buffer is a ring that is overwritten: a snapshot.
    pub const OVERWRITE: u64 = 1 << 1;
    /// There are gaps in it.
    pub const PARTIAL: u64 = 1 << 2;
    /// Another user of the trace unit was in the way.
    pub const COLLISION: u64 = 1 << 3;

    #[must_use]
    pub fn has(self, flag: u64) -> bool {
        self.0 & flag != 0
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    Comm {
        pid: u32,
        tid: u32,
        comm: Comm,
        /// The process has a new program, and none of its old mappings.
        exec: bool,
    },
    Mmap(Mmap),
    Fork(Task),
    Exit(Task),
    /// The trace of this thread begins.
    ItraceStart {
        pid: u32,
        tid: u32,
    },
    /// The thread of the record's id leaves its CPU, or comes onto it.
    Switch {
        out: bool,
    },
    /// The same, of all threads; `other` is who comes after it (`out`) or was before it.
    SwitchCpuWide {
        out: bool,
        other_pid: u32,
        other_tid: u32,
    },
    /// A sample of the tracepoint: the CPU of the record's id goes from one thread to another.
    SchedSwitch {
        prev_tid: u32,
        next_tid: u32,
    },
    Lost {
        count: u64,
    },
    LostSamples {
        count: u64,
    },
    /// New bytes are in an AUX buffer, of the CPU or thread of the record's id.
    AuxData {
        offset: u64,
        len: u64,
        flags: AuxFlags,
    },
    AuxError,
    /// The bytes of a chunk of trace.
    Aux(AuxChunk),
    Time(TimeConv),
    /// A trace that is not Intel PT's.
    ForeignTrace,
    /// Code of the kernel that comes (or goes): BPF programs, trampolines.
    Ksymbol {
        addr: u64,
        len: u32,
        unregister: bool,
        name: Name,
    },
    /// The kernel changes its own code at `addr`. What is new has `old` empty, what goes has `new` empty.
    TextPoke {
        addr: u64,
        old: Name,
        new: Name,
    },
    /// Which hardware buffer an event writes to that has its data in the trace (PEBS).
    AuxOutputHwId {
        hw_id: u64,
    },
    FinishedRound,
    /// What follows in compressed records cannot be unpacked.
    Compressed,
    Sample,
    Other,
    /// Too short for what its type has to hold.
    Malformed,
}

impl Body {
    /// What is wrong, for records that say that something is.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        Some(match self {
            Self::AuxData { flags, .. } if flags.has(AuxFlags::TRUNCATED) => {
                "the recorder was too slow: trace is missing here"
            }
            Self::AuxData { flags, .. } if flags.has(AuxFlags::PARTIAL) => {
                "the trace has a gap here: the trace unit was taken away (a virtual machine ran)"
            }
            Self::AuxData { flags, .. } if flags.has(AuxFlags::COLLISION) => {
                "the trace has a gap here: the trace unit had another user"
            }
            Self::AuxError => "the recorder notes an error of its trace",
            Self::ForeignTrace => "a trace that is not Intel PT's",
            Self::Compressed => "compressed records that cannot be unpacked: they are not read from here on",
            Self::Malformed => "a record that is too short for its type",
            _ => return None,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    /// Of the record; of what it was packed in where it was compressed.
    pub file_offset: u64,
    pub id: SampleId,
    pub body: Body,
}

/// Who runs on a CPU from the time of a record on; `tid` is `None` where it is not told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    pub cpu: Option<u32>,
    pub pid: Option<u32>,
    pub tid: Option<u32>,
}

impl Record {
    /// What the record tells about who runs, if anything.
    #[must_use]
    pub fn runs(&self) -> Option<Runs> {
        let SampleId { pid, tid, cpu, .. } = self.id;
        Some(match self.body {
            Body::Switch { out: false } | Body::SwitchCpuWide { out: false, .. } => Runs { cpu, pid, tid },
            Body::Switch { out: true } => Runs { cpu, pid: None, tid: None },
            Body::SwitchCpuWide { out: true, other_pid, other_tid } => {
                Runs { cpu, pid: Some(other_pid), tid: Some(other_tid) }
            }
            Body::SchedSwitch { next_tid, .. } => Runs { cpu, pid: None, tid: Some(next_tid) },
            Body::ItraceStart { pid, tid } => Runs { cpu, pid: Some(pid), tid: Some(tid) },
            _ => return None,
        })
    }
}
