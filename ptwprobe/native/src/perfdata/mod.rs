//! perf.data: the writer and the reader. Layout: `linux/perf_event.h` for the records of the kernel, and perf's
//! `perf.data-file-format.txt` for the file and the records of user space.
//!
//! The reader is our own: a file that still grows, a cut one, and chunks of trace that are left where they are.

mod bytes;
mod error;
mod features;
mod head;
pub mod layout;
mod reader;
mod records;
mod writer;

pub use bytes::Cursor;
pub use error::Error;
pub use features::Features;
pub use reader::{Next, Reader};
pub use records::{AuxChunk, Body, Comm, Record, SampleId};
pub use writer::{Mmap2, Writer, WriterInfo};
