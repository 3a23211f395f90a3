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

/// Steps of one search; real functions need a few dozen.
const MAX_STEPS: usize = 4000;
/// Decoded instructions that are kept at most.
const MAX_KEPT: usize = 1 << 20;

pub struct Flow<'a> {
    image: &'a Image,
    functions: &'a Functions,
    starts: &'a [u64],
    sweep: &'a Sweep,
    factory: InstructionInfoFactory,
    decoded: HashMap<u64, Vec<Instruction>>,
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
        let index = run.binary_search_by_key(&ip, Instruction::ip).ok()?;
        run.get(index).copied()
    }

    /// What may have written `register` before the instruction at `ip`. Copies from register to register are followed.
    pub fn definitions(&mut self, ip: u64, register: Register) -> Vec<Definition> {
        let mut found = Vec::new();
        let mut seen = HashSet::from([(ip, register)]);
        let mut work = vec![(ip, register)];
        while let Some((ip, register)) = work.pop() {
            if seen.len() > MAX_STEPS || !self.spend(1) {
                return vec![Definition::Lost];
            }
            let Some(all) = self.before(ip) else { return vec![Definition::Lost] };
            for before in all {
                let Some(instruction) = before else {
                    found.push(Definition::Elsewhere);
                    continue;
                };
                let next = if Kind::of(&instruction) == Kind::Call && register == Register::RAX {
                    found.push(Definition::Elsewhere);
                    continue;
                } else if !self.writes(&instruction, register) {
                    register
                } else if let Some(source) = copied_from(&instruction) {
                    source
                } else {
                    found.push(Definition::Instruction(instruction));
                    continue;
                };
                if seen.insert((instruction.ip(), next)) {
                    work.push((instruction.ip(), next));
                }
            }
        }
        found
    }

    /// The instructions that may run right before the one at `ip`, an inner None for a caller; None if not all are known.
    fn before(&mut self, ip: u64) -> Option<Vec<Option<Instruction>>> {
        let mut out = Vec::new();
        let function = self.functions.containing(ip);
        if function.is_none_or(|f| f.0 == ip) {
            out.push(None);
        }
        if let Some(previous) = self.previous(ip) {
            if !Kind::of(&previous).ends_flow() {
                out.push(Some(previous));
            }
        }
        let sweep = self.sweep;
        let first = sweep.branches.partition_point(|b| b.0 < ip);
        let sources = sweep.branches.get(first..).unwrap_or_default().iter().take_while(|b| b.0 == ip);
        let sources: Vec<u64> = sources.map(|b| b.1).collect();
        for source in sources {
            out.push(Some(self.instruction(source)?));
        }
        if out.is_empty() {
            // Only an indirect jump (or the unwinder) gets here.
            let (start, end) = function.unwrap_or((ip, ip));
            let first = sweep.indirect_jumps.partition_point(|j| *j < start);
            let inside = sweep.indirect_jumps.get(first..).unwrap_or_default().iter().take_while(|j| **j < end);
            for jump in inside {
                out.push(Some(self.instruction(*jump)?));
            }
        }
        (self.budget > 0).then_some(out)
    }

    fn previous(&mut self, ip: u64) -> Option<Instruction> {
        let last = ip.checked_sub(1)?;
        let run = self.run(last)?;
        let index = run.partition_point(|i| i.ip() < ip).checked_sub(1)?;
        run.get(index).filter(|i| i.next_ip() == ip).copied()
    }

    /// The instructions from the start before `ip` to the next one.
    fn run(&mut self, ip: u64) -> Option<&Vec<Instruction>> {
        let next = self.starts.partition_point(|s| *s <= ip);
        let start = *self.starts.get(next.checked_sub(1)?)?;
        if !self.decoded.contains_key(&start) {
            let end = self.starts.get(next).copied().unwrap_or(u64::MAX);
            let bytes = self.image.at(start, usize::try_from(end - start).unwrap_or(usize::MAX));
            let mut run = Vec::new();
            decode_run(bytes, start, |instruction| run.push(*instruction));
            if !self.spend(run.len()) {
                return None;
            }
            self.kept += run.len();
            if self.kept > MAX_KEPT {
                self.decoded.clear();
                self.kept = run.len();
            }
            self.decoded.insert(start, run);
        }
        self.decoded.get(&start)
    }

    fn writes(&mut self, instruction: &Instruction, register: Register) -> bool {
        self.factory.info(instruction).used_registers().iter().any(|used| {
            used.register().full_register() == register
                && matches!(
                    used.access(),
                    OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite
                )
        })
    }
}

fn copied_from(instruction: &Instruction) -> Option<Register> {
    let copies = matches!(instruction.code(), Code::Mov_r64_rm64 | Code::Mov_rm64_r64);
    (copies && instruction.op1_kind() == OpKind::Register).then(|| instruction.op1_register())
}
