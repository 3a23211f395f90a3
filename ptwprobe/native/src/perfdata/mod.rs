//! perf.data: the writer and the reader. Layout: `linux/perf_event.h` for the records of the kernel, and perf's
//! `perf.data-file-format.txt` for the file and the records of user space.
//!
//! The reader is our own. The crate linux-perf-data (0.13) reads the same kinds of files and parses more kinds of
//! records, but it does not fit here: it takes a chunk of trace, of whatever size the file tells, into memory, where ours
//! stays in the file; it sorts a whole round in memory and ends at the first error, where a cut, damaged or growing file
//! must be read on; and it unpacks a compressed record at once, however large it becomes. Compressed records are
//! unpacked by libzstd: perf never ends its stream, and a pure-Rust decoder (ruzstd) holds the last window back until then.

mod attrs;
mod buildids;
mod bytes;
mod error;
mod features;
mod head;
mod header;
pub mod layout;
mod names;
mod overlap;
mod parse;
mod ptinfo;
mod reader;
mod records;
mod sample;
mod unpack;
mod writer;

pub use attrs::{Attr, Attrs};
pub use bytes::Cursor;
pub use error::Error;
pub use features::Features;
pub use names::{Name, Names};
pub use overlap::Joiner;
pub use ptinfo::{PtConfig, PtInfo, SwitchSource};
pub use reader::{Next, Reader};
pub use records::{
    AuxChunk, AuxFlags, Body, BuildId, ChunkKind, Comm, CpuMode, FileId, Mmap, Record, Runs, SampleId, Task,
};
pub use writer::{Mmap2, Writer, WriterInfo};
