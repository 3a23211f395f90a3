//! The session's perf.data, and what becomes of it when a write fails.

use std::io;
use std::path::Path;

use super::{output_error_kind, OutputError};
use crate::clock::{Calibration, TimeConv};
use crate::perfdata::{Features, Writer, WriterInfo};

pub struct Output {
    writer: Option<Writer>,
    calibration: Calibration,
    command_line: Vec<String>,
    /// (file length up to which it reaches, hits in it) of every chunk that is not surely in the file.
    unflushed: Vec<(u64, u64)>,
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

    /// Writes something that holds no hits.
    pub fn record(&mut self, write: impl FnOnce(&mut Writer) -> io::Result<()>) {
        self.chunk(0, write);
    }

    /// Writes something that holds `hits` hits.
    pub fn chunk(&mut self, hits: u64, write: impl FnOnce(&mut Writer) -> io::Result<()>) {
        let Some(writer) = self.writer.as_mut().filter(|_| self.error.is_none()) else {
            self.lost += hits;
            return;
        };
        match write(writer) {
            Ok(()) => {
                self.len = writer.len();
                if hits > 0 {
                    self.hits += hits;
                    self.unflushed.push((self.len, hits));
                }
            }
            Err(error) => {
                self.lost += hits;
                self.fail(&error);
            }
        }
    }

    /// Makes all that was written readable.
    pub fn flush(&mut self) {
        self.chunk(0, Writer::flush);
        if self.error.is_none() {
            self.unflushed.clear();
        }
    }

    /// Ends the file.
    pub fn finish(&mut self) {
        self.flush();
        self.calibration.refine();
        if let Some(writer) = self.writer.take().filter(|_| self.error.is_none()) {
            let version = concat!("ptwprobe ", env!("CARGO_PKG_VERSION"));
            let features = Features::of_this_machine(version, std::mem::take(&mut self.command_line));
            // All hits are in the file by now; without the features it is readable, too.
            if let Err(error) = writer.finish(self.calibration.conv(), &features) {
                self.error = Some(describe(&error));
            }
        }
    }

    /// The writer has cut the file back to its last whole record: what reached beyond it is lost.
    fn fail(&mut self, error: &io::Error) {
        self.error = Some(describe(error));
        self.len = self.writer.as_ref().map_or(self.len, Writer::len);
        let len = self.len;
        let beyond: u64 = self.unflushed.drain(..).filter(|(end, _)| *end > len).map(|(_, hits)| hits).sum();
        self.hits -= beyond;
        self.lost += beyond;
    }
}

fn describe(error: &io::Error) -> OutputError {
    OutputError { kind: output_error_kind(error), message: error.to_string() }
}
