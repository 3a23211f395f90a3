//! Traces with their control flow, everything in the order of time.

use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::PyList;

use super::flow::{open, PyStub};
use super::native_error;
use super::trace::{duplicate, entry_tuple, format, os_error, table, totals_parts, EventParts, TotalsParts, PIECE_LEN};
use crate::image::Places;
use crate::trace::{Filter, Merged, Script, Show, View, What};

/// Entries of a perf.data, branches included. See `_native.pyi`.
#[pyclass(module = "ptwprobe._native")]
pub struct MergedReader {
    merged: Option<Merged>,
}

/// So many entries are passed over before the caller's signals are looked at.
const PASSED: usize = 1 << 18;

impl MergedReader {
    pub(super) fn merged(&mut self) -> PyResult<&mut Merged> {
        self.merged.as_mut().ok_or_else(given_away)
    }

    pub(super) fn take(&mut self) -> PyResult<Merged> {
        self.merged.take().ok_or_else(given_away)
    }
}

fn given_away() -> PyErr {
    native_error("closed", "the reader was given away".to_owned(), None)
}

#[pymethods]
impl MergedReader {
    #[new]
    #[pyo3(signature = (path, events, *, images=None, root=None, caches=vec![], live=false, stubs=vec![], jobs=0))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        events: Vec<EventParts>,
        images: Option<PathBuf>,
        root: Option<PathBuf>,
        caches: Vec<PathBuf>,
        live: bool,
        stubs: Vec<PyStub>,
        jobs: usize,
    ) -> PyResult<Self> {
        let flow = open(py, &path, Places { images, root, caches, live }, stubs, jobs)?;
        Ok(Self { merged: Some(Merged::new(&path, flow, table(events)?)?) })
    }

    fn next_batch<'py>(&mut self, py: Python<'py>, max: usize, branches: bool) -> PyResult<Bound<'py, PyList>> {
        let merged = self.merged()?;
        let batch = PyList::empty(py);
        let mut passed = 0;
        while batch.len() < max {
            let Some(entry) = merged.next_entry()? else { break };
            if matches!(entry.what, What::Branch(_)) == branches {
                batch.append(entry_tuple(py, &entry)?)?;
            }
            passed += 1;
            if passed % PASSED == 0 {
                py.check_signals()?;
            }
        }
        Ok(batch)
    }

    fn totals(&mut self) -> PyResult<TotalsParts> {
        Ok(totals_parts(self.merged()?.totals()))
    }

    fn notes(&mut self) -> PyResult<Vec<String>> {
        Ok(self.merged()?.flow().timeline().notes())
    }
}

/// The lines of `script` with control flow.
#[pyclass(module = "ptwprobe._native")]
struct FlowScript {
    merged: Merged,
    script: Script,
    out: File,
}

#[pymethods]
impl FlowScript {
    #[new]
    #[pyo3(signature = (reader, fd, format, patterns, tids, start, end, *, show=None, indent=false, stack=false))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        mut reader: PyRefMut<'_, MergedReader>,
        fd: i32,
        format: &str,
        patterns: Vec<String>,
        tids: Vec<u32>,
        start: Option<u64>,
        end: Option<u64>,
        show: Option<&str>,
        indent: bool,
        stack: bool,
    ) -> PyResult<Self> {
        let format = self::format(format)?;
        let show = match show {
            Some(text) => {
                Show::parse(text).ok_or_else(|| native_error("show", format!("nothing to show: {text}"), None))?
            }
            None => Show::ALL,
        };
        let out = duplicate(fd)?;
        let merged = reader.take()?;
        let view = View::new(show, indent, stack, merged.timeline());
        Ok(Self { merged, script: Script::new(format, Filter::new(patterns, tids, start, end), Some(view)), out })
    }

    fn read(&mut self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| {
            let mut seen = 0;
            // Also with a filter that lets nothing pass the caller gets a turn, for its signals.
            while self.script.bytes().len() < PIECE_LEN && seen < PASSED {
                match self.merged.next_entry()? {
                    Some(entry) => self.script.write(&entry),
                    None => return Ok(false),
                }
                seen += 1;
            }
            Ok(true)
        })
    }

    fn write(&mut self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| {
            let written = self.out.write_all(self.script.bytes());
            self.script.clear();
            written.map_err(|error| os_error(&error))
        })
    }

    fn totals(&self) -> TotalsParts {
        totals_parts(self.script.totals())
    }

    fn branches(&self) -> u64 {
        self.merged.branches()
    }

    fn notes(&self) -> Vec<String> {
        self.merged.flow().timeline().notes()
    }

    fn progress(&self) -> (u64, u64) {
        self.merged.flow().progress()
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<MergedReader>()?;
    module.add_class::<FlowScript>()
}
