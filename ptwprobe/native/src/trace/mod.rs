//! From a perf.data file to hits: chunks of trace to packets, packets to words, words to hits, in the order of time.
//!
//! Packet level only: no code is walked, so times are those of the last TSC packet.

mod assemble;
mod damage;
mod dump;
mod entry;
mod filter;
pub mod flow;
mod reader;
mod script;
mod table;
mod text;
mod threads;
mod window;
mod words;

pub use dump::Dump;
pub use entry::{Entry, Totals, What};
pub use filter::Filter;
pub use reader::{Mode, TraceReader};
pub use script::{Format, Script};
pub use table::{Event, Field, FieldType, Site, Table, TypeKind};
pub use text::printable;
