//! Decoding, relocation and the code map.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::native_error;
use crate::codemap::{CodeMap, ElfError};
use crate::x86::{self, CodeError};

impl From<CodeError> for PyErr {
    fn from(e: CodeError) -> Self {
        native_error(e.kind, e.message, Some(e.offset))
    }
}

impl From<ElfError> for PyErr {
    fn from(e: ElfError) -> Self {
        native_error(e.kind, e.message, e.offset)
    }
}

#[pyfunction]
fn disassemble(code: &[u8], addr: u64) -> PyResult<Vec<(u64, usize, String)>> {
    Ok(x86::disassemble(code, addr)?)
}

#[pyfunction]
fn decode(code: &[u8], addr: u64) -> Vec<(usize, usize, &'static str)> {
    x86::decode(code, addr).into_iter().map(|(offset, length, kind)| (offset, length, kind.name())).collect()
}

#[pyfunction]
fn relative_operands(code: &[u8], addr: u64) -> PyResult<Vec<u64>> {
    Ok(x86::relative_operands(code, addr)?)
}

#[pyfunction]
fn first_that_may_fault(code: &[u8], addr: u64, trusted: Vec<String>) -> PyResult<Option<u64>> {
    Ok(x86::first_that_may_fault(code, addr, &trusted)?)
}

type Map = Vec<(usize, usize)>;

#[pyfunction]
fn relocate<'py>(py: Python<'py>, code: &[u8], from_addr: u64, to_addr: u64) -> PyResult<(Bound<'py, PyBytes>, Map)> {
    let moved = x86::relocate(code, from_addr, to_addr)?;
    Ok((PyBytes::new(py, &moved.code), moved.map))
}

#[pyclass(frozen, name = "CodeMap", module = "ptwprobe._native")]
struct PyCodeMap(CodeMap);

#[pymethods]
impl PyCodeMap {
    #[new]
    fn new(py: Python<'_>, path: &str) -> PyResult<Self> {
        Ok(Self(py.detach(|| CodeMap::read(path))?))
    }

    fn function_bounds(&self, vaddr: u64) -> Option<(u64, u64)> {
        self.0.function_bounds(vaddr)
    }

    fn functions(&self) -> Vec<(u64, u64)> {
        self.0.functions().collect()
    }

    fn targets(&self, lo: u64, hi: u64) -> Vec<(u64, &'static str)> {
        self.0.targets(lo, hi).into_iter().map(|(vaddr, kind)| (vaddr, kind.name())).collect()
    }

    fn is_boundary(&self, vaddr: u64) -> bool {
        self.0.is_boundary(vaddr)
    }

    fn has_unknown_jumps(&self, vaddr: u64) -> bool {
        self.0.has_unknown_jumps(vaddr)
    }

    fn unknown_jumps(&self) -> Vec<u64> {
        self.0.unknown_jumps().to_vec()
    }

    fn bytes<'py>(&self, py: Python<'py>, vaddr: u64, length: usize) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.bytes(vaddr, length))
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(disassemble, module)?)?;
    module.add_function(wrap_pyfunction!(decode, module)?)?;
    module.add_function(wrap_pyfunction!(relative_operands, module)?)?;
    module.add_function(wrap_pyfunction!(first_that_may_fault, module)?)?;
    module.add_function(wrap_pyfunction!(relocate, module)?)?;
    module.add_class::<PyCodeMap>()
}
