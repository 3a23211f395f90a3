//! One record: bytes to what it says. Kinds that no trace of values needs are `Other`.

use super::bytes::Cursor;
use super::layout::{misc, record, sample, AUXTRACE_INTEL_PT};
use crate::clock::TimeConv;

/// Longest name the kernel gives a thread, without its zero.
pub const MAX_COMM: usize = 15;

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

/// Who, when and where; what a record does not tell is `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleId {
    pub pid: Option<u32>,
    pub tid: Option<u32>,
    /// ns of the clock of the recording.
    pub ns: Option<u64>,
    pub cpu: Option<u32>,
}

/// Where the bytes of a chunk of trace are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuxChunk {
    pub file_offset: u64,
    /// Bytes.
    pub len: u64,
    /// Of the chunk in its stream, in bytes.
    pub stream_offset: u64,
    pub tsc_reference: u64,
    pub idx: u32,
    /// `None` for a stream of a CPU.
    pub tid: Option<u32>,
    /// `None` for a stream of a thread.
    pub cpu: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Body {
    Comm {
        pid: u32,
        tid: u32,
        comm: Comm,
    },
    /// Also an EXIT and an MMAP: they tell the process of a thread.
    Task {
        pid: u32,
        tid: u32,
        parent_tid: Option<u32>,
    },
    Switch {
        out: bool,
    },
    Lost {
        count: u64,
    },
    LostSamples {
        count: u64,
    },
    /// The kernel could not write all of the trace.
    AuxTruncated,
    AuxError,
    Aux(AuxChunk),
    Time(TimeConv),
    /// A trace that is not Intel PT's.
    ForeignTrace,
    FinishedRound,
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
            Self::AuxTruncated => "the recorder was too slow: trace is missing here",
            Self::AuxError => "the recorder notes an error of its trace",
            Self::ForeignTrace => "a trace that is not Intel PT's",
            Self::Compressed => "compressed records are not read",
            Self::Malformed => "a record that is too short for its type",
            _ => return None,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    pub file_offset: u64,
    pub id: SampleId,
    pub body: Body,
}

/// `PERF_AUX_FLAG_TRUNCATED`.
const AUX_TRUNCATED: u64 = 1;
/// `tid` and `cpu` of an AUXTRACE that has none, and the cpu of a sample id likewise.
const NONE: u32 = u32::MAX;

/// What a record's `bytes` (its header included) say. `sample_type` of its event: 0 where records have no sample id.
pub(super) fn parse(kind: u32, flags: u16, bytes: &[u8], file_offset: u64, sample_type: u64) -> Record {
    let payload = bytes.get(8..).unwrap_or_default();
    let id = if kind < record::USER_TYPE_START && kind != record::SAMPLE {
        sample_id(payload, sample_type)
    } else {
        SampleId::default()
    };
    let mut fields = Cursor::new(payload);
    let body = parse_body(kind, flags, &mut fields, file_offset + bytes.len() as u64).unwrap_or(Body::Malformed);
    Record { file_offset, id, body }
}

fn parse_body(kind: u32, flags: u16, fields: &mut Cursor<'_>, end: u64) -> Option<Body> {
    Some(match kind {
        record::COMM => Body::Comm { pid: fields.u32()?, tid: fields.u32()?, comm: Comm::new(fields.text()) },
        record::MMAP | record::MMAP2 => Body::Task { pid: fields.u32()?, tid: fields.u32()?, parent_tid: None },
        record::FORK => {
            let (pid, _ppid, tid) = (fields.u32()?, fields.u32()?, fields.u32()?);
            Body::Task { pid, tid, parent_tid: Some(fields.u32()?) }
        }
        record::EXIT => {
            let (pid, _ppid, tid) = (fields.u32()?, fields.u32()?, fields.u32()?);
            Body::Task { pid, tid, parent_tid: None }
        }
        record::SWITCH | record::SWITCH_CPU_WIDE => Body::Switch { out: flags & misc::SWITCH_OUT != 0 },
        record::LOST => {
            let _event_id = fields.u64()?;
            Body::Lost { count: fields.u64()? }
        }
        record::LOST_SAMPLES => Body::LostSamples { count: fields.u64()? },
        record::AUX => {
            let (_offset, _len) = (fields.u64()?, fields.u64()?);
            if fields.u64()? & AUX_TRUNCATED != 0 {
                Body::AuxTruncated
            } else {
                Body::Other
            }
        }
        record::AUXTRACE => parse_auxtrace(fields, end)?,
        record::AUXTRACE_INFO => {
            if fields.u32()? == AUXTRACE_INTEL_PT {
                let (_reserved, _pmu_type) = (fields.u32()?, fields.u64()?);
                let conv = time_conv(fields);
                conv.filter(|_| fields.u64() != Some(0)).map_or(Body::Other, Body::Time)
            } else {
                Body::ForeignTrace
            }
        }
        record::TIME_CONV => time_conv(fields).map_or(Body::Other, Body::Time),
        record::AUXTRACE_ERROR => Body::AuxError,
        record::SAMPLE => Body::Sample,
        record::FINISHED_ROUND => Body::FinishedRound,
        record::COMPRESSED => Body::Compressed,
        _ => Body::Other,
    })
}

fn parse_auxtrace(fields: &mut Cursor<'_>, file_offset: u64) -> Option<Body> {
    let (len, stream_offset, tsc_reference) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let (idx, tid, cpu) = (fields.u32()?, fields.u32()?, fields.u32()?);
    let some = |n| (n != NONE).then_some(n);
    let (tid, cpu) = (some(tid), some(cpu));
    Some(Body::Aux(AuxChunk { file_offset, len, stream_offset, tsc_reference, idx, tid, cpu }))
}

/// Factors that give every counter value the same time are none.
fn time_conv(fields: &mut Cursor<'_>) -> Option<TimeConv> {
    let (shift, mult, zero) = (fields.u64()?, fields.u64()?, fields.u64()?);
    let shift = u16::try_from(shift).ok().filter(|&s| s < 64)?;
    let mult = u32::try_from(mult).ok().filter(|&m| m != 0)?;
    Some(TimeConv { shift, mult, zero })
}

/// The sample id stands at the end of the record.
fn sample_id(payload: &[u8], sample_type: u64) -> SampleId {
    let has = |bit: u64| sample_type & bit != 0;
    let order = [sample::TID, sample::TIME, sample::ID, sample::STREAM_ID, sample::CPU, sample::IDENTIFIER];
    let len = 8 * order.iter().filter(|&&bit| has(bit)).count();
    let mut id = SampleId::default();
    let Some(start) = payload.len().checked_sub(len) else { return id };
    let mut fields = Cursor::new(payload.get(start..).unwrap_or_default());
    for bit in order.into_iter().filter(|&bit| has(bit)) {
        let Some(word) = fields.u64() else { break };
        // Two 32-bit fields, the first in the low half.
        let (low, high) = (word as u32, (word >> 32) as u32);
        match bit {
            sample::TID => (id.pid, id.tid) = (Some(low), Some(high)),
            sample::TIME => id.ns = Some(word),
            sample::CPU => id.cpu = (low != NONE).then_some(low),
            _ => {}
        }
    }
    id
}
