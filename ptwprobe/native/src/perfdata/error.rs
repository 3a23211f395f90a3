//! Why a perf.data cannot be read (on).

use std::fmt;
use std::io;

/// `offset`: bytes from the start of the file.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    Io(io::Error),
    /// Not a perf.data, or one of a kind that is not read here.
    Format {
        message: &'static str,
        offset: u64,
    },
    /// A perf.data that was recorded without Intel PT; `samples` are those of its other events.
    NoTrace {
        records: u64,
        samples: u64,
    },
}

impl Error {
    pub(super) fn format(message: &'static str, offset: u64) -> Self {
        Self::Format { message, offset }
    }

    #[must_use]
    pub fn offset(&self) -> Option<u64> {
        match self {
            Self::Io(_) | Self::NoTrace { .. } => None,
            Self::Format { offset, .. } => Some(*offset),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(e) => write!(f, "{e}"),
            Self::Format { message, .. } => f.write_str(message),
            Self::NoTrace { records, samples } => {
                write!(f, "no Intel PT data in it: {records} records, {samples} of them samples of other events")
            }
        }
    }
}

impl std::error::Error for Error {}

impl From<io::Error> for Error {
    fn from(e: io::Error) -> Self {
        Self::Io(e)
    }
}
