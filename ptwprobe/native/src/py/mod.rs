//! Conversions between Python and the native parts. No logic.

use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

mod arrow;
mod flow;
mod image;
mod machine;
mod merged;
mod recording;
mod stub;
mod target;
mod trace;
mod x86;

create_exception!(
    _native,
    NativeError,
    PyException,
    "args: (kind, message, offset or None). `kind` is a stable word that the caller maps to an error of its own."
);

/// A `NativeError` with its three arguments.
pub fn native_error(kind: &'static str, message: String, offset: Option<u64>) -> PyErr {
    NativeError::new_err((kind, message, offset))
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("NativeError", module.py().get_type::<NativeError>())?;
    machine::register(module)?;
    stub::register(module)?;
    x86::register(module)?;
    target::register(module)?;
    recording::register(module)?;
    flow::register(module)?;
    merged::register(module)?;
    arrow::register(module)?;
    image::register(module)?;
    trace::register(module)
}
