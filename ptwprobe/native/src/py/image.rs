//! Which code a process ran.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::flow::code::Stub;
use crate::flow::context::{Context, Schedule, Spaces};
use crate::image::{Places, Timeline};

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<CodeTimeline>()
}

type PyContext = (u64, u32, Option<u32>, Option<u32>);
type PyStub = (u64, u64, u64, u64);

#[pyclass(frozen, module = "ptwprobe._native")]
struct CodeTimeline {
    timeline: Timeline,
}

#[pymethods]
impl CodeTimeline {
    #[new]
    #[pyo3(signature = (path, *, images = None, root = None, caches = Vec::new(), live = false, stubs = Vec::new()))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        images: Option<PathBuf>,
        root: Option<PathBuf>,
        caches: Vec<PathBuf>,
        live: bool,
        stubs: Vec<(u32, PyStub)>,
    ) -> PyResult<Self> {
        let stub = |(pid, (start, end, site, continue_addr))| (pid, Stub { start, end, site, continue_addr });
        let places = Places { images, root, caches, live };
        let timeline = py.detach(|| Timeline::read(&path, places, stubs.into_iter().map(stub)))?;
        Ok(Self { timeline })
    }

    fn process(&self, pid: u32, tsc: u64) -> u32 {
        self.timeline.process(pid, tsc)
    }

    fn thread(&self, tid: u32) -> Vec<PyContext> {
        contexts(&self.timeline.thread(tid))
    }

    fn cpu(&self, cpu: u32) -> Vec<PyContext> {
        contexts(&self.timeline.cpu(cpu))
    }

    fn regions(&self, space: u32) -> Vec<(u64, u64)> {
        self.timeline.regions(space)
    }

    fn read<'py>(&self, py: Python<'py>, space: u32, addr: u64, size: usize) -> Bound<'py, PyBytes> {
        let mut bytes = vec![0; size];
        let len = py.detach(|| self.timeline.space(space).read(addr, &mut bytes));
        PyBytes::new(py, bytes.get(..len).unwrap_or_default())
    }

    fn stub(&self, space: u32, addr: u64) -> Option<PyStub> {
        self.timeline.space(space).stub(addr).map(|s| (s.start, s.end, s.site, s.continue_addr))
    }

    fn notes(&self) -> Vec<String> {
        self.timeline.notes()
    }

    fn __len__(&self) -> usize {
        self.timeline.len()
    }
}

/// From the first on.
fn contexts(schedule: &Schedule) -> Vec<PyContext> {
    let row = |tsc, c: Context| (tsc, c.space, c.pid, c.tid);
    let (first, _) = schedule.during(0);
    let changes = schedule.changes().iter().filter(|&&(tsc, _)| tsc > 0);
    std::iter::once(row(0, first)).chain(changes.map(|&(tsc, c)| row(tsc, c))).collect()
}
