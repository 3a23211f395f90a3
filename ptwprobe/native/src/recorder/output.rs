//! The session's perf.data, and what becomes of it when a write fails.

use std::io;
use std::path::Path;

use super::{output_error_kind, OutputError};
use crate::clock::{rdtsc, Calibration, TimeConv};
use crate::perfdata::{Features, Writer, WriterInfo};

/// No CPU: a hit on one that has no ring, or hits of several.
pub const NO_CPU: u32 = u32::MAX;

/// What a piece of the file tells.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Told {
    pub hits: u64,
    pub lost: u64,
    pub torn: u64,
}

impl Told {
    fn add(&mut self, other: Told) {
        self.hits += other.hits;
        self.lost += other.lost;
        self.torn += other.torn;
    }
}

pub struct Output {
    writer: Option<Writer>,
    calibration: Calibration,
    command_line: Vec<String>,
    /// What the file tells as far as it was flushed, and (length of the file up to its end, what it tells) of every
    /// piece since.
    flushed: Told,
    unflushed: Vec<(u64, Told)>,
    hits: u64,
    lost: u64,
    len: u64,
    error: Option<OutputError>,
}

impl Output {
    pub fn create(path: &Path, command_line: Vec<String>) -> io::Result<Self> {
        let calibration = Calibration::start();
        let writer = Writer::create(path, calibration.conv(), WriterInfo::default())?;
        Ok(Output {
            len: writer.len(),
            writer: Some(writer),
            calibration,
            command_line,
            flushed: Told::default(),
            unflushed: Vec::new(),
            hits: 0,
            lost: 0,
            error: None,
        })
    }

    pub fn error(&self) -> Option<&OutputError> {
        self.error.as_ref()
    }

    pub fn conv(&self) -> TimeConv {
        self.calibration.conv()
    }

    pub fn tsc_hz(&self) -> u64 {
        self.calibration.tsc_hz()
    }

    /// Hits in the file.
    pub fn hits(&self) -> u64 {
        self.hits
    }

    /// Hits that are not in the file, because it could not be written.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// Bytes of the file.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Measures the clock once more, so that times of a long session stay right.
    pub fn refine_clock(&mut self) {
        self.calibration.refine();
    }

    /// Writes something that tells no counts.
    pub fn record(&mut self, write: impl FnOnce(&mut Writer) -> io::Result<()>) {
        self.tell(Told::default(), write);
    }

    /// Writes something that tells `told`.
    pub fn tell(&mut self, told: Told, write: impl FnOnce(&mut Writer) -> io::Result<()>) {
        let Some(writer) = self.writer.as_mut().filter(|_| self.error.is_none()) else {
            self.lost += told.hits;
            return;
        };
        match write(writer) {
            Ok(()) => {
                self.len = writer.len();
                if told != Told::default() {
                    self.hits += told.hits;
                    self.unflushed.push((self.len, told));
                }
            }
            Err(error) => {
                self.lost += told.hits;
                self.fail(&error);
            }
        }
    }

    /// Makes all that was written readable.
    pub fn flush(&mut self) {
        self.record(Writer::flush);
        if self.error.is_none() {
            self.unflushed.drain(..).for_each(|(_, told)| self.flushed.add(told));
        }
    }

    /// Ends the file. It is to tell `lost` hits (and those that could not be written) and `torn` ones in all.
    pub fn finish(&mut self, lost: u64, torn: u64) {
        self.flush();
        self.calibration.refine();
        let Some(mut writer) = self.writer.take() else { return };
        let mut end = Ok(());
        if self.error.is_some() {
            // Cut back to a whole record, the file has some bytes of room again: for what it does not tell yet.
            writer.resume();
            let ns = self.calibration.conv().tsc_to_ns(rdtsc());
            let lost = (lost + self.lost).saturating_sub(self.flushed.lost);
            let torn = torn.saturating_sub(self.flushed.torn);
            end = tell_rest(&mut writer, lost, torn, ns);
            self.len = writer.len();
        }
        let version = concat!("ptwprobe ", env!("CARGO_PKG_VERSION"));
        let features = Features::of_this_machine(version, std::mem::take(&mut self.command_line));
        // All hits are in the file by now; without the features it is readable, too.
        if let Err(error) = end.and_then(|()| writer.finish(self.calibration.conv(), &features)) {
            self.error.get_or_insert_with(|| describe(&error));
        }
    }

    /// The writer has cut the file back to its last whole record: what reached beyond it is not in it.
    fn fail(&mut self, error: &io::Error) {
        self.error = Some(describe(error));
        self.len = self.writer.as_ref().map_or(self.len, Writer::len);
        for (end, told) in self.unflushed.drain(..) {
            if end <= self.len {
                self.flushed.add(told);
            } else {
                self.hits -= told.hits;
                self.lost += told.hits;
            }
        }
    }
}

fn tell_rest(writer: &mut Writer, lost: u64, torn: u64, ns: u64) -> io::Result<()> {
    if lost > 0 {
        writer.lost(lost, NO_CPU, ns)?;
    }
    if torn > 0 {
        writer.torn(torn, NO_CPU, ns)?;
    }
    writer.finished_round()?;
    writer.flush()
}

fn describe(error: &io::Error) -> OutputError {
    OutputError { kind: output_error_kind(error), message: error.to_string() }
}
