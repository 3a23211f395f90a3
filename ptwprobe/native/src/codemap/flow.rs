//! Walks code backwards: which instructions may have made the value that a register has at some place.

use std::collections::{HashMap, HashSet};

use iced_x86::{Code, Instruction, InstructionInfoFactory, OpAccess, OpKind, Register};

use super::elf::Image;
use super::sweep::{decode_run, Sweep};
use super::Functions;
use crate::x86::Kind;

/// Where a value comes from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Definition {
    Instruction(Instruction),
    /// The caller of the function, or what a call returned.
    Elsewhere,
    /// The search was given up.
    Lost,
}

/// Blocks that one search visits; real functions need a few dozen.
const MAX_BLOCKS: usize = 4000;
/// Stands for all indirect jumps of the function at the address, which is below 2^61.
const INDIRECT: u64 = 1 << 63;
/// Decoded instructions that are kept at most.
const MAX_KEPT: usize = 1 << 20;

/// One step towards a definition.
enum Origin {
    Defined(Definition),
    /// What the register has before the instruction at that address.
    Before(u64, Register),
}

#[derive(Debug)]
struct Step {
    instruction: Instruction,
    /// Whether a direct branch leads here.
    entered: bool,
}

pub struct Flow<'a> {
    image: &'a Image,
    functions: &'a Functions,
    starts: &'a [u64],
    sweep: &'a Sweep,
    factory: InstructionInfoFactory,
    decoded: HashMap<u64, Vec<Step>>,
    kept: usize,
    /// Steps left for this file, in proportion to its size.
    budget: usize,
}

impl<'a> Flow<'a> {
    /// `starts`: where decoding begins anew, sorted.
    pub fn new(image: &'a Image, functions: &'a Functions, starts: &'a [u64], sweep: &'a Sweep) -> Self {
        let factory = InstructionInfoFactory::new();
        let code: u64 = image.code.iter().map(|c| c.1 - c.0).sum();
        let budget = usize::try_from(code).unwrap_or(0).saturating_mul(4).saturating_add(1 << 22);
        Self { image, functions, starts, sweep, factory, decoded: HashMap::new(), kept: 0, budget }
    }

    /// Takes `steps` from what one file may cost; false if there is not enough left.
    pub fn spend(&mut self, steps: usize) -> bool {
        match self.budget.checked_sub(steps) {
            Some(left) => {
                self.budget = left;
                true
            }
            None => {
                self.budget = 0;
                false
            }
        }
    }

    /// The instruction at `ip`, if decoding from the start before it reaches it.
    pub fn instruction(&mut self, ip: u64) -> Option<Instruction> {
        let run = self.run(ip)?;
        let index = run.binary_search_by_key(&ip, |step| step.instruction.ip()).ok()?;
        run.get(index).map(|step| step.instruction)
    }

    /// What may have written `register` before the instruction at `ip`. Copies from register to register are followed.
    pub fn definitions(&mut self, ip: u64, register: Register) -> Vec<Definition> {
        self.search(ip, register).unwrap_or_else(|| vec![Definition::Lost])
    }

    fn search(&mut self, ip: u64, register: Register) -> Option<Vec<Definition>> {
        let mut found = Vec::new();
        let mut seen = HashSet::new();
        let mut work = vec![(ip, register)];
        while let Some((ip, register)) = work.pop() {
            let (top, register) = match self.block(ip, register)? {
                Origin::Defined(definition) => {
                    found.push(definition);
                    continue;
                }
                Origin::Before(top, register) => (top, register),
            };
            if !seen.insert((top, register)) {
                continue;
            }
            if seen.len() > MAX_BLOCKS {
                return None;
            }
            let (mut before, called) = self.before(top)?;
            if called {
                found.push(Definition::Elsewhere);
            } else if before.is_empty() {
                // Only an indirect jump (or the unwinder) gets here; where from is the same for all such places.
                let (start, _) = self.functions.containing(top).unwrap_or((top, top));
                if !seen.insert((start | INDIRECT, register)) {
                    continue;
                }
                before = self.indirect_jumps(top)?;
            }
            for instruction in before {
                match origin(&mut self.factory, &instruction, register) {
                    Origin::Defined(definition) => found.push(definition),
                    Origin::Before(ip, register) => work.push((ip, register)),
                }
            }
        }
        Some(found)
    }

    /// Follows `register` from before `ip` up to where the definition is, or something else may have jumped in.
    fn block(&mut self, ip: u64, mut register: Register) -> Option<Origin> {
        let start = self.decode(ip)?;
        let run = self.decoded.get(&start)?;
        let mut index = run.binary_search_by_key(&ip, |step| step.instruction.ip()).ok()?;
        let first = index;
        let end = loop {
            let here = run.get(index)?;
            let previous = index.checked_sub(1).and_then(|i| run.get(i)).map(|step| step.instruction);
            let previous = previous.filter(|p| p.next_ip() == here.instruction.ip() && !Kind::of(p).ends_flow());
            let Some(previous) = previous.filter(|_| !here.entered) else {
                break Origin::Before(here.instruction.ip(), register);
            };
            match origin(&mut self.factory, &previous, register) {
                Origin::Defined(definition) => break Origin::Defined(definition),
                Origin::Before(_, next) => register = next,
            }
            index -= 1;
        };
        self.spend(1 + first - index).then_some(end)
    }

    /// The instructions that may run right before the one at `ip`, and whether a caller may come there; None if not all
    /// are known.
    fn before(&mut self, ip: u64) -> Option<(Vec<Instruction>, bool)> {
        let mut out = Vec::new();
        if let Some(previous) = self.previous(ip) {
            if !Kind::of(&previous).ends_flow() {
                out.push(previous);
            }
        }
        let sweep = self.sweep;
        let first = sweep.branches.partition_point(|b| b.0 < ip);
        for branch in sweep.branches.get(first..).unwrap_or_default().iter().take_while(|b| b.0 == ip) {
            out.push(self.instruction(branch.1)?);
        }
        let called = self.functions.containing(ip).is_none_or(|f| f.0 == ip);
        self.spend(out.len()).then_some((out, called))
    }

    fn indirect_jumps(&mut self, ip: u64) -> Option<Vec<Instruction>> {
        let (start, end) = self.functions.containing(ip).unwrap_or((ip, ip));
        let sweep = self.sweep;
        let first = sweep.indirect_jumps.partition_point(|j| *j < start);
        let inside = sweep.indirect_jumps.get(first..).unwrap_or_default().iter().take_while(|j| **j < end);
        let all: Option<Vec<_>> = inside.map(|jump| self.instruction(*jump)).collect();
        let all = all?;
        self.spend(all.len()).then_some(all)
    }

    fn previous(&mut self, ip: u64) -> Option<Instruction> {
        let run = self.run(ip.checked_sub(1)?)?;
        let index = run.partition_point(|step| step.instruction.ip() < ip).checked_sub(1)?;
        run.get(index).map(|step| step.instruction).filter(|i| i.next_ip() == ip)
    }

    /// The instructions from the start before `ip` to the next one.
    fn run(&mut self, ip: u64) -> Option<&Vec<Step>> {
        let start = self.decode(ip)?;
        self.decoded.get(&start)
    }

    /// Decodes the run around `ip` unless it is there already; returns its start.
    fn decode(&mut self, ip: u64) -> Option<u64> {
        let next = self.starts.partition_point(|s| *s <= ip);
        let start = *self.starts.get(next.checked_sub(1)?)?;
        if self.decoded.contains_key(&start) {
            return Some(start);
        }
        let end = self.starts.get(next).copied().unwrap_or(u64::MAX);
        let bytes = self.image.at(start, usize::try_from(end - start).unwrap_or(usize::MAX));
        let mut branches = self.sweep.branches.iter().skip(self.sweep.branches.partition_point(|b| b.0 < start));
        let mut branch = branches.next();
        let mut run = Vec::new();
        decode_run(bytes, start, |instruction| {
            while branch.is_some_and(|b| b.0 < instruction.ip()) {
                branch = branches.next();
            }
            let entered = branch.is_some_and(|b| b.0 == instruction.ip());
            run.push(Step { instruction: *instruction, entered });
        });
        if !self.spend(run.len()) {
            return None;
        }
        self.kept += run.len();
        if self.kept > MAX_KEPT {
            self.decoded.clear();
            self.kept = run.len();
        }
        self.decoded.insert(start, run);
        Some(start)
    }
}

/// Where the value of `register` after `instruction` comes from.
fn origin(factory: &mut InstructionInfoFactory, instruction: &Instruction, register: Register) -> Origin {
    if register == Register::RAX && Kind::of(instruction) == Kind::Call {
        return Origin::Defined(Definition::Elsewhere);
    }
    if !writes(factory, instruction, register) {
        return Origin::Before(instruction.ip(), register);
    }
    match copied_from(instruction) {
        Some(source) => Origin::Before(instruction.ip(), source),
        None => Origin::Defined(Definition::Instruction(*instruction)),
    }
}

fn writes(factory: &mut InstructionInfoFactory, instruction: &Instruction, register: Register) -> bool {
    factory.info(instruction).used_registers().iter().any(|used| {
        used.register().full_register() == register
            && matches!(
                used.access(),
                OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite
            )
    })
}

fn copied_from(instruction: &Instruction) -> Option<Register> {
    let copies = matches!(instruction.code(), Code::Mov_r64_rm64 | Code::Mov_rm64_r64);
    (copies && instruction.op1_kind() == OpKind::Register).then(|| instruction.op1_register())
}
