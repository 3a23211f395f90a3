//! perf.data: the writer and the reader. Layout: `linux/perf_event.h` for the records of the kernel, and perf's
//! `perf.data-file-format.txt` for the file and the records of user space.

mod features;
pub mod layout;
mod writer;

pub use features::Features;
pub use writer::{Mmap2, Writer, WriterInfo};
