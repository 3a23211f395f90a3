//! The words of one stream of packets, each with its time and its address.

use std::collections::VecDeque;
use std::fmt;

use super::past::Past;
use super::window::Window;
use crate::perfdata::{AuxChunk, Reader};
use crate::pt::{behind_bad, find_psb, BadReason, Block, Decoder, Errata, Kind, TimeConfig, PSB};

/// What comes next in a stream; `offset` in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    Value {
        tsc: u64,
        value: u64,
        ip: Option<u64>,
        offset: u64,
    },
    /// From here on words may be missing.
    Gap {
        tsc: u64,
        offset: u64,
        reason: GapReason,
    },
}

impl Word {
    /// Whether it is less than a word and its address, or less than a packet: what stands before a cut.
    #[must_use]
    pub fn is_rest(&self) -> bool {
        match self {
            Self::Value { .. } => true,
            Self::Gap { reason, .. } => match reason {
                GapReason::CutPacket => true,
                GapReason::Skipped { bytes } => *bytes < PSB.len() as u64,
                _ => false,
            },
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GapReason {
    /// The CPU says that it dropped packets.
    Overflow,
    UnknownPacket,
    /// The chunk ends inside a packet.
    CutPacket,
    /// Bytes before the first PSB, or after damage up to the next.
    Skipped {
        bytes: u64,
    },
    /// A chunk of the stream is missing.
    MissingChunk,
}

impl GapReason {
    /// Its stable name.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Overflow => "overflow",
            Self::UnknownPacket | Self::CutPacket => "bad-packet",
            Self::Skipped { .. } | Self::MissingChunk => "missing",
        }
    }
}

impl fmt::Display for GapReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Overflow => f.write_str("the CPU dropped packets here (OVF)"),
            Self::UnknownPacket => f.write_str("bytes that are no packet; decoding goes on at the next PSB"),
            Self::CutPacket => f.write_str("the trace ends inside a packet"),
            Self::Skipped { bytes } => write!(f, "{bytes} bytes skipped up to a PSB"),
            Self::MissingChunk => f.write_str("a chunk of the trace is missing before this one"),
        }
    }
}

/// Decodes the chunks of one stream, in whatever pieces they come. Keeps a packet, and a word, that goes on in a later
/// chunk.
#[derive(Debug, Default)]
pub struct Words {
    chunks: VecDeque<AuxChunk>,
    window: Window,
    /// Where in the stream the next chunk should begin.
    expected: Option<u64>,
    synced: bool,
    skipped: u64,
    block: Block,
    past: Past,
    errata: Errata,
    /// A word whose FUP has not come yet.
    waiting: Option<(u64, u64)>,
}

impl Words {
    /// `time`: where more than TSC packets tell the time.
    #[must_use]
    pub fn new(time: Option<TimeConfig>, errata: Errata) -> Self {
        Self { past: Past::new(time), errata, ..Self::default() }
    }

    pub fn push(&mut self, chunk: AuxChunk) {
        self.chunks.push_back(chunk);
    }

    /// The next word of the chunks pushed so far.
    pub fn next(&mut self, file: &Reader) -> Option<Word> {
        loop {
            if !self.synced {
                if !self.sync(file) {
                    return None;
                }
                if let Some(gap) = self.skipped_gap() {
                    return Some(gap);
                }
            }
            match self.decode() {
                Step::Word(word) => return Some(word),
                Step::Starved => match self.refill(file) {
                    Refill::More => {}
                    Refill::Gap(gap) => return Some(gap),
                    Refill::End => return None,
                },
            }
        }
    }

    /// No more chunks will come: what is left is told.
    pub fn finish(&mut self) -> Option<Word> {
        if let Some((value, offset)) = self.waiting.take() {
            return Some(Word::Value { tsc: self.past.now(), value, ip: None, offset });
        }
        let (rest, offset) = self.window.rest();
        if rest.is_empty() {
            return self.skipped_gap();
        }
        if !self.synced {
            self.skipped += rest.len() as u64;
            self.window.clear();
            return self.skipped_gap();
        }
        self.window.clear();
        Some(Word::Gap { tsc: self.past.now(), offset, reason: GapReason::CutPacket })
    }

    /// Gives memory back between rounds.
    pub fn shrink(&mut self) {
        self.window.shrink();
    }

    fn skipped_gap(&mut self) -> Option<Word> {
        let bytes = std::mem::take(&mut self.skipped);
        let offset = self.window.rest().1;
        (bytes != 0).then_some(Word::Gap { tsc: self.past.now(), offset, reason: GapReason::Skipped { bytes } })
    }

    fn decode(&mut self) -> Step {
        let (rest, base) = self.window.rest();
        let mut decoder = Decoder::resume(rest, base, self.block).with(self.errata);
        let mut done = 0;
        let step = loop {
            if self.waiting.is_none() {
                self.past.pass(&mut decoder);
                done = decoder.position();
            }
            let packet = match decoder.next_packet() {
                None => break Step::Starved,
                Some(Ok(packet)) => packet,
                Some(Err(bad)) if bad.reason == BadReason::Cut => break Step::Starved,
                Some(Err(bad)) => {
                    self.synced = false;
                    self.skipped = 0;
                    self.waiting = None;
                    done = behind_bad(rest, decoder.position());
                    break Step::Word(Word::Gap {
                        tsc: self.past.now(),
                        offset: bad.offset,
                        reason: GapReason::UnknownPacket,
                    });
                }
            };
            if let Some((value, offset)) = self.waiting {
                let ip = match packet.kind {
                    Kind::Fup(field) => Some(self.past.scan.last_ip.update(field)),
                    kind if self.past.takes(kind) => None,
                    // No FUP came: the packet is looked at again.
                    _ => {
                        self.waiting = None;
                        break Step::Word(Word::Value { tsc: self.past.now(), value, ip: None, offset });
                    }
                };
                done = decoder.position();
                if let Some(ip) = ip {
                    self.waiting = None;
                    break Step::Word(Word::Value { tsc: self.past.now(), value, ip, offset });
                }
                continue;
            }
            done = decoder.position();
            self.block = decoder.block();
            match packet.kind {
                Kind::Psb => self.past.psb(),
                Kind::Tip(field) | Kind::TipPge(field) | Kind::TipPgd(field) | Kind::Fup(field) => {
                    self.past.scan.last_ip.update(field);
                }
                Kind::Ptw { value, ip: true, .. } => self.waiting = Some((value, packet.offset)),
                Kind::Ptw { value, ip: false, .. } => {
                    break Step::Word(Word::Value { tsc: self.past.now(), value, ip: None, offset: packet.offset });
                }
                Kind::Ovf => {
                    self.past.ovf();
                    break Step::Word(Word::Gap {
                        tsc: self.past.now(),
                        offset: packet.offset,
                        reason: GapReason::Overflow,
                    });
                }
                kind => {
                    self.past.takes(kind);
                }
            }
        };
        self.window.advance(done);
        step
    }

    fn refill(&mut self, file: &Reader) -> Refill {
        if self.window.read(file) {
            return Refill::More;
        }
        let Some(chunk) = self.chunks.front() else { return Refill::End };
        let missing = self.expected.is_some_and(|expected| expected != chunk.stream_offset);
        let (rest, offset) = self.window.rest();
        if !rest.is_empty() && (missing || starts_with_psb(file, chunk)) {
            // Nothing of the packet will come.
            self.window.clear();
            return Refill::Gap(Word::Gap { tsc: self.past.now(), offset, reason: GapReason::CutPacket });
        }
        let offset = chunk.file_offset;
        self.synced &= !missing;
        self.next_chunk();
        if missing {
            self.waiting = None;
            return Refill::Gap(Word::Gap { tsc: self.past.now(), offset, reason: GapReason::MissingChunk });
        }
        Refill::More
    }

    fn next_chunk(&mut self) -> bool {
        let Some(chunk) = self.chunks.pop_front() else { return false };
        self.window.start(&chunk);
        self.expected = Some(chunk.stream_offset.wrapping_add(chunk.len));
        // Damage before must not spoil the times from here on; where there is none they go on.
        if chunk.tsc_reference != 0 && (!self.synced || self.past.is_far(chunk.tsc_reference)) {
            self.past.set(chunk.tsc_reference);
        }
        true
    }

    /// Goes to the next PSB; false where the chunks have none.
    fn sync(&mut self, file: &Reader) -> bool {
        loop {
            let rest = self.window.rest().0;
            if let Some(at) = find_psb(rest, 0) {
                self.skipped += at as u64;
                self.window.advance(at);
                self.synced = true;
                self.block = Block::None;
                return true;
            }
            // The end may be the start of a PSB.
            let skip = rest.len().saturating_sub(PSB.len() - 1);
            self.skipped += skip as u64;
            self.window.advance(skip);
            if !self.window.read(file) && !self.next_chunk() {
                return false;
            }
        }
    }
}

enum Step {
    Word(Word),
    Starved,
}

enum Refill {
    More,
    Gap(Word),
    End,
}

fn starts_with_psb(file: &Reader, chunk: &AuxChunk) -> bool {
    let mut head = [0; PSB.len()];
    chunk.len >= PSB.len() as u64
        && matches!(file.read_trace(chunk.file_offset, &mut head), Ok(n) if n == head.len())
        && head == PSB
}
