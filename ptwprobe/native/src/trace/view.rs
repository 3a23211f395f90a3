//! What `script` shows of the control flow, and how.

use std::sync::Arc;

use super::entry::{Entry, What};
use super::stacks::Stacks;
use super::symbols::Symbols;
use crate::flow::BranchKind;
use crate::image::Timeline;

/// What is shown. What is lost or wrong always is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Show {
    pub hits: bool,
    pub events: bool,
    /// A bit for each kind of branch.
    branches: u16,
}

const fn bits(kinds: &[BranchKind]) -> u16 {
    let mut bits = 0;
    let mut rest = kinds;
    while let [kind, others @ ..] = rest {
        bits |= 1 << *kind as u16;
        rest = others;
    }
    bits
}

const CALLS: u16 = bits(&[BranchKind::Call, BranchKind::IndirectCall]);
const RETURNS: u16 = bits(&[BranchKind::Return]);
const JUMPS: u16 = bits(&[BranchKind::Cond, BranchKind::Jump, BranchKind::IndirectJump]);
const SYSCALLS: u16 = bits(&[BranchKind::Syscall, BranchKind::FarReturn]);
const INTERRUPTS: u16 = bits(&[BranchKind::Interrupt]);
const TRACE: u16 = bits(&[BranchKind::TraceStart, BranchKind::TraceEnd]);

impl Show {
    pub const ALL: Self = Self { hits: true, events: true, branches: u16::MAX };
    const NOTHING: Self = Self { hits: false, events: false, branches: 0 };

    /// A word, or a letter as of perf's `--itrace`.
    fn word(word: &str) -> Option<Self> {
        let branches = |branches| Self { branches, ..Self::NOTHING };
        Some(match word {
            "hits" | "w" => Self { hits: true, ..Self::NOTHING },
            "branches" | "b" => branches(u16::MAX),
            "calls" => branches(CALLS),
            "returns" => branches(RETURNS),
            "jumps" => branches(JUMPS),
            "syscalls" => branches(SYSCALLS),
            "interrupts" => branches(INTERRUPTS),
            "trace" => branches(TRACE),
            // As perf: whatever goes somewhere to come back, and what comes back.
            "c" => branches(CALLS | INTERRUPTS | bits(&[BranchKind::Syscall, BranchKind::TraceEnd])),
            "r" => branches(RETURNS | bits(&[BranchKind::FarReturn, BranchKind::TraceStart])),
            "x" => Self { events: true, hits: false, branches: bits(&[BranchKind::TxAbort]) },
            "events" | "p" | "o" => Self { events: true, ..Self::NOTHING },
            "errors" | "e" => Self::NOTHING,
            _ => return None,
        })
    }

    /// Words with commas between, or letters.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let parts: Option<Vec<Self>> = text.split(',').map(|word| Self::word(word.trim())).collect();
        let parts = parts.or_else(|| {
            let mut buffer = [0; 4];
            text.chars().map(|letter| Self::word(letter.encode_utf8(&mut buffer))).collect()
        })?;
        let all = parts.iter().fold(Self::NOTHING, |all, part| Self {
            hits: all.hits | part.hits,
            events: all.events | part.events,
            branches: all.branches | part.branches,
        });
        (!parts.is_empty()).then_some(all)
    }

    #[must_use]
    pub fn passes(self, what: &What<'_>) -> bool {
        match what {
            What::Hit { .. } | What::Stray { .. } => self.hits,
            What::Branch(branch) => self.branches & bits(&[branch.kind]) != 0,
            What::Event { .. } | What::Note { .. } => self.events,
            What::Lost { .. } | What::Torn { .. } | What::Error { .. } => true,
        }
    }
}

/// See the module.
pub struct View {
    pub show: Show,
    /// Branches are moved to the right by the depth of calls.
    pub indent: bool,
    /// Below each hit stand the calls that led to it.
    pub stack: bool,
    pub symbols: Symbols,
    stacks: Stacks,
}

impl View {
    #[must_use]
    pub fn new(show: Show, indent: bool, stack: bool, timeline: Arc<Timeline>) -> Self {
        Self { show, indent, stack, symbols: Symbols::new(timeline), stacks: Stacks::default() }
    }

    /// Takes an entry, shown or not; the depth to show it at.
    pub fn follow(&mut self, entry: &Entry<'_>) -> usize {
        if !self.indent && !self.stack {
            return 0;
        }
        match &entry.what {
            What::Branch(branch) => self.stacks.branch(entry.tid, branch),
            What::Error { word, .. } if *word != "incomplete" => {
                self.stacks.lost(entry.tid);
                0
            }
            _ => self.stacks.depth(entry.tid),
        }
    }

    /// The calls that a thread is in, innermost first.
    pub fn calls(&self, tid: Option<u32>) -> Vec<u64> {
        self.stacks.calls(tid).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::flow::Branch;

    #[test]
    fn what_is_shown_is_told_by_words_or_by_letters() {
        assert_eq!(Show::parse("hits,branches"), Show::parse("wb"));
        assert_eq!(Show::parse("branches, events,w"), Some(Show::ALL));
        assert_eq!(Show::parse("e"), Some(Show::NOTHING));
        for bad in ["", "hit", "bq", "hits,", ","] {
            assert_eq!(Show::parse(bad), None, "{bad}");
        }
        let passes = |text, kind| Show::parse(text).map(|show| show.passes(&What::Branch(Branch::new(1, 2, kind))));
        assert_eq!(passes("calls", BranchKind::Call), Some(true));
        assert_eq!(passes("calls", BranchKind::Syscall), Some(false));
        assert_eq!(passes("c", BranchKind::Syscall), Some(true));
        assert_eq!(passes("cr", BranchKind::Cond), Some(false));
    }
}
