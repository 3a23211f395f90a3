//! Which code a process ran, where and when.

mod flat;

pub use flat::FlatCode;
