//! Which code a process ran, where and when.
//!
//! `Builder` takes what the records of a perf.data say of mappings, programs and threads and makes the `Timeline`: the
//! address spaces (`regions.rs`, `space.rs`) and who saw which of them when. The bytes come from `files.rs`, when they
//! are asked for.

mod builder;
pub mod elf;
mod files;
mod find;
mod flat;
mod jit;
mod regions;
mod sideband;
mod space;
#[cfg(test)]
mod tests;
mod timeline;

pub use builder::{Builder, Map};
pub use files::{Content, Note, Places, Problem, Wanted};
pub use flat::FlatCode;
pub use timeline::{Place, Timeline, Who};
