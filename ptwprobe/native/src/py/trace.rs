//! Writing and reading of traces.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::path::PathBuf;

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::native_error;
use crate::clock::TimeConv;
use crate::perfdata::{self, Features, Mmap2, Writer, WriterInfo};
use crate::pt::{self, LastIp};
use crate::trace::{self, Entry, Event, Field, FieldType, Filter, Format, Mode, Site, Table, What};

/// A perf.data being written.
#[pyclass(module = "ptwprobe._native")]
struct TraceWriter {
    writer: Option<Writer>,
}

type HitWords = (u64, Vec<u64>, u64, Vec<u64>);

impl TraceWriter {
    fn writer(&mut self) -> PyResult<&mut Writer> {
        self.writer.as_mut().ok_or_else(|| native_error("closed", "the trace is finished".to_owned(), None))
    }
}

#[pymethods]
impl TraceWriter {
    #[new]
    #[pyo3(signature = (path, shift, mult, zero, pmu_type = 8))]
    fn new(path: PathBuf, shift: u16, mult: u32, zero: u64, pmu_type: u32) -> PyResult<Self> {
        let writer = Writer::create(&path, TimeConv { shift, mult, zero }, WriterInfo { pmu_type })?;
        Ok(Self { writer: Some(writer) })
    }

    #[pyo3(signature = (pid, tid, comm, ns, exec = false))]
    fn comm(&mut self, pid: u32, tid: u32, comm: &[u8], ns: u64, exec: bool) -> PyResult<()> {
        Ok(self.writer()?.comm(pid, tid, comm, ns, exec)?)
    }

    #[pyo3(signature = (pid, tid, addr, len, file_offset, path, ns, build_id = None))]
    #[allow(clippy::too_many_arguments)]
    fn mmap2(
        &mut self,
        pid: u32,
        tid: u32,
        addr: u64,
        len: u64,
        file_offset: u64,
        path: &[u8],
        ns: u64,
        build_id: Option<&[u8]>,
    ) -> PyResult<()> {
        let prot = (libc::PROT_READ | libc::PROT_EXEC) as u32;
        let flags = libc::MAP_PRIVATE as u32;
        let map = Mmap2 { pid, tid, addr, len, file_offset, build_id, prot, flags, path, ns, ..Mmap2::default() };
        Ok(self.writer()?.mmap2(&map)?)
    }

    fn fork(&mut self, pid: u32, tid: u32, ppid: u32, ptid: u32, ns: u64) -> PyResult<()> {
        Ok(self.writer()?.fork(pid, tid, ppid, ptid, ns)?)
    }

    fn exit(&mut self, pid: u32, tid: u32, ppid: u32, ptid: u32, ns: u64) -> PyResult<()> {
        Ok(self.writer()?.exit(pid, tid, ppid, ptid, ns)?)
    }

    fn switch_in(&mut self, pid: u32, tid: u32, cpu: u32, ns: u64) -> PyResult<()> {
        Ok(self.writer()?.switch_in(pid, tid, cpu, ns)?)
    }

    fn lost(&mut self, count: u64, cpu: u32, ns: u64) -> PyResult<()> {
        Ok(self.writer()?.lost(count, cpu, ns)?)
    }

    fn torn(&mut self, count: u64, cpu: u32, ns: u64) -> PyResult<()> {
        Ok(self.writer()?.torn(count, cpu, ns)?)
    }

    fn auxtrace(&mut self, tid: u32, pid: u32, data: &[u8], tsc_reference: u64) -> PyResult<()> {
        Ok(self.writer()?.auxtrace(tid, pid, data, tsc_reference)?)
    }

    fn hits(&mut self, tid: u32, pid: u32, hits: Vec<HitWords>) -> PyResult<()> {
        let reference = hits.first().map_or(1, |hit| hit.0);
        let mut last_ip = LastIp::default();
        let mut data = Vec::new();
        pt::encode_psb_plus(&mut data, &mut last_ip, reference);
        for (tsc, slot_addrs, header, args) in &hits {
            pt::encode_hit(&mut data, &mut last_ip, *tsc, slot_addrs, *header, args);
        }
        Ok(self.writer()?.auxtrace(tid, pid, &data, reference)?)
    }

    fn finished_round(&mut self) -> PyResult<()> {
        Ok(self.writer()?.finished_round()?)
    }

    fn flush(&mut self) -> PyResult<()> {
        Ok(self.writer()?.flush()?)
    }

    #[pyo3(signature = (shift, mult, zero, version = "", command_line = Vec::new()))]
    fn finish(&mut self, shift: u16, mult: u32, zero: u64, version: &str, command_line: Vec<String>) -> PyResult<()> {
        self.writer()?;
        let features = Features::of_this_machine(version, command_line);
        self.writer.take().map_or(Ok(()), |writer| Ok(writer.finish(TimeConv { shift, mult, zero }, &features)?))
    }
}

/// As Python itself raises it: with the number and its text apart.
pub(super) fn os_error(error: &io::Error) -> PyErr {
    let text = error.to_string();
    match error.raw_os_error() {
        Some(errno) => {
            let text = text.trim_end_matches(&format!(" (os error {errno})")).to_owned();
            PyOSError::new_err((errno, text))
        }
        None => PyOSError::new_err(text),
    }
}

impl From<perfdata::Error> for PyErr {
    fn from(error: perfdata::Error) -> Self {
        match error {
            perfdata::Error::Io(error) => os_error(&error),
            none @ perfdata::Error::NoTrace { .. } => native_error("no-trace", none.to_string(), None),
            other => native_error("trace", other.to_string(), other.offset()),
        }
    }
}

pub(super) type SiteParts = (u32, u64, Vec<u64>);
pub(super) type EventParts = (u16, String, Vec<(String, String)>, Vec<SiteParts>);
pub(super) type TotalsParts = (u64, u64, u64, u64, u64);

pub(super) fn table(events: Vec<EventParts>) -> PyResult<Table> {
    Ok(Table::new(self::events(events)?))
}

pub(super) fn events(events: Vec<EventParts>) -> PyResult<Vec<Event>> {
    let bad_type = |ty: &str| PyValueError::new_err(format!("no integer type: {ty}"));
    let event = |(id, name, fields, sites): EventParts| -> PyResult<Event> {
        let fields = fields
            .into_iter()
            .map(|(name, ty)| Ok(Field { name, ty: FieldType::parse(&ty).ok_or_else(|| bad_type(&ty))? }))
            .collect::<PyResult<_>>()?;
        let sites = sites.into_iter().map(|(pid, addr, slots)| Site { pid, addr, slots }).collect();
        Ok(Event { id, name, fields, sites })
    };
    events.into_iter().map(event).collect()
}

pub(super) fn totals_parts(totals: trace::Totals) -> TotalsParts {
    (totals.hits, totals.lost, totals.torn, totals.stray, totals.errors)
}

/// Entries of a perf.data.
#[pyclass(module = "ptwprobe._native")]
struct TraceReader {
    reader: trace::TraceReader,
}

#[pymethods]
impl TraceReader {
    #[new]
    #[pyo3(signature = (path, events, follow = false))]
    fn new(path: PathBuf, events: Vec<EventParts>, follow: bool) -> PyResult<Self> {
        let mode = if follow { Mode::Follow } else { Mode::Whole };
        Ok(Self { reader: trace::TraceReader::open(&path, table(events)?, mode)? })
    }

    fn next_batch<'py>(&mut self, py: Python<'py>, max: usize) -> PyResult<Bound<'py, PyList>> {
        let batch = PyList::empty(py);
        while batch.len() < max {
            let Some(entry) = self.reader.next_entry()? else { break };
            batch.append(entry_tuple(py, &entry)?)?;
        }
        Ok(batch)
    }

    fn skip(&mut self, py: Python<'_>, max: usize) -> PyResult<bool> {
        py.detach(|| {
            for _ in 0..max {
                if self.reader.next_entry()?.is_none() {
                    return Ok(false);
                }
            }
            Ok(true)
        })
    }

    fn totals(&self) -> TotalsParts {
        totals_parts(self.reader.totals())
    }
}

pub(super) fn entry_tuple<'py>(py: Python<'py>, entry: &Entry<'_>) -> PyResult<Bound<'py, PyAny>> {
    let Entry { ns, pid, tid, cpu, .. } = *entry;
    let comm = || trace::printable(entry.comm);
    Ok(match entry.what {
        What::Hit { event, ip, args } => {
            let values = PyDict::new(py);
            for (index, &word) in args.iter().enumerate() {
                match event.fields.get(index) {
                    Some(field) => values.set_item(field.name.as_str(), field.ty.value(word))?,
                    None => values.set_item(format!("arg{}", index + 1), word)?,
                }
            }
            ("hit", ns, pid, tid, cpu, comm(), event.name.as_str(), ip, values).into_pyobject(py)?.into_any()
        }
        What::Stray { ip, value } => ("stray", ns, pid, tid, cpu, comm(), ip, value).into_pyobject(py)?.into_any(),
        What::Lost { count } => ("lost", ns, cpu, count).into_pyobject(py)?.into_any(),
        What::Torn { count } => ("torn", ns, cpu, count).into_pyobject(py)?.into_any(),
        What::Error { word, offset, message } => {
            ("error", ns, pid, tid, cpu, offset, message, word).into_pyobject(py)?.into_any()
        }
        What::Branch(branch) => {
            let kind = trace::kind_name(branch.kind);
            ("branch", ns, pid, tid, cpu, branch.from, branch.to, kind).into_pyobject(py)?.into_any()
        }
        What::Event { packet, ip } => {
            ("event", ns, pid, tid, cpu, packet.to_string(), ip).into_pyobject(py)?.into_any()
        }
        What::Note { offset, message } => ("note", ns, pid, tid, cpu, offset, message).into_pyobject(py)?.into_any(),
    })
}

pub(super) fn format(name: &str) -> PyResult<Format> {
    Format::parse(name).ok_or_else(|| PyValueError::new_err(format!("no format: {name}")))
}

/// A file descriptor of the caller's as a file of our own.
pub(super) fn duplicate(fd: i32) -> PyResult<File> {
    if fd < 0 {
        return Err(PyValueError::new_err("a negative file descriptor"));
    }
    // SAFETY: the caller keeps `fd` open during this call, in which it is duplicated.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?.into())
}

/// The lines of `script`.
#[pyclass(module = "ptwprobe._native")]
struct ScriptWriter {
    reader: trace::TraceReader,
    script: trace::Script,
    out: File,
}

/// Lines are written in pieces of about this many bytes.
pub(super) const PIECE_LEN: usize = 1 << 17;

#[pymethods]
impl ScriptWriter {
    #[new]
    #[pyo3(signature = (path, events, fd, format, patterns, tids, start = None, end = None))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        path: PathBuf,
        events: Vec<EventParts>,
        fd: i32,
        format: &str,
        patterns: Vec<String>,
        tids: Vec<u32>,
        start: Option<u64>,
        end: Option<u64>,
    ) -> PyResult<Self> {
        let format = self::format(format)?;
        let out = duplicate(fd)?;
        let reader = trace::TraceReader::open(&path, table(events)?, Mode::Whole)?;
        Ok(Self { reader, script: trace::Script::new(format, Filter::new(patterns, tids, start, end), None), out })
    }

    fn read(&mut self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| {
            let mut more = true;
            let mut seen = 0;
            // Also with a filter that lets nothing pass the caller gets a turn, for its signals.
            while more && self.script.bytes().len() < PIECE_LEN && seen < PIECE_LEN {
                match self.reader.next_entry()? {
                    Some(entry) => self.script.write(&entry),
                    None => more = false,
                }
                seen += 1;
            }
            Ok(more)
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
}

/// The lines of `dump`.
#[pyclass(module = "ptwprobe._native")]
struct PacketDump {
    dump: trace::Dump,
}

#[pymethods]
impl PacketDump {
    #[new]
    fn new(path: PathBuf) -> PyResult<Self> {
        Ok(Self { dump: trace::Dump::open(&path)? })
    }

    fn next_lines(&mut self, py: Python<'_>) -> PyResult<String> {
        let lines = py.detach(|| self.dump.next_lines())?;
        Ok(String::from_utf8_lossy(&lines).into_owned())
    }

    fn errors(&self) -> u64 {
        self.dump.errors()
    }
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<TraceWriter>()?;
    module.add_class::<TraceReader>()?;
    module.add_class::<ScriptWriter>()?;
    module.add_class::<PacketDump>()
}
