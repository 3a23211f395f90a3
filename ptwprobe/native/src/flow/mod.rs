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

use context::{Schedule, Spaces};

pub use engine::{Config, Engine, Piece};
pub use pieces::{OwnedPiece, Pieces, Skipped, Source};
pub use sink::{Batch, Branch, BranchKind, Finding, Mark, What};

/// Walks one stream that lies in memory, of which `each` gets batch after batch.
pub fn walk_bytes(
    packets: &[u8],
    config: Config,
    spaces: &dyn Spaces,
    schedule: &Schedule,
    mut each: impl FnMut(&Batch),
) {
    let mut engine = Engine::new(config, spaces, schedule);
    let mut batch = Batch::default();
    let Some(start) = crate::pt::find_psb(packets, 0) else { return };
    let bytes = packets.get(start..).unwrap_or_default();
    engine.start(Piece { bytes, offset: start as u64, tsc: 0, next_ip: None }, schedule);
    let mut done = false;
    while !done {
        done = engine.run(&mut batch);
        each(&batch);
        batch.clear();
    }
}
