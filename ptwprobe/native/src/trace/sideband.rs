//! The sideband of a perf.data in the order of time, round by round: what a walk of the flow needs of it besides the
//! code (that is `image::Timeline`'s).

use std::collections::VecDeque;
use std::path::Path;

use super::damage::Damage;
use crate::perfdata::{Body, Error, Next, Reader, Record};

/// What a round may hold before it is taken for finished: a hostile file may have one round only.
const MAX_ROUND: usize = 1 << 16;

/// What the sideband tells.
#[derive(Debug)]
pub enum Told {
    Record(Record),
    /// Something is wrong in the file at `offset`.
    Problem {
        ns: Option<u64>,
        offset: u64,
        text: String,
    },
}

/// See the module.
pub struct Sideband {
    file: Reader,
    /// Sorted by time.
    queue: VecDeque<(u64, Told)>,
    /// No record before this time will come any more: those of a round may be older than the round's end, not older
    /// than the end of the round before.
    safe: u64,
    newest: u64,
    /// Where the file is cut, and how many bytes are missing.
    cut: Option<(u64, u64)>,
    ended: bool,
}

impl Sideband {
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = Reader::open(path)?;
        Ok(Self { file, queue: VecDeque::new(), safe: 0, newest: 0, cut: None, ended: false })
    }

    /// What comes next up to `ns`.
    pub fn next_until(&mut self, ns: u64) -> Result<Option<Told>, Error> {
        while self.safe <= ns && !self.ended {
            self.load_round()?;
        }
        if self.queue.front().is_none_or(|&(at, _)| at > ns) {
            return Ok(None);
        }
        Ok(self.queue.pop_front().map(|(_, told)| told))
    }

    /// Where the file is cut; known at its end.
    #[must_use]
    pub fn cut(&self) -> Option<(u64, u64)> {
        self.cut
    }

    fn load_round(&mut self) -> Result<(), Error> {
        let before = self.newest;
        for _ in 0..MAX_ROUND {
            match self.file.next_record()? {
                Next::Record(Record { body: Body::FinishedRound, .. }) => break,
                Next::Record(record) => self.push(record),
                Next::BadChunk { chunk, told } => {
                    let damage = Damage::BadChunk { told, len: chunk.len };
                    self.problem(None, chunk.file_offset, damage.to_string());
                }
                Next::NoRecord { offset, len } => self.problem(None, offset, Damage::NoRecord { len }.to_string()),
                Next::CutChunk { chunk, missing, .. } => {
                    self.cut = Some((chunk.file_offset.saturating_add(chunk.len), missing));
                    self.ended = true;
                }
                Next::Cut { offset, missing } => {
                    self.cut = Some((offset, missing));
                    self.ended = true;
                }
                Next::End => self.ended = true,
            }
            if self.ended {
                break;
            }
        }
        self.safe = before;
        self.queue.make_contiguous().sort_by_key(|&(ns, _)| ns);
        Ok(())
    }

    fn push(&mut self, record: Record) {
        let ns = record.id.ns;
        if let Some(text) = record.body.problem() {
            return self.problem(ns, record.file_offset, text.to_owned());
        }
        match record.body {
            Body::Time(_) | Body::Aux(_) | Body::Sample | Body::Other => {}
            _ => {
                // What has no time was so from the start.
                self.newest = self.newest.max(ns.unwrap_or(0));
                self.queue.push_back((ns.unwrap_or(0), Told::Record(record)));
            }
        }
    }

    fn problem(&mut self, ns: Option<u64>, offset: u64, text: String) {
        self.queue.push_back((ns.unwrap_or(0), Told::Problem { ns, offset, text }));
    }
}
