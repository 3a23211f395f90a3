//! Which addresses of an ELF file something jumps to, and where functions begin and end.
//!
//! What cannot be known is told as unknown (`has_unknown_jumps`), never guessed. All addresses are virtual addresses of
//! the file.

mod elf;
mod flow;
mod jumps;
mod sweep;
mod tables;
mod unwind;

pub use elf::ElfError;
use elf::{Image, Run};
use iced_x86::{Decoder, DecoderOptions, Instruction};

/// Why an address is a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum TargetKind {
    Function,
    Branch,
    Call,
    /// Where a call returns to.
    Return,
    /// An entry of a jump table.
    Table,
    /// Its address is taken: by code, a relocation or data.
    Pointer,
    LandingPad,
    Endbr,
}

impl TargetKind {
    const ALL: [Self; 8] = [
        Self::Function,
        Self::Branch,
        Self::Call,
        Self::Return,
        Self::Table,
        Self::Pointer,
        Self::LandingPad,
        Self::Endbr,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Function => "function",
            Self::Branch => "branch",
            Self::Call => "call",
            Self::Return => "return",
            Self::Table => "table",
            Self::Pointer => "pointer",
            Self::LandingPad => "landing-pad",
            Self::Endbr => "endbr",
        }
    }
}

/// Targets while they are collected: the address above, the kind in the low three bits.
#[derive(Debug, Default)]
pub(crate) struct Targets(Vec<u64>);

impl Targets {
    pub(crate) fn push(&mut self, vaddr: u64, kind: TargetKind) {
        // Addresses of 2^61 and more do not exist in a process.
        if vaddr >> 61 == 0 {
            self.0.push(vaddr << 3 | kind as u64);
        }
    }

    fn finish(mut self) -> Vec<u64> {
        self.0.sort_unstable();
        self.0.dedup();
        self.0.shrink_to_fit();
        self.0
    }
}

/// [start, end) of functions, by start.
#[derive(Debug, Default)]
pub(crate) struct Functions(Vec<(u64, u64)>);

impl Functions {
    /// Frame descriptions are exact; a symbol counts where they have a gap, up to its size or the next start.
    fn new(image: &Image, described: &[(u64, u64)]) -> Self {
        let mut functions = described.to_vec();
        functions.sort_unstable();
        functions.dedup_by_key(|f| f.0);
        let frames = Self(functions);
        let mut out = frames.0.clone();
        let mut symbols = image.symbols.clone();
        symbols.sort_unstable_by_key(|s| (s.0, std::cmp::Reverse(s.1)));
        symbols.dedup_by_key(|s| s.0);
        symbols.retain(|s| frames.containing(s.0).is_none());
        for (i, &(start, size)) in symbols.iter().enumerate() {
            let next = symbols.get(i + 1).map_or(u64::MAX, |s| s.0);
            let frame = frames.0.get(frames.0.partition_point(|f| f.0 < start)).map_or(u64::MAX, |f| f.0);
            let code = image.code.iter().find(|c| c.0 <= start && start < c.1).map_or(start, |c| c.1);
            let limit = code.min(frame);
            let end = if size == 0 { limit.min(next) } else { limit.min(start.saturating_add(size)) };
            out.push((start, end));
        }
        out.sort_unstable();
        Self(out)
    }

    pub(crate) fn containing(&self, vaddr: u64) -> Option<(u64, u64)> {
        let after = self.0.partition_point(|f| f.0 <= vaddr);
        // Functions may hold others (several entries into one body): look a few back.
        let first = after.saturating_sub(8);
        self.0.get(first..after)?.iter().rev().copied().find(|f| vaddr < f.1)
    }
}

/// What is known about one file's code.
#[derive(Debug)]
pub struct CodeMap {
    code: Vec<Run>,
    functions: Functions,
    /// Where decoding may start, sorted.
    starts: Vec<u64>,
    targets: Vec<u64>,
    unknown_jumps: Vec<u64>,
    /// Functions with landing pads that could not be read.
    opaque: Vec<(u64, u64)>,
}

impl CodeMap {
    pub fn read(path: &str) -> Result<Self, ElfError> {
        let image = Image::read(path)?;
        let unwind = unwind::read(&image)?;
        let functions = Functions::new(&image, &unwind.functions);
        let mut targets = Targets::default();
        let mut starts = Vec::new();
        for &(start, end) in &functions.0 {
            targets.push(start, TargetKind::Function);
            starts.extend([start, end]);
        }
        for &(vaddr, _) in &image.symbols {
            targets.push(vaddr, TargetKind::Function);
            starts.push(vaddr);
        }
        if image.is_code(image.entry) {
            targets.push(image.entry, TargetKind::Function);
            starts.push(image.entry);
        }
        starts.extend(image.code.iter().map(|c| c.0));
        starts.sort_unstable();
        starts.dedup();
        for &pad in &unwind.landing_pads {
            targets.push(pad, TargetKind::LandingPad);
        }
        let sweep = sweep::sweep(&image, &starts, &mut targets);
        let mut flow = flow::Flow::new(&image, &functions, &starts, &sweep);
        let jumps: Vec<_> =
            sweep.indirect_jumps.iter().map(|ip| (*ip, jumps::source(&mut flow, &functions, &sweep, *ip))).collect();
        let unknown_jumps = tables::follow(&image, &jumps, &mut targets);
        tables::data_pointers(&image, &mut targets);
        let code = image.code.iter().map(|&(start, end)| Run {
            vaddr: start,
            bytes: image.at(start, usize::try_from(end - start).unwrap_or(0)).to_vec(),
        });
        Ok(Self {
            code: code.collect(),
            functions,
            starts,
            targets: targets.finish(),
            unknown_jumps,
            opaque: unwind.opaque,
        })
    }

    /// [start, end) of the function that contains `vaddr`.
    pub fn function_bounds(&self, vaddr: u64) -> Option<(u64, u64)> {
        self.functions.containing(vaddr)
    }

    /// Every known target t with lo < t < hi, with all the reasons for it.
    pub fn targets(&self, lo: u64, hi: u64) -> Vec<(u64, TargetKind)> {
        let key = |vaddr: u64| vaddr.min(u64::MAX >> 3) << 3;
        let first = self.targets.partition_point(|t| *t < key(lo.saturating_add(1)));
        let last = self.targets.partition_point(|t| *t < key(hi));
        let range = self.targets.get(first..last).unwrap_or_default();
        range.iter().filter_map(|t| Some((t >> 3, *TargetKind::ALL.get((t & 7) as usize)?))).collect()
    }

    /// Whether decoding straight on from the nearest known start reaches `vaddr`.
    pub fn is_boundary(&self, vaddr: u64) -> bool {
        let after = self.starts.partition_point(|s| *s <= vaddr);
        let Some(&start) = after.checked_sub(1).and_then(|i| self.starts.get(i)) else {
            return false;
        };
        let Some(length) = usize::try_from(vaddr - start).ok() else {
            return false;
        };
        // The instruction at `vaddr` itself has to decode, too.
        let bytes = self.bytes(start, length.saturating_add(15));
        let mut decoder = Decoder::with_ip(64, bytes, start, DecoderOptions::NONE);
        let mut instruction = Instruction::default();
        while decoder.can_decode() && decoder.position() <= length {
            let position = decoder.position();
            decoder.decode_out(&mut instruction);
            if instruction.is_invalid() {
                return false;
            }
            if position == length {
                return true;
            }
        }
        false
    }

    /// Whether the function around `vaddr` can jump to places that are not among the targets.
    pub fn has_unknown_jumps(&self, vaddr: u64) -> bool {
        let Some((start, end)) = self.function_bounds(vaddr) else {
            return true;
        };
        let next = self.unknown_jumps.partition_point(|j| *j < start);
        self.unknown_jumps.get(next).is_some_and(|j| *j < end) || self.opaque.iter().any(|f| f.0 < end && start < f.1)
    }

    pub fn unknown_jumps(&self) -> &[u64] {
        &self.unknown_jumps
    }

    /// Up to `length` bytes of code at `vaddr`; fewer at the end of a section, none outside of code.
    pub fn bytes(&self, vaddr: u64, length: usize) -> &[u8] {
        let after = self.code.partition_point(|run| run.vaddr <= vaddr);
        let Some(run) = after.checked_sub(1).and_then(|i| self.code.get(i)) else {
            return &[];
        };
        let start = usize::try_from(vaddr - run.vaddr).unwrap_or(usize::MAX);
        run.bytes.get(start..start.saturating_add(length).min(run.bytes.len())).unwrap_or_default()
    }

    /// Start of every function, sorted.
    pub fn functions(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.functions.0.iter().copied()
    }
}
