//! Tables for Python, by the Arrow PyCapsule interface.

use std::path::PathBuf;
use std::sync::Mutex;

use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use super::merged::MergedReader;
use super::native_error;
use super::trace::{events, EventParts};
use crate::arrow::{ArrayStream, Batches, STREAM_NAME};
use crate::trace::{BranchTable, HitTable, Mode, Table, TraceReader};

/// A table that is read once. See `_native.pyi`.
#[pyclass(module = "ptwprobe._native", frozen)]
struct ArrowStream {
    source: Mutex<Option<Box<dyn Batches>>>,
}

impl ArrowStream {
    fn new(source: impl Batches + 'static) -> Self {
        Self { source: Mutex::new(Some(Box::new(source))) }
    }
}

#[pymethods]
impl ArrowStream {
    #[staticmethod]
    fn branches(mut reader: PyRefMut<'_, MergedReader>) -> PyResult<Self> {
        Ok(Self::new(BranchTable::new(reader.take()?)))
    }

    #[staticmethod]
    #[allow(clippy::needless_pass_by_value)]
    fn hits(path: PathBuf, events: Vec<EventParts>) -> PyResult<Self> {
        let events = self::events(events)?;
        let reader = TraceReader::open(&path, Table::new(events.clone()), Mode::Whole)?;
        Ok(Self::new(HitTable::new(reader, &events)))
    }

    #[pyo3(signature = (requested_schema=None))]
    #[allow(unused_variables)]
    fn __arrow_c_stream__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        let source = self.source.lock().ok().and_then(|mut source| source.take());
        let source = source.ok_or_else(|| native_error("closed", "this table was read already".to_owned(), None))?;
        PyCapsule::new_with_value(py, ArrayStream::new(source), STREAM_NAME)
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<ArrowStream>()
}
