//! One record: from its bytes to what it says.

use super::attrs::{Attr, Attrs};
use super::buildids::{self, FileBuildId};
use super::bytes::Cursor;
use super::features;
use super::layout::{event_type, misc, record, sample, sched_switch, AUXTRACE_INTEL_PT};
use super::names::Names;
use super::ptinfo::{time_conv, PtInfo, SwitchSource};
use super::records::{
    AuxChunk, AuxFlags, Body, BuildId, ChunkKind, Comm, CpuMode, FileId, Mmap, Record, SampleId, Task, MAX_BUILD_ID,
};
use super::sample as samples;
use crate::pt::Cpu;

/// `tid` and `cpu` of an AUXTRACE that has none, and the cpu of a sample id likewise.
const NONE: u32 = u32::MAX;

/// Longest name of a file or symbol, in bytes.
const MAX_NAME: usize = 4096;

/// What is known so far of the file that a record is in.
#[derive(Debug, Default)]
pub(super) struct Known {
    pub attrs: Attrs,
    pub names: Names,
    pub info: Option<PtInfo>,
    pub build_ids: Vec<FileBuildId>,
    pub cpu: Option<Cpu>,
    /// Offset in the file up to which HEADER_ATTR and HEADER_BUILD_ID records have been taken.
    pub attrs_until: u64,
}

/// The bytes of a record (its header included), and what its header says.
#[derive(Clone, Copy)]
pub(super) struct Raw<'a> {
    pub kind: u32,
    pub misc: u16,
    pub bytes: &'a [u8],
    pub file_offset: u64,
}

impl<'a> Raw<'a> {
    pub fn payload(&self) -> &'a [u8] {
        self.bytes.get(8..).unwrap_or_default()
    }

    fn end(&self) -> u64 {
        self.file_offset.saturating_add(self.bytes.len() as u64)
    }
}

impl Known {
    pub fn parse(&mut self, raw: &Raw<'_>) -> Record {
        let file_offset = raw.file_offset;
        if raw.kind == record::SAMPLE {
            let (id, body) = self.sample(raw).unwrap_or((SampleId::default(), Body::Malformed));
            return Record { file_offset, id, body };
        }
        let mut id = SampleId::default();
        if raw.kind < record::USER_TYPE_START {
            let sample_type = self.attrs.of_record(raw.bytes).map_or(0, |attr| attr.sample_type);
            id = sample_id(raw.payload(), sample_type);
        }
        let body = self.body(raw, &mut id).unwrap_or(Body::Malformed);
        Record { file_offset, id, body }
    }

    fn body(&mut self, raw: &Raw<'_>, id: &mut SampleId) -> Option<Body> {
        let mut fields = Cursor::new(raw.payload());
        Some(match raw.kind {
            record::COMM => Body::Comm {
                pid: fields.u32()?,
                tid: fields.u32()?,
                comm: Comm::new(fields.text()),
                exec: raw.misc & misc::COMM_EXEC != 0,
            },
            record::MMAP | record::MMAP2 => Body::Mmap(self.mmap(raw, &mut fields)?),
            record::FORK => Body::Fork(task(raw.misc, &mut fields, id)?),
            record::EXIT => Body::Exit(task(raw.misc, &mut fields, id)?),
            record::ITRACE_START => Body::ItraceStart { pid: fields.u32()?, tid: fields.u32()? },
            record::SWITCH => Body::Switch { out: raw.misc & misc::SWITCH_OUT != 0 },
            record::SWITCH_CPU_WIDE => {
                let (other_pid, other_tid) = (fields.u32()?, fields.u32()?);
                Body::SwitchCpuWide { out: raw.misc & misc::SWITCH_OUT != 0, other_pid, other_tid }
            }
            record::LOST => {
                let _event_id = fields.u64()?;
                Body::Lost { count: fields.u64()? }
            }
            record::LOST_SAMPLES => Body::LostSamples { count: fields.u64()? },
            record::AUX => {
                let (offset, len) = (fields.u64()?, fields.u64()?);
                Body::AuxData { offset, len, flags: AuxFlags(fields.u64()?) }
            }
            record::KSYMBOL => {
                let (addr, len) = (fields.u64()?, fields.u32()?);
                let (_kind, flags) = (fields.u16()?, fields.u16()?);
                let name = self.names.add(cut(fields.text()));
                Body::Ksymbol { addr, len, unregister: flags & misc::KSYMBOL_UNREGISTER != 0, name }
            }
            record::TEXT_POKE => {
                let (addr, old_len, new_len) = (fields.u64()?, fields.u16()?, fields.u16()?);
                let (old, new) = (fields.take(old_len.into())?, fields.take(new_len.into())?);
                Body::TextPoke { addr, old: self.names.add(old), new: self.names.add(new) }
            }
            record::AUX_OUTPUT_HW_ID => Body::AuxOutputHwId { hw_id: fields.u64()? },
            record::AUXTRACE => Body::Aux(self.auxtrace(&mut fields, raw.end())?),
            record::AUXTRACE_INFO => self.auxtrace_info(&mut fields)?,
            record::TIME_CONV => time_conv(&mut fields).map_or(Body::Other, Body::Time),
            record::AUXTRACE_ERROR => Body::AuxError,
            record::FINISHED_ROUND => Body::FinishedRound,
            record::COMPRESSED | record::COMPRESSED2 => Body::Compressed,
            // Once, however often it is read.
            record::HEADER_ATTR if self.attrs_until > raw.file_offset => Body::Other,
            record::HEADER_ATTR => {
                self.attrs_until = raw.end();
                self.attrs.push_record(raw.payload()).map(|()| Body::Other)?
            }
            record::HEADER_BUILD_ID => {
                if self.attrs_until <= raw.file_offset && self.build_ids.len() < buildids::MAX_FILES {
                    self.attrs_until = raw.end();
                    self.build_ids.append(&mut buildids::parse(raw.bytes));
                }
                Body::Other
            }
            record::HEADER_FEATURE => {
                match u32::try_from(fields.u64()?) {
                    Ok(features::EVENT_DESC) => {
                        let _ = self.attrs.take_names(fields.rest());
                    }
                    Ok(features::CPUID) => self.cpu = features::string(fields.rest()).and_then(Cpu::parse),
                    _ => {}
                }
                Body::Other
            }
            _ => Body::Other,
        })
    }

    fn mmap(&mut self, raw: &Raw<'_>, fields: &mut Cursor<'_>) -> Option<Mmap> {
        let (pid, tid) = (fields.u32()?, fields.u32()?);
        let (addr, len, file_offset) = (fields.u64()?, fields.u64()?, fields.u64()?);
        let (mut file, mut flags) = (FileId::Unknown, 0);
        let prot = if raw.kind == record::MMAP2 {
            file = file_id(raw.misc, fields.take(24)?)?;
            let prot = fields.u32()?;
            flags = fields.u32()?;
            prot
        } else if raw.misc & misc::MMAP_DATA != 0 {
            libc::PROT_READ as u32
        } else {
            (libc::PROT_READ | libc::PROT_EXEC) as u32
        };
        let path = self.names.add(cut(fields.text()));
        Some(Mmap { pid, tid, addr, len, file_offset, prot, flags, mode: cpu_mode(raw.misc), file, path })
    }

    fn auxtrace(&self, fields: &mut Cursor<'_>, file_offset: u64) -> Option<AuxChunk> {
        let (len, stream_offset, tsc_reference) = (fields.u64()?, fields.u64()?, fields.u64()?);
        let (idx, tid, cpu) = (fields.u32()?, fields.u32()?, fields.u32()?);
        let some = |n| (n != NONE).then_some(n);
        let (tid, cpu) = (some(tid), some(cpu));
        let kind = match &self.info {
            Some(info) if info.snapshot => ChunkKind::Snapshot,
            _ => ChunkKind::Stream,
        };
        Some(AuxChunk { file_offset, len, stream_offset, tsc_reference, idx, tid, cpu, kind })
    }

    fn auxtrace_info(&mut self, fields: &mut Cursor<'_>) -> Option<Body> {
        if fields.u32()? != AUXTRACE_INTEL_PT {
            return Some(Body::ForeignTrace);
        }
        let _reserved = fields.u32()?;
        let info = PtInfo::parse(*fields)?;
        let conv = info.conv;
        self.info = Some(info);
        Some(conv.map_or(Body::Other, Body::Time))
    }

    fn sample(&self, raw: &Raw<'_>) -> Option<(SampleId, Body)> {
        let Some(attr) = self.attrs.of_sample(raw.payload()) else {
            return Some((SampleId::default(), Body::Sample));
        };
        let Some(sample) = samples::parse(raw.payload(), attr) else {
            // Damage matters in those that something is taken from.
            let needed = attr.samples(sample::AUX) || self.is_sched_switch(attr);
            return (!needed).then_some((SampleId::default(), Body::Sample));
        };
        if let Some(aux) = sample.aux.filter(|aux| !aux.is_empty()) {
            let behind = sample_len_behind(raw.payload(), aux)?;
            let chunk = self.sampled(&sample.id, raw.end().saturating_sub(behind), aux.len() as u64);
            return Some((sample.id, Body::Aux(chunk)));
        }
        let body = sample.raw.filter(|_| self.is_sched_switch(attr)).and_then(sched_switch_of);
        Some((sample.id, body.unwrap_or(Body::Sample)))
    }

    /// The stream of a sample's trace is that of its CPU, or of its thread where threads are recorded.
    fn sampled(&self, id: &SampleId, file_offset: u64, len: u64) -> AuxChunk {
        let info = self.info.as_ref();
        let per_cpu = info.is_some_and(|info| info.per_cpu) && id.cpu.is_some();
        let (tid, cpu) = if per_cpu { (None, id.cpu) } else { (id.tid, None) };
        let conv = info.and_then(|info| info.conv);
        let tsc_reference = conv.zip(id.ns).map_or(0, |(conv, ns)| conv.ns_to_tsc(ns));
        let idx = cpu.or(tid).unwrap_or(0);
        AuxChunk { file_offset, len, stream_offset: 0, tsc_reference, idx, tid, cpu, kind: ChunkKind::Sample }
    }

    /// A file that was not finished has no names: then it is the tracepoint that was recorded for Intel PT.
    fn is_sched_switch(&self, attr: &Attr) -> bool {
        attr.kind == event_type::TRACEPOINT
            && match &attr.name {
                Some(name) => &**name == "sched:sched_switch",
                None => self.info.as_ref().is_some_and(|info| info.switches == SwitchSource::Tracepoint),
            }
    }
}

/// Bytes of `payload` from the start of `part` of it to its end.
fn sample_len_behind(payload: &[u8], part: &[u8]) -> Option<u64> {
    let start = (part.as_ptr() as usize).checked_sub(payload.as_ptr() as usize)?;
    payload.len().checked_sub(start).map(|len| len as u64)
}

/// Its layout in memory has been the same since there are 64-bit kernels with it.
fn sched_switch_of(raw: &[u8]) -> Option<Body> {
    let word = |at: usize| raw.get(at..).and_then(|rest| Cursor::new(rest).u32());
    let (prev_tid, next_tid) = (word(sched_switch::PREV_PID)?, word(sched_switch::NEXT_PID)?);
    Some(Body::SchedSwitch { prev_tid, next_tid })
}

fn task(flags: u16, fields: &mut Cursor<'_>, id: &mut SampleId) -> Option<Task> {
    let (pid, parent_pid, tid, parent_tid) = (fields.u32()?, fields.u32()?, fields.u32()?, fields.u32()?);
    id.ns = id.ns.or_else(|| fields.u64());
    Some(Task { pid, tid, parent_pid, parent_tid, exec: flags & misc::FORK_EXEC != 0 })
}

/// The 24 bytes that tell which file it is.
fn file_id(flags: u16, bytes: &[u8]) -> Option<FileId> {
    let mut fields = Cursor::new(bytes);
    if flags & misc::MMAP_BUILD_ID != 0 {
        let len = usize::from(*bytes.first()?).min(MAX_BUILD_ID);
        return Some(FileId::BuildId(BuildId::new(bytes.get(4..4 + len)?)));
    }
    let (major, minor) = (fields.u32()?, fields.u32()?);
    Some(FileId::Inode { major, minor, inode: fields.u64()?, generation: fields.u64()? })
}

fn cpu_mode(flags: u16) -> CpuMode {
    match flags & misc::CPUMODE_MASK {
        1 => CpuMode::Kernel,
        misc::USER => CpuMode::User,
        3 => CpuMode::Hypervisor,
        4 => CpuMode::GuestKernel,
        5 => CpuMode::GuestUser,
        _ => CpuMode::Unknown,
    }
}

fn cut(name: &[u8]) -> &[u8] {
    name.get(..MAX_NAME).unwrap_or(name)
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn known(sample_type: u64) -> Known {
        let mut known = Known::default();
        for (id, kind) in [(1u64, 8), (2, event_type::TRACEPOINT)] {
            let attr =
                Attr { kind, sample_type, flags: super::super::layout::attr_flag::SAMPLE_ID_ALL, ..Attr::default() };
            known.attrs.push(attr, &id.to_le_bytes());
        }
        known.info = Some(PtInfo { switches: SwitchSource::Tracepoint, per_cpu: true, ..PtInfo::default() });
        known
    }

    fn parse(kind: u32, misc: u16, payload: &[u8], sample_type: u64) -> Record {
        let bytes = [&[0; 8], payload].concat();
        known(sample_type).parse(&Raw { kind, misc, bytes: &bytes, file_offset: 1000 })
    }

    #[test]
    fn trace_in_a_sample_is_where_it_stands_in_the_file() {
        let payload = [&7u64.to_le_bytes()[..], &3u64.to_le_bytes(), &4u64.to_le_bytes(), b"abcd"].concat();
        let record = parse(record::SAMPLE, 0, &payload, sample::TIME | sample::CPU | sample::AUX);
        let Body::Aux(chunk) = record.body else { panic!("{record:?}") };
        assert_eq!((chunk.file_offset, chunk.len, chunk.cpu, chunk.tid), (1000 + 8 + 24, 4, Some(3), None));
        assert_eq!((chunk.kind, record.id.ns), (ChunkKind::Sample, Some(7)));
    }

    proptest! {
        #[test]
        fn no_record_panics(
            kind in 0u32..90, misc: u16, sample_type in 0u64..1 << 25,
            payload in prop::collection::vec(prop_oneof![Just(0u8), any::<u8>()], 0..200),
        ) {
            let record = parse(kind, misc, &payload, sample_type);
            let _ = (record.runs(), record.body.problem());
        }
    }
}
