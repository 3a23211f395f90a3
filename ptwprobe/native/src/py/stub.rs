//! Text of stub code.

use pyo3::prelude::*;

use crate::listing;

#[pyfunction]
fn stub_listing(code: &[u8], addr: u64) -> Vec<(u64, usize, String)> {
    listing::listing(code, addr)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(stub_listing, module)?)
}
