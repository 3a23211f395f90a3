//! The words for what is wrong in a file, the same in every output.

use std::fmt;

/// What of the file is not as it should be; numbers are bytes.
#[derive(Clone, Copy, Debug)]
pub enum Damage {
    /// The file ends here.
    Cut {
        missing: u64,
    },
    /// A chunk of trace tells `told` bytes; `len` are there up to the next record.
    BadChunk {
        told: u64,
        len: u64,
    },
    NoRecord {
        len: u64,
    },
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cut { missing } => write!(f, "the file is cut here: {missing} bytes are missing"),
            Self::BadChunk { told, len } => {
                write!(
                    f,
                    "a chunk of trace with an impossible size ({told} bytes): read are {len} up to the next record"
                )
            }
            Self::NoRecord { len } => write!(f, "{len} bytes that are no records; reading goes on behind them"),
        }
    }
}
