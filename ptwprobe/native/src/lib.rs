//! The native core of ptwprobe: what is hot (trace bytes, rings), hostile (traces, ELF) or must be short (the stretch
//! in which a target stands still). This file only names the parts; conversions to Python live in `py/`.

use pyo3::prelude::*;

pub mod arrow;
pub mod clock;
pub mod codemap;
pub mod cpu;
pub mod demangle;
pub mod flow;
mod heap;
pub mod image;
pub mod listing;
pub mod perfdata;
pub mod pt;
pub mod recorder;
pub mod ring;
pub mod templates;
pub mod trace;
pub mod tracee;
pub mod x86;

mod py;

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    py::register(module)
}
