//! Live processes: the `Tracer` class.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::time::Duration;

use pyo3::prelude::*;

use super::native_error;
use crate::tracee::{
    Arg, Call, Change, Error, EventKind, Exchange, Halt, Handle, Load, Mapped, Site, Switch, Terms, OPEN_HERE,
};

fn raise(error: Error) -> PyErr {
    native_error(error.kind, error.message, error.addr)
}

fn duration(timeout_ms: u64) -> Duration {
    Duration::from_millis(timeout_ms)
}

#[derive(FromPyObject)]
enum PyArg {
    #[pyo3(transparent)]
    Value(i128),
    #[pyo3(transparent)]
    Reference((i64, u64)),
}

impl From<PyArg> for Arg {
    fn from(arg: PyArg) -> Arg {
        match arg {
            PyArg::Value(value) => Arg::Value(value as u64),
            PyArg::Reference((index, add)) => match usize::try_from(index) {
                Ok(index) => Arg::Result { index, add },
                Err(_) => Arg::Scratch(add),
            },
        }
    }
}

type PyCall = (i64, Vec<PyArg>);
type PySite = (u64, Vec<u8>, Vec<u8>, u64, Vec<(u64, u64)>);
type PySwitch = (String, u64, u64, Vec<u8>, u64, Option<u64>, u64);
type PyThread = (i32, u64, u64, u64, u64, u64);

fn switch_of((kind, start, len, content, aside, scratch, copy): PySwitch) -> PyResult<Switch> {
    let exchange = match (kind.as_str(), scratch) {
        ("replace", _) => Exchange::Replace { aside, copy },
        ("renew", Some(scratch)) => Exchange::Renew { scratch, copy },
        ("restore", scratch) => Exchange::Restore { aside, scratch },
        ("abandon", _) => Exchange::Abandon { aside },
        _ => return Err(native_error("invalid", format!("no exchange is called {kind:?}"), Some(start))),
    };
    Ok(Switch { start, len, content, exchange })
}

#[pyclass(frozen)]
struct Tracer {
    handle: Handle,
}

#[pymethods]
impl Tracer {
    #[new]
    fn new(py: Python<'_>) -> PyResult<Self> {
        let handle = py.detach(Handle::start).map_err(raise)?;
        Ok(Tracer { handle })
    }

    #[getter]
    fn pid(&self) -> i32 {
        self.handle.owner_pid()
    }

    fn attach(&self, py: Python<'_>, pid: i32) -> PyResult<()> {
        self.run(py, move |owner| owner.attach(pid))
    }

    fn detach(&self, py: Python<'_>, pid: i32) -> PyResult<()> {
        self.run(py, move |owner| owner.detach(pid))
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.handle.end());
    }

    #[pyo3(signature = (pid, calls, scratch = None, keep = Vec::new()))]
    fn remote(
        &self,
        py: Python<'_>,
        pid: i32,
        calls: Vec<PyCall>,
        scratch: Option<Vec<u8>>,
        keep: Vec<(usize, u64, u64)>,
    ) -> PyResult<Vec<i64>> {
        let call = |(number, args): PyCall| Call::new(number, &args.into_iter().map(Arg::from).collect::<Vec<_>>());
        let calls: Vec<Call> = calls.into_iter().map(call).collect();
        let mut scratch = scratch.unwrap_or_default();
        self.run(py, move |owner| {
            let results = owner.remote(pid, &calls, &mut scratch)?;
            owner.keep_mapped(pid, &results, &keep);
            Ok(results)
        })
    }

    fn ask(&self, py: Python<'_>, pid: i32) -> PyResult<(i32, u64, bool)> {
        let asked = self.run(py, move |owner| owner.ask(pid))?;
        Ok((asked.tid, asked.fs_base, asked.may_read_tsc))
    }

    // They are the keyword arguments of one call.
    #[allow(clippy::too_many_arguments)]
    #[pyo3(signature = (pid, sites, switches = Vec::new(), carried = Vec::new(), all_words = false, thread_id_offset = None, release = false))]
    fn apply(
        &self,
        py: Python<'_>,
        pid: i32,
        sites: Vec<PySite>,
        switches: Vec<PySwitch>,
        carried: Vec<(u64, Vec<u8>)>,
        all_words: bool,
        thread_id_offset: Option<u64>,
        release: bool,
    ) -> PyResult<u64> {
        let terms = Terms { all_words, thread_id_offset, release };
        let site = |(addr, old, new, window_len, moves)| Site { addr, old, new, window_len, moves };
        let sites = sites.into_iter().map(site).collect();
        let switches = switches.into_iter().map(switch_of).collect::<PyResult<Vec<_>>>()?;
        let change = Change { sites, switches, carried };
        self.run(py, move |owner| owner.apply(pid, &change, &terms))
    }

    fn changed_ns(&self, py: Python<'_>) -> PyResult<u64> {
        self.run(py, |owner| Ok(owner.changed_ns))
    }

    #[pyo3(signature = (pid, sites, switched = Vec::new()))]
    fn adopt(&self, py: Python<'_>, pid: i32, sites: Vec<PySite>, switched: Vec<(u64, u64, u64)>) -> PyResult<()> {
        let site = |(addr, old, new, window_len, moves)| Site { addr, old, new, window_len, moves };
        let sites = sites.into_iter().map(site).collect();
        self.run(py, move |owner| {
            owner.adopt(pid, sites, &switched);
            Ok(())
        })
    }

    fn threads(&self, py: Python<'_>, pid: i32) -> PyResult<Vec<PyThread>> {
        let threads = self.run(py, move |owner| owner.threads(pid))?;
        Ok(threads.iter().map(|t| (t.tid, t.rip, t.rsp, t.fs_base, t.orig_rax, t.rax)).collect())
    }

    fn threads_in_ranges(&self, py: Python<'_>, pid: i32, ranges: Vec<(u64, u64)>) -> PyResult<Vec<i32>> {
        self.run(py, move |owner| owner.threads_in_ranges(pid, ranges))
    }

    #[pyo3(signature = (pid, stubs, data, fresh = false))]
    fn set_mapped(
        &self,
        py: Python<'_>,
        pid: i32,
        stubs: Vec<(u64, u64)>,
        data: Vec<(u64, u64)>,
        fresh: bool,
    ) -> PyResult<()> {
        self.run(py, move |owner| {
            owner.set_mapped(pid, Mapped { stubs, data }, fresh);
            Ok(())
        })
    }

    fn unmap(&self, py: Python<'_>, pid: i32) -> PyResult<Vec<i32>> {
        self.run(py, move |owner| owner.unmap(pid))
    }

    fn take_ended(&self, py: Python<'_>, pid: i32) -> PyResult<Vec<u64>> {
        self.run(py, move |owner| Ok(owner.take_ended(pid)))
    }

    fn close_files(&self, py: Python<'_>, pid: i32) -> PyResult<usize> {
        self.run(py, move |owner| owner.close_files(pid))
    }

    fn watch(&self, py: Python<'_>, pid: i32, loads: Vec<(u64, u64, u64)>) -> PyResult<()> {
        let loads = loads.into_iter().map(|(start, end, fixup)| Load { start, end, fixup }).collect();
        self.run(py, move |owner| owner.watch(pid, loads))
    }

    fn hold_gate(&self, py: Python<'_>, word_addr: usize) -> PyResult<u32> {
        self.run(py, move |owner| owner.hold_gate(word_addr))
    }

    fn release_gate(&self, py: Python<'_>, word_addr: usize) -> PyResult<()> {
        self.run(py, move |owner| owner.release_gate(word_addr))
    }

    #[pyo3(signature = (argv, env, cwd = None))]
    fn launch(&self, py: Python<'_>, argv: Vec<OsString>, env: Vec<OsString>, cwd: Option<OsString>) -> PyResult<i32> {
        let bytes = |list: Vec<OsString>| list.into_iter().map(OsStringExt::into_vec).collect::<Vec<_>>();
        let (argv, env, cwd) = (bytes(argv), bytes(env), cwd.map(OsStringExt::into_vec));
        self.run(py, move |owner| owner.launch(&argv, &env, cwd.as_deref()))
    }

    fn kill(&self, py: Python<'_>, pid: i32) -> PyResult<()> {
        self.run(py, move |owner| owner.kill_launched(pid))
    }

    fn next_mapping_event(&self, py: Python<'_>, pid: i32, timeout_ms: u64) -> PyResult<&'static str> {
        self.run(py, move |owner| owner.step(pid))?;
        Ok(match py.detach(|| self.handle.wait_halt(pid, duration(timeout_ms))) {
            Some(Halt::Mapped) => "mapped",
            Some(Halt::Exec) => "exec",
            Some(Halt::Exit) => "exit",
            None => "timeout",
        })
    }

    fn resume(&self, py: Python<'_>, pid: i32) -> PyResult<()> {
        self.run(py, move |owner| owner.resume(pid))
    }

    fn exit_status(&self, py: Python<'_>, pid: i32) -> PyResult<Option<i32>> {
        self.run(py, move |owner| owner.exit_status(pid))
    }

    fn events(&self, py: Python<'_>, timeout_ms: u64) -> Vec<(&'static str, i32, i32, i64)> {
        let events = py.detach(|| self.handle.events(duration(timeout_ms)));
        let kind = |kind| match kind {
            EventKind::Exec => "exec",
            EventKind::Exit => "exit",
            EventKind::Clone => "clone",
        };
        events.iter().map(|e| (kind(e.kind), e.pid, e.tid, e.value)).collect()
    }
}

impl Tracer {
    fn run<T, F>(&self, py: Python<'_>, work: F) -> PyResult<T>
    where
        T: Send + 'static,
        F: FnOnce(&mut crate::tracee::Owner) -> crate::tracee::Result<T> + Send + 'static,
    {
        py.detach(|| self.handle.call(work)).map_err(raise)
    }
}

#[pyfunction]
fn share_memory(pid: i32, other: i32) -> bool {
    crate::tracee::share_memory(pid, other)
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(share_memory, module)?)?;
    module.add("OPEN_HERE", OPEN_HERE)?;
    module.add_class::<Tracer>()
}
