//! What a reader of a trace gets.

use super::table::Event;
use crate::flow::Branch;
use crate::pt::Kind;

/// One thing that the trace tells; `None` is not known.
#[derive(Debug)]
pub struct Entry<'a> {
    /// ns of CLOCK_MONOTONIC.
    pub ns: Option<u64>,
    pub pid: Option<u32>,
    pub tid: Option<u32>,
    pub cpu: Option<u32>,
    /// Empty where not known; any bytes else.
    pub comm: &'a [u8],
    /// Address space of the flow's timeline; 0 where there is none.
    pub space: u32,
    pub what: What<'a>,
}

#[derive(Debug)]
pub enum What<'a> {
    /// `ip`: runtime address of the site; where the site is not known, of the first word's `ptwrite`.
    Hit {
        event: &'a Event,
        ip: u64,
        args: &'a [u64],
    },
    /// A word that belongs to no hit.
    Stray {
        ip: Option<u64>,
        value: u64,
    },
    /// Hits that found no room.
    Lost {
        count: u64,
    },
    /// Hits that were begun and never finished.
    Torn {
        count: u64,
    },
    Branch(Branch),
    /// Power states, transactions, virtual machines: the packet that tells, and the address that came with it.
    Event {
        packet: Kind,
        ip: Option<u64>,
    },
    /// Something is wrong in the file at `offset`; `word` is its stable name.
    Error {
        word: &'static str,
        offset: Option<u64>,
        message: &'a str,
    },
    /// Something is not as expected, and nothing is lost by it.
    Note {
        offset: u64,
        message: &'a str,
    },
}

/// Every hit is in exactly one of `hits`, `lost`, `torn`; `stray` are words without a header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    pub hits: u64,
    pub lost: u64,
    pub torn: u64,
    pub stray: u64,
    pub errors: u64,
}

impl Totals {
    pub fn add(&mut self, what: &What<'_>) {
        match what {
            What::Hit { .. } => self.hits += 1,
            What::Stray { .. } => self.stray += 1,
            What::Lost { count } => self.lost = self.lost.saturating_add(*count),
            What::Torn { count } => self.torn = self.torn.saturating_add(*count),
            What::Error { .. } => self.errors += 1,
            What::Branch(_) | What::Event { .. } | What::Note { .. } => {}
        }
    }
}
