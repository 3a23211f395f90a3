//! From a perf.data file to hits: chunks of trace to packets, packets to words, words to hits, in the order of time.
//!
//! Packet level only, but for `flow`: no code is walked.

mod assemble;
mod cursor;
mod damage;
mod dump;
mod entry;
mod filter;
pub mod flow;
mod flowtext;
mod merged;
mod past;
mod quick;
mod reader;
mod script;
mod sideband;
mod stacks;
mod symbols;
mod table;
mod tables;
mod text;
mod threads;
mod view;
mod window;
mod words;

pub use dump::Dump;
pub use entry::{Entry, Totals, What};
pub use filter::Filter;
pub use flowtext::kind_name;
pub use merged::Merged;
pub use reader::{Mode, TraceReader};
pub use script::{Format, Script};
pub use table::{Event, Field, FieldType, Site, Table, TypeKind};
pub use tables::{BranchTable, HitTable};
pub use text::printable;
pub use view::{Show, View};
