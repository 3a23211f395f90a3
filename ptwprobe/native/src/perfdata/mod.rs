//! perf.data: the writer and the reader. Layout: `linux/perf_event.h` for the records of the kernel, and perf's
//! `perf.data-file-format.txt` for the file and the records of user space.
//!
//! The reader is our own: a file that still grows, a cut one, and chunks of trace that are left where they are.

mod attrs;
mod buildids;
mod bytes;
mod error;
mod features;
mod head;
mod header;
pub mod layout;
mod names;
mod parse;
mod ptinfo;
mod reader;
mod records;
mod sample;
mod writer;

pub use attrs::{Attr, Attrs};
pub use bytes::Cursor;
pub use error::Error;
pub use features::Features;
pub use names::{Name, Names};
pub use ptinfo::{PtConfig, PtInfo, SwitchSource};
pub use reader::{Next, Reader};
pub use records::{
    AuxChunk, AuxFlags, Body, BuildId, ChunkKind, Comm, CpuMode, FileId, Mmap, Record, Runs, SampleId, Task,
};
pub use writer::{Mmap2, Writer, WriterInfo};
