//! Control flow for Python.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::flow::code::Stub;
use crate::flow::context::{Context, Schedule};
use crate::flow::{walk_stream, Batch, Config, Finding, Mark, Pieces, Skipped, What};
use crate::image::{FlatCode, Places};
use crate::pt::{Cpu, Errata, TimeConfig};
use crate::trace::flow::FlowTrace;

/// (branches before it, TSC, offset, kind, value or text, address)
type PyMark = (u32, u64, u64, &'static str, String, Option<u64>);

/// (branches, times, marks)
type PyBatch = (Py<PyBytes>, Vec<(u32, u64)>, Vec<PyMark>);

/// Walks packets over code that is given: for tests, and for traces that come from elsewhere.
///
/// The branches come as records of 24 bytes (from, to, kind), little-endian.
#[pyfunction]
#[pyo3(signature = (packets, regions, stubs=vec![], *, compressed_returns=true, tsc_ctc=None, mtc_shift=0, max_nonturbo=0, cpu=""))]
#[allow(clippy::too_many_arguments)]
fn walk(
    py: Python<'_>,
    packets: &[u8],
    regions: Vec<(u64, Vec<u8>)>,
    stubs: Vec<(u64, u64, u64, u64)>,
    compressed_returns: bool,
    tsc_ctc: Option<(u32, u32)>,
    mtc_shift: u8,
    max_nonturbo: u8,
    cpu: &str,
) -> (Py<PyBytes>, Vec<PyMark>) {
    let stubs = stubs.into_iter().map(|(start, end, site, continue_addr)| Stub { start, end, site, continue_addr });
    let code = FlatCode::new(regions, stubs.collect());
    let time = TimeConfig { tsc_ctc, mtc_shift, max_nonturbo, ..TimeConfig::default() };
    let schedule = Arc::new(Schedule::constant(Context::default()));
    let mut branches = Vec::new();
    let mut marks = Vec::new();
    let mut before = 0;
    let config = Config { compressed_returns, time, errata: Errata::of(Cpu::parse(cpu)) };
    walk_stream(&mut Pieces::of_bytes(packets), config, &code, &schedule, |batch: &Batch| {
        marks.extend(batch.marks.iter().map(|mark| to_mark(mark, before)));
        for branch in &batch.branches {
            branches.extend_from_slice(&branch.to_bytes());
        }
        before += batch.branches.len() as u32;
    });
    (PyBytes::new(py, &branches).unbind(), marks)
}

fn to_mark(mark: &Mark, before: u32) -> PyMark {
    let (kind, value, ip) = match mark.what {
        What::Word { value, ip } => ("word", value.to_string(), ip),
        What::Event { packet, ip } => ("event", packet.to_string(), ip),
        What::Overflow => ("overflow", String::new(), None),
        What::Skipped(Skipped::MissingChunk) => ("missing", String::new(), None),
        What::Skipped(Skipped::NoPsb { bytes }) => ("missing", bytes.to_string(), None),
        What::Finding(finding) => {
            let ip = match finding {
                Finding::NoCode { ip }
                | Finding::Mismatch { ip }
                | Finding::Endless { ip }
                | Finding::Kernel { ip }
                | Finding::Unreachable { ip, .. } => Some(ip),
                _ => None,
            };
            (if finding.loses_branches() { "error" } else { "soft" }, finding.to_string(), ip)
        }
    };
    (before + mark.at, mark.tsc, mark.offset, kind, value, ip)
}

/// (process, start, end, site, where the program goes on)
pub(super) type PyStub = (u32, u64, u64, u64, u64);

pub(super) fn open(
    py: Python<'_>,
    path: &Path,
    places: Places,
    stubs: Vec<PyStub>,
    jobs: usize,
) -> PyResult<FlowTrace> {
    let stubs =
        stubs.into_iter().map(|(pid, start, end, site, continue_addr)| (pid, Stub { start, end, site, continue_addr }));
    let jobs = if jobs == 0 { std::thread::available_parallelism().map_or(1, usize::from) } else { jobs };
    Ok(py.detach(|| FlowTrace::open(path, places, stubs, jobs))?)
}

/// The control flow of a perf.data. See `_native.pyi`.
#[pyclass(module = "ptwprobe._native", frozen)]
pub struct FlowReader {
    trace: Mutex<FlowTrace>,
}

#[pymethods]
impl FlowReader {
    #[new]
    #[pyo3(signature = (path, *, images=None, root=None, caches=vec![], live=false, stubs=vec![], jobs=0))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        images: Option<PathBuf>,
        root: Option<PathBuf>,
        caches: Vec<PathBuf>,
        live: bool,
        stubs: Vec<PyStub>,
        jobs: usize,
    ) -> PyResult<Self> {
        let places = Places { images, root, caches, live };
        Ok(Self { trace: Mutex::new(open(py, &path, places, stubs, jobs)?) })
    }

    fn streams(&self) -> Vec<(u32, Option<u32>, Option<u32>)> {
        self.lock().streams().iter().map(|id| (id.idx, id.tid, id.cpu)).collect()
    }

    fn notes(&self) -> Vec<String> {
        self.lock().timeline().notes()
    }

    fn next_batch(&self, py: Python<'_>, stream: usize) -> Option<PyBatch> {
        let batch = py.detach(|| self.lock().next_batch(stream, None))?;
        let marks = batch.marks.iter().map(|mark| to_mark(mark, 0)).collect();
        let branches = PyBytes::new_with(py, batch.branches.len() * RECORD_LEN, |bytes| {
            for (to, branch) in bytes.chunks_exact_mut(RECORD_LEN).zip(&batch.branches) {
                to.copy_from_slice(&branch.to_bytes());
            }
            Ok(())
        });
        Some((branches.ok()?.unbind(), batch.times, marks))
    }

    fn count(&self, py: Python<'_>) -> HashMap<&'static str, u64> {
        let counts = py.detach(|| self.lock().count());
        HashMap::from([
            ("branches", counts.branches),
            ("words", counts.words),
            ("events", counts.events),
            ("losses", counts.losses),
            ("errors", counts.errors),
            ("soft", counts.soft),
        ])
    }
}

impl FlowReader {
    fn lock(&self) -> MutexGuard<'_, FlowTrace> {
        self.trace.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of a branch for Python.
const RECORD_LEN: usize = 24;

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<FlowReader>()?;
    module.add_function(wrap_pyfunction!(walk, module)?)
}
