//! CPU features, the embedded templates and demangling.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::clock::Calibration;
use crate::{cpu, demangle as names, templates};

#[pyfunction]
fn cpu_features(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let f = cpu::Features::detect();
    let out = PyDict::new(py);
    out.set_item("rdpid", f.rdpid)?;
    out.set_item("rdtscp", f.rdtscp)?;
    out.set_item("fsgsbase", f.fsgsbase)?;
    out.set_item("ptwrite_cpuid", f.ptwrite_cpuid)?;
    out.set_item("invariant_tsc", f.invariant_tsc)?;
    Ok(out)
}

#[pyfunction]
fn ptwrite_executes(py: Python<'_>) -> bool {
    py.detach(cpu::ptwrite_executes)
}

#[pyfunction]
fn calibrate_tsc(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let clock = py.detach(Calibration::start);
    let out = PyDict::new(py);
    out.set_item("tsc_hz", clock.tsc_hz())?;
    out.set_item("shift", clock.conv().shift)?;
    out.set_item("mult", clock.conv().mult)?;
    out.set_item("zero", clock.conv().zero)?;
    Ok(out)
}

#[pyfunction]
fn stub_template(name: &str) -> Option<&'static str> {
    templates::get(name)
}

#[pyfunction]
fn stub_template_names() -> Vec<&'static str> {
    templates::TEMPLATES.iter().map(|(n, _)| *n).collect()
}

#[pyfunction]
fn demangle(name: &str) -> Option<(String, String)> {
    names::demangle(name).map(|d| (d.full, d.plain))
}

#[pyfunction]
fn demangle_all(py: Python<'_>, names: Vec<String>) -> Vec<Option<(String, String)>> {
    let results = py.detach(|| names::demangle_all(&names));
    results.into_iter().map(|found| found.map(|d| (d.full, d.plain))).collect()
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(cpu_features, module)?)?;
    module.add_function(wrap_pyfunction!(ptwrite_executes, module)?)?;
    module.add_function(wrap_pyfunction!(demangle, module)?)?;
    module.add_function(wrap_pyfunction!(demangle_all, module)?)?;
    module.add_function(wrap_pyfunction!(calibrate_tsc, module)?)?;
    module.add_function(wrap_pyfunction!(stub_template, module)?)?;
    module.add_function(wrap_pyfunction!(stub_template_names, module)?)
}
