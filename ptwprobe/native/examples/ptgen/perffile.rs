//! A perf.data as stock perf records it in per-thread mode: one PT event, one dummy event for the sideband.
//!
//! Written apart from the crate's writer, which knows recordings of values only. Layout: perf's
//! `perf.data-file-format.txt`, `linux/perf_event.h`, and for the words of AUXTRACE_INFO `tools/perf/util/intel-pt.h`.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::clock::{MAX_NONTURBO, MTC_SHIFT, TSC_CTC_D, TSC_CTC_N};
use crate::options::Options;

/// A TSC of 2 GHz: ns = 1,000,000 + tsc / 2.
const SHIFT: u64 = 20;
const MULT: u64 = 1 << 19;
const ZERO: u64 = 1_000_000;

const PMU_TYPE: u32 = 8;
const PT_ID: u64 = 1;
const DUMMY_ID: u64 = 2;
const HEADER_LEN: u64 = 104;
const ATTR_LEN: u64 = 128;
/// Trace of one AUXTRACE record, as perf finds it in its ring.
const CHUNK: usize = 16 << 20;
pub const PID: u32 = 1000;

const COMM: u32 = 3;
const FORK: u32 = 7;
const MMAP2: u32 = 10;
const AUXTRACE_INFO: u32 = 70;
const AUXTRACE: u32 = 71;
const FINISHED_ROUND: u32 = 68;
const TIME_CONV: u32 = 79;

pub struct Mapping {
    pub addr: u64,
    pub len: u64,
    pub file_offset: u64,
    pub path: String,
}

/// One thread's trace.
pub struct Stream {
    pub bytes: Vec<u8>,
    pub first_tsc: u64,
}

pub fn config(options: &Options) -> u64 {
    let f = &options.features;
    let style = options.style();
    let bits = [
        (0, true),
        (1, style.cyc),
        (4, f.power || f.mwait),
        (5, !f.noptwip),
        (9, style.mtc),
        (10, style.tsc),
        (11, !f.retc),
        (12, true),
        (13, true),
        (31, f.events),
    ];
    let flags = bits.iter().filter(|b| b.1).fold(0, |all, b| all | 1u64 << b.0);
    let mtc_period = if style.mtc { u64::from(MTC_SHIFT) << 14 } else { 0 };
    let psb_period = u64::from((options.psb / 2048).max(1).ilog2()).min(15) << 24;
    flags | mtc_period | psb_period
}

pub fn write(path: &Path, options: &Options, mappings: &[Mapping], filter: &str, streams: &[Stream]) -> io::Result<()> {
    let mut data = Records::default();
    data.auxtrace_info(filter);
    data.record(TIME_CONV, 0, None, &[SHIFT, MULT, ZERO, 0, 0, 1].map(u64::to_le_bytes).concat());
    data.comm(PID);
    for mapping in mappings {
        data.mmap2(mapping);
    }
    for thread in 1..streams.len() as u32 {
        data.fork(PID + thread);
        data.comm(PID + thread);
    }
    let mut trace_len = 0;
    for stream in streams {
        trace_len += stream.bytes.len() + stream.bytes.len().div_ceil(CHUNK) * 48;
    }
    let size = data.bytes.len() + trace_len + 8;
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    file.write_all(&head(config(options), size as u64))?;
    file.write_all(&data.bytes)?;
    for (index, stream) in streams.iter().enumerate() {
        let mut offset = 0;
        for chunk in stream.bytes.chunks(CHUNK) {
            file.write_all(&auxtrace(index as u32, stream.first_tsc, offset, chunk.len()))?;
            file.write_all(chunk)?;
            offset += chunk.len() as u64;
        }
    }
    let mut end = Records::default();
    end.record(FINISHED_ROUND, 0, None, &[]);
    file.write_all(&end.bytes)?;
    file.flush()
}

fn head(config: u64, data_size: u64) -> Vec<u8> {
    let ids_at = HEADER_LEN;
    let attrs_at = ids_at + 16;
    let entry = ATTR_LEN + 16;
    let data_at = attrs_at + 2 * entry;
    let magic = u64::from_le_bytes(*b"PERFILE2");
    let words = [magic, HEADER_LEN, entry, attrs_at, 2 * entry, data_at, data_size, 0, 0, 0, 0, 0, 0, PT_ID, DUMMY_ID];
    let mut out = words.map(u64::to_le_bytes).concat();
    // disabled, exclude_kernel, exclude_hv, sample_id_all; for the dummy mmap, comm, task, mmap2, comm_exec, context_switch.
    let common = 1 | 1 << 5 | 1 << 6 | 1 << 18;
    let sideband = 1 << 8 | 1 << 9 | 1 << 13 | 1 << 23 | 1 << 24 | 1 << 26;
    attr(&mut out, PMU_TYPE, config, common, ids_at);
    // PERF_TYPE_SOFTWARE, PERF_COUNT_SW_DUMMY.
    attr(&mut out, 1, 9, common | sideband, ids_at + 8);
    out
}

fn attr(out: &mut Vec<u8>, kind: u32, config: u64, flags: u64, id_at: u64) {
    let end = out.len() + ATTR_LEN as usize;
    // IP, TID, TIME, CPU, IDENTIFIER.
    let sample_type = 1 | 1 << 1 | 1 << 2 | 1 << 7 | 1 << 16;
    out.extend_from_slice(&kind.to_le_bytes());
    out.extend_from_slice(&(ATTR_LEN as u32).to_le_bytes());
    out.extend_from_slice(&[config, 1, sample_type, 0, flags].map(u64::to_le_bytes).concat());
    out.resize(end, 0);
    out.extend_from_slice(&[id_at, 8].map(u64::to_le_bytes).concat());
}

fn auxtrace(index: u32, tsc: u64, offset: u64, len: usize) -> Vec<u8> {
    let mut out = Records::head(AUXTRACE, 0, 48);
    out.extend_from_slice(&[len as u64, offset, tsc.max(1)].map(u64::to_le_bytes).concat());
    // No cpu: the stream is the thread's.
    out.extend_from_slice(&[index, PID + index, u32::MAX, 0].map(u32::to_le_bytes).concat());
    out
}

#[derive(Default)]
struct Records {
    bytes: Vec<u8>,
}

impl Records {
    fn head(kind: u32, misc: u16, size: u16) -> Vec<u8> {
        let mut out = kind.to_le_bytes().to_vec();
        out.extend_from_slice(&misc.to_le_bytes());
        out.extend_from_slice(&size.to_le_bytes());
        out
    }

    /// `tid`: a record of the kernel's, which ends in a sample id.
    fn record(&mut self, kind: u32, misc: u16, tid: Option<u32>, body: &[u8]) {
        let tail = match tid {
            Some(tid) => {
                let mut tail = [PID, tid].map(u32::to_le_bytes).concat();
                tail.extend_from_slice(&[ZERO, 0, DUMMY_ID].map(u64::to_le_bytes).concat());
                tail
            }
            None => Vec::new(),
        };
        self.bytes.extend_from_slice(&Self::head(kind, misc, (8 + body.len() + tail.len()) as u16));
        self.bytes.extend_from_slice(body);
        self.bytes.extend_from_slice(&tail);
    }

    fn comm(&mut self, tid: u32) {
        let mut body = [PID, tid].map(u32::to_le_bytes).concat();
        text(&mut body, "ptgen");
        self.record(COMM, 0, Some(tid), &body);
    }

    fn fork(&mut self, tid: u32) {
        let mut body = [PID, PID, tid, PID].map(u32::to_le_bytes).concat();
        body.extend_from_slice(&ZERO.to_le_bytes());
        self.record(FORK, 0, Some(tid), &body);
    }

    fn mmap2(&mut self, mapping: &Mapping) {
        let mut body = [PID, PID].map(u32::to_le_bytes).concat();
        body.extend_from_slice(&[mapping.addr, mapping.len, mapping.file_offset].map(u64::to_le_bytes).concat());
        // Device and inode are not known; PROT_READ | PROT_EXEC, MAP_PRIVATE.
        body.extend_from_slice(&[0u32, 0, 0, 0, 0, 0, 5, 2].map(u32::to_le_bytes).concat());
        text(&mut body, &mapping.path);
        self.record(MMAP2, 2, Some(PID), &body);
    }

    fn auxtrace_info(&mut self, filter: &str) {
        let mut body = [1u32, 0].map(u32::to_le_bytes).concat();
        let words = [
            u64::from(PMU_TYPE),
            SHIFT,
            MULT,
            ZERO,
            1, // the factors count
            1 << 10,
            1 << 11,
            0, // no context switches: per thread
            0, // no snapshot
            0, // not per CPU
            1 << 9,
            0xf << 14,
            u64::from(TSC_CTC_N),
            u64::from(TSC_CTC_D),
            1 << 1,
            u64::from(MAX_NONTURBO),
            if filter.is_empty() { 0 } else { (filter.len() as u64 + 1).next_multiple_of(8) },
        ];
        body.extend_from_slice(&words.map(u64::to_le_bytes).concat());
        if !filter.is_empty() {
            text(&mut body, filter);
        }
        // Event trace.
        body.extend_from_slice(&1u64.to_le_bytes());
        self.record(AUXTRACE_INFO, 0, None, &body);
    }
}

/// With 1 to 8 zeros behind.
fn text(out: &mut Vec<u8>, text: &str) {
    let end = out.len() + (text.len() + 1).next_multiple_of(8);
    out.extend_from_slice(text.as_bytes());
    out.resize(end, 0);
}
