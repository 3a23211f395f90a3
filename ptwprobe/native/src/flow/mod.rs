//! From packets and code to the control flow.
//!
//! A stream of packets is cut into pieces at PSBs, each of which is walked by itself ([`Engine`]): what the trace tells
//! is followed through basic blocks, which are built once, linked and kept ([`cache`]). Nothing is guessed: where the
//! trace and the code disagree, or the code is not known, that is told, and the walk goes on at the next sure point.

mod block;
mod cache;
pub mod code;
pub mod context;
mod engine;
mod pieces;
mod returns;
mod sink;
mod walk;

pub use engine::{Config, Engine, Piece};
pub use sink::{Batch, Branch, BranchKind, Finding, Mark, What};
