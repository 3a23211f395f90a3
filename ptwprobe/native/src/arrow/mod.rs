//! Tables in Arrow's memory layout, handed over without a copy (the Arrow C data and C stream interfaces).
//!
//! Only what the tables of a trace need: integers, text, lists of words, text by number.

mod column;
mod ffi;

pub use column::{Column, Field, Ints, Texts, Words};
pub use ffi::{ArrayStream, STREAM_NAME};

/// A table that comes in batches.
pub trait Batches: Send {
    fn fields(&self) -> Vec<Field>;

    /// The next rows, a column for each field and all equally long; `None` at the end. An error ends it.
    fn next_columns(&mut self) -> Result<Option<Vec<Column>>, String>;
}
