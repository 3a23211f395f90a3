//! Rings and the recorder.

use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::native_error;
use crate::perfdata::Mmap2;
use crate::recorder::{self, Core, RecorderError, Stats};
use crate::ring::{self, Layout, RingError};

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<RingMemory>()?;
    module.add_class::<RingTestWriter>()?;
    module.add_class::<Recorder>()
}

fn ring_error(error: RingError) -> PyErr {
    native_error("ring", error.to_string(), None)
}

fn recorder_error(error: RecorderError) -> PyErr {
    native_error(error.kind(), error.to_string(), None)
}

fn layout(rings: u32, ring_bits: u32) -> PyResult<Layout> {
    Layout::new(rings, ring_bits).ok_or_else(|| ring_error(RingError::Layout { rings, ring_bits }))
}

fn borrowed<'fd>(fd: i32) -> PyResult<BorrowedFd<'fd>> {
    if fd < 0 {
        return Err(ring_error(RingError::NotMemfd));
    }
    // SAFETY: not -1; the caller's descriptor is only used during the call, and a closed one fails as EBADF.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

#[pyclass(frozen, module = "ptwprobe._native")]
struct RingMemory {
    memory: Arc<ring::RingMemory>,
}

#[pymethods]
impl RingMemory {
    #[new]
    fn new(py: Python<'_>, fd: i32, rings: u32, ring_bits: u32) -> PyResult<Self> {
        let fd = borrowed(fd)?;
        let memory = py.detach(|| ring::RingMemory::create_over(fd, rings, ring_bits)).map_err(ring_error)?;
        Ok(RingMemory { memory: Arc::new(memory) })
    }

    #[staticmethod]
    #[pyo3(name = "layout")]
    fn layout_of(rings: u32, ring_bits: u32) -> PyResult<(usize, usize)> {
        layout(rings, ring_bits).map(|l| (l.control_len(), l.total_len()))
    }

    #[getter]
    fn control_len(&self) -> usize {
        self.memory.layout().control_len()
    }

    #[getter]
    fn data_len(&self) -> usize {
        self.memory.layout().data_len()
    }

    #[getter]
    fn total_len(&self) -> usize {
        self.memory.layout().total_len()
    }

    #[getter]
    fn load_gate_ptr(&self) -> usize {
        self.memory.load_gate().as_ptr() as usize
    }

    #[getter]
    fn recorder_ptr(&self) -> usize {
        self.memory.recorder().as_ptr() as usize
    }

    fn lost_no_ring(&self) -> u64 {
        self.memory.lost_no_ring()
    }
}

#[pyclass(frozen, module = "ptwprobe._native")]
struct RingTestWriter {
    writer: ring::Writer,
}

#[pymethods]
impl RingTestWriter {
    #[new]
    fn new(fd: i32, rings: u32, ring_bits: u32) -> PyResult<Self> {
        let writer = ring::Writer::map(borrowed(fd)?, layout(rings, ring_bits)?).map_err(ring_error)?;
        Ok(RingTestWriter { writer })
    }

    #[pyo3(signature = (ring, thread, event_id, args, *, faults = 0, tsc = None))]
    fn write(&self, ring: u32, thread: u64, event_id: u16, args: Vec<u64>, faults: u32, tsc: Option<u64>) -> bool {
        self.writer.write(ring, thread, event_id, faults, tsc, &args)
    }

    fn abandon(&self, ring: u32, nargs: usize) -> bool {
        self.writer.reserve(ring, nargs).is_some()
    }

    #[pyo3(signature = (ring, thread, event_id, count, *, per_second = 0))]
    fn write_many(&self, py: Python<'_>, ring: u32, thread: u64, event_id: u16, count: u64, per_second: u64) -> u64 {
        py.detach(|| self.writer.write_many(ring, thread, event_id, count, per_second))
    }
}

#[pyclass(frozen, module = "ptwprobe._native")]
struct Recorder {
    recorder: recorder::Recorder,
}

impl Recorder {
    /// Waits for the recorder's thread without the GIL.
    fn call<R, F>(&self, py: Python<'_>, job: F) -> PyResult<R>
    where
        R: Send + 'static,
        F: FnOnce(&mut Core) -> R + Send + 'static,
    {
        py.detach(|| self.recorder.call(job)).map_err(recorder_error)
    }

    fn try_call<R, F>(&self, py: Python<'_>, job: F) -> PyResult<R>
    where
        R: Send + 'static,
        F: FnOnce(&mut Core) -> Result<R, RecorderError> + Send + 'static,
    {
        self.call(py, job)?.map_err(recorder_error)
    }
}

#[pymethods]
impl Recorder {
    #[new]
    fn new(py: Python<'_>, perf_data_path: PathBuf, cmdline: Vec<String>) -> PyResult<Self> {
        let recorder = py.detach(|| recorder::Recorder::create(&perf_data_path, cmdline)).map_err(recorder_error)?;
        Ok(Recorder { recorder })
    }

    fn add_event(&self, py: Python<'_>, event_id: u16, nargs: usize) -> PyResult<()> {
        self.try_call(py, move |core| core.add_event(event_id, nargs))
    }

    fn add_target(&self, py: Python<'_>, pid: i32, ring: &RingMemory, comm: String) -> PyResult<()> {
        let memory = Arc::clone(&ring.memory);
        self.try_call(py, move |core| core.add_target(pid, memory, comm.into_bytes()))
    }

    fn add_stub(&self, py: Python<'_>, pid: i32, event_id: u16, slot_addrs: Vec<u64>) -> PyResult<()> {
        self.try_call(py, move |core| core.add_stub(pid, event_id, slot_addrs))
    }

    #[allow(clippy::too_many_arguments)] // the fields of one mapping
    #[pyo3(signature = (
        pid, addr, length, file_offset, dev_major, dev_minor, inode, prot, flags, path, build_id_hex, ns = 0
    ))]
    fn add_mapping(
        &self,
        py: Python<'_>,
        pid: u32,
        addr: u64,
        length: u64,
        file_offset: u64,
        dev_major: u32,
        dev_minor: u32,
        inode: u64,
        prot: u32,
        flags: u32,
        path: PathBuf,
        build_id_hex: &str,
        ns: u64,
    ) -> PyResult<()> {
        let build_id = bytes_of_hex(build_id_hex)
            .ok_or_else(|| native_error("bad-build-id", format!("'{build_id_hex}' is not a build id"), None))?;
        self.call(py, move |core| {
            core.add_mapping(&Mmap2 {
                pid,
                tid: pid,
                addr,
                len: length,
                file_offset,
                major: dev_major,
                minor: dev_minor,
                inode,
                build_id: (!build_id.is_empty()).then_some(&build_id),
                prot,
                flags,
                path: path.as_os_str().as_encoded_bytes(),
                ns,
            });
        })
    }

    fn set_thread(&self, py: Python<'_>, pid: i32, fs_base: u64, tid: i32) -> PyResult<()> {
        self.try_call(py, move |core| core.set_thread(pid, fs_base, tid))
    }

    fn keep_threads(&self, py: Python<'_>, tids: Option<Vec<i32>>) -> PyResult<()> {
        self.call(py, move |core| core.keep_threads(tids))
    }

    fn start(&self, py: Python<'_>) -> PyResult<()> {
        self.call(py, Core::start)
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        dict(py, &py.detach(|| self.recorder.stats()))
    }

    fn holes(&self, py: Python<'_>) -> PyResult<Vec<(i32, u32, u64)>> {
        let holes = self.call(py, Core::holes)?;
        Ok(holes.into_iter().map(|h| (h.pid, h.ring, h.blocked.as_nanos() as u64)).collect())
    }

    fn pass_hole(&self, py: Python<'_>, pid: i32, ring: u32) -> PyResult<u64> {
        self.try_call(py, move |core| core.pass_hole(pid, ring))
    }

    fn drop_target(&self, py: Python<'_>, pid: i32) -> PyResult<()> {
        self.try_call(py, move |core| core.drop_target(pid))
    }

    fn tap(&self, py: Python<'_>, capacity: usize) -> PyResult<()> {
        self.call(py, move |core| core.tap(capacity))
    }

    #[allow(clippy::type_complexity)] // a tuple as Python sees it
    fn take_hits(&self, py: Python<'_>, max: usize) -> PyResult<Vec<(u64, i32, i32, i32, u16, Vec<u64>)>> {
        let hits = self.call(py, move |core| core.take_hits(max))?;
        Ok(hits.into_iter().map(|h| (h.ns, h.pid, h.tid, h.cpu, h.event_id, h.args)).collect())
    }

    fn stop<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        dict(py, &py.detach(|| self.recorder.stop()))
    }

    fn clock(&self, py: Python<'_>) -> (u16, u32, u64, u64) {
        let (conv, tsc_hz) = py.detach(|| self.recorder.clock());
        (conv.shift, conv.mult, conv.zero, tsc_hz)
    }
}

fn dict<'py>(py: Python<'py>, stats: &Stats) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let counts = [
        ("hits", stats.hits),
        ("lost", stats.lost),
        ("torn", stats.torn),
        ("faults", stats.faults),
        ("filtered", stats.filtered),
        ("stray", stats.stray),
        ("unknown_threads", stats.unknown_threads),
        ("late", stats.late),
        ("broken_rings", stats.broken_rings),
        ("bytes", stats.bytes),
        ("held", stats.held),
    ];
    for (name, count) in counts {
        dict.set_item(name, count)?;
    }
    dict.set_item("error", stats.error.as_ref().map(|e| (e.kind, e.message.as_str())))?;
    Ok(dict)
}

/// "" is no bytes; `None` if it is not hex, or longer than a build id can be.
fn bytes_of_hex(text: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<u8>> = text.chars().map(|c| Some(c.to_digit(16)? as u8)).collect();
    let digits = digits.filter(|d| d.len().is_multiple_of(2) && d.len() <= 40)?;
    Some(digits.chunks_exact(2).map(|pair| pair.iter().fold(0, |byte, digit| byte << 4 | digit)).collect())
}
