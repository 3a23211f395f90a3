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
mod node;
mod pieces;
mod pool;
mod returns;
mod sink;
mod suspended;
mod walk;

use std::sync::Arc;

use context::{Schedule, Spaces};
use suspended::Suspended;

pub use engine::{Config, Engine, Progress};
pub use pieces::{OwnedPiece, Pieces, Skipped, Source};
pub use pool::{Input, Walks};
pub use sink::{Batch, Branch, BranchKind, Finding, Mark, What};

/// Walks one stream, of which `each` gets batch after batch.
pub fn walk_stream<R: Source>(
    pieces: &mut Pieces<R>,
    config: Config,
    spaces: &impl Spaces,
    schedule: &Arc<Schedule>,
    mut each: impl FnMut(&Batch),
) {
    let mut engine = Engine::new(config, spaces);
    let mut batch = Batch::default();
    let mut suspended = Suspended::default();
    while let Some(piece) = pieces.next_piece(|ip, tsc| knows(spaces, schedule, ip, tsc)) {
        engine.start(piece, schedule);
        loop {
            let progress = engine.run(&mut batch);
            if progress == Progress::Waits {
                engine.resolve(&suspended);
                continue;
            }
            each(&batch);
            batch.clear();
            if progress == Progress::Done {
                break;
            }
        }
        suspended = suspended.after(engine.suspended());
    }
    batch.skipped(pieces.skipped());
    each(&batch);
}

/// Whether there is code at `ip`.
fn knows(spaces: &impl Spaces, schedule: &Schedule, ip: u64, tsc: u64) -> bool {
    spaces.space(schedule.at(tsc).space).read(ip, &mut [0]) != 0
}
