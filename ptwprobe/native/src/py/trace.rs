//! Writing and reading of traces.

use std::path::PathBuf;

use pyo3::prelude::*;

use super::native_error;
use crate::clock::TimeConv;
use crate::perfdata::{Features, Mmap2, Writer, WriterInfo};
use crate::pt::{self, LastIp};

/// A perf.data being written.
#[pyclass(module = "ptwprobe._native")]
struct TraceWriter {
    writer: Option<Writer>,
}

type HitWords = (u64, Vec<u64>, u64, Vec<u64>);

impl TraceWriter {
    fn writer(&mut self) -> PyResult<&mut Writer> {
        self.writer.as_mut().ok_or_else(|| native_error("closed", "the trace is finished".to_owned(), None))
    }
}

#[pymethods]
impl TraceWriter {
    #[new]
    #[pyo3(signature = (path, shift, mult, zero, pmu_type = 8))]
    fn new(path: PathBuf, shift: u16, mult: u32, zero: u64, pmu_type: u32) -> PyResult<Self> {
        let writer = Writer::create(&path, TimeConv { shift, mult, zero }, WriterInfo { pmu_type })?;
        Ok(Self { writer: Some(writer) })
    }

    #[pyo3(signature = (pid, tid, comm, ns, exec = false))]
    fn comm(&mut self, pid: u32, tid: u32, comm: &[u8], ns: u64, exec: bool) -> PyResult<()> {
        Ok(self.writer()?.comm(pid, tid, comm, ns, exec)?)
    }

    #[pyo3(signature = (pid, tid, addr, len, file_offset, path, ns, build_id = None))]
    #[allow(clippy::too_many_arguments)]
    fn mmap2(
        &mut self,
        pid: u32,
        tid: u32,
        addr: u64,
        len: u64,
        file_offset: u64,
        path: &[u8],
        ns: u64,
        build_id: Option<&[u8]>,
    ) -> PyResult<()> {
        let prot = (libc::PROT_READ | libc::PROT_EXEC) as u32;
        let flags = libc::MAP_PRIVATE as u32;
        let map = Mmap2 { pid, tid, addr, len, file_offset, build_id, prot, flags, path, ns, ..Mmap2::default() };
        Ok(self.writer()?.mmap2(&map)?)
    }

    fn fork(&mut self, pid: u32, tid: u32, ppid: u32, ptid: u32, ns: u64) -> PyResult<()> {
        Ok(self.writer()?.fork(pid, tid, ppid, ptid, ns)?)
    }

    fn exit(&mut self, pid: u32, tid: u32, ppid: u32, ptid: u32, ns: u64) -> PyResult<()> {
        Ok(self.writer()?.exit(pid, tid, ppid, ptid, ns)?)
    }

    fn switch_in(&mut self, pid: u32, tid: u32, cpu: u32, ns: u64) -> PyResult<()> {
        Ok(self.writer()?.switch_in(pid, tid, cpu, ns)?)
    }

    fn lost(&mut self, count: u64, cpu: u32, ns: u64) -> PyResult<()> {
        Ok(self.writer()?.lost(count, cpu, ns)?)
    }

    fn torn(&mut self, count: u64, cpu: u32, ns: u64) -> PyResult<()> {
        Ok(self.writer()?.torn(count, cpu, ns)?)
    }

    fn auxtrace(&mut self, tid: u32, pid: u32, data: &[u8], tsc_reference: u64) -> PyResult<()> {
        Ok(self.writer()?.auxtrace(tid, pid, data, tsc_reference)?)
    }

    fn hits(&mut self, tid: u32, pid: u32, hits: Vec<HitWords>) -> PyResult<()> {
        let reference = hits.first().map_or(1, |hit| hit.0);
        let mut last_ip = LastIp::default();
        let mut data = Vec::new();
        pt::encode_psb_plus(&mut data, &mut last_ip, reference);
        for (tsc, slot_addrs, header, args) in &hits {
            pt::encode_hit(&mut data, &mut last_ip, *tsc, slot_addrs, *header, args);
        }
        Ok(self.writer()?.auxtrace(tid, pid, &data, reference)?)
    }

    fn finished_round(&mut self) -> PyResult<()> {
        Ok(self.writer()?.finished_round()?)
    }

    fn flush(&mut self) -> PyResult<()> {
        Ok(self.writer()?.flush()?)
    }

    #[pyo3(signature = (shift, mult, zero, version = "", command_line = Vec::new()))]
    fn finish(&mut self, shift: u16, mult: u32, zero: u64, version: &str, command_line: Vec<String>) -> PyResult<()> {
        self.writer()?;
        let features = Features::of_this_machine(version, command_line);
        self.writer.take().map_or(Ok(()), |writer| Ok(writer.finish(TimeConv { shift, mult, zero }, &features)?))
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<TraceWriter>()
}
