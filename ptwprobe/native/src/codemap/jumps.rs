//! What an indirect jump takes its target from: a whole pointer, an entry of a table, or something unknown.

use iced_x86::{Code, ConditionCode, Instruction, OpKind, Register};

use super::flow::{Definition, Flow};
use super::sweep::Sweep;
use super::Functions;

/// A table of 4-byte entries at `table`, each relative to `base`.
pub type Table = (u64, u64);

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// Pointers from memory, from callers, and named addresses: whoever made them took the address of code, which the
    /// sweep and the relocations have seen.
    Pointer,
    /// All of these.
    Tables(Vec<Table>),
    /// At least one of these: every address that the function takes, as the table's own was out of sight.
    SomeOf(Vec<Table>),
    Unknown,
}

/// Tables that one jump may seem to use.
const MAX_TABLES: usize = 1 << 14;

/// The source of the indirect jump at `ip`.
pub fn source(flow: &mut Flow<'_>, functions: &Functions, sweep: &Sweep, ip: u64) -> Source {
    let Some(jump) = flow.instruction(ip) else { return Source::Unknown };
    if jump.op0_kind() == OpKind::Memory {
        return Source::Pointer;
    }
    let mut result = Source::Pointer;
    let mut work = vec![(ip, jump.op0_register())];
    let mut seen = work.clone();
    while let Some((ip, register)) = work.pop() {
        for definition in flow.definitions(ip, register) {
            let instruction = match definition {
                Definition::Elsewhere => continue,
                Definition::Lost => return Source::Unknown,
                Definition::Instruction(instruction) => instruction,
            };
            let found = match step(&instruction, register) {
                Step::Pointer => continue,
                Step::Unknown => Source::Unknown,
                Step::From(registers) => {
                    for register in registers {
                        if !seen.contains(&(instruction.ip(), register)) {
                            seen.push((instruction.ip(), register));
                            work.push((instruction.ip(), register));
                        }
                    }
                    continue;
                }
                Step::Sum(a, b) => sum(flow, functions, sweep, instruction.ip(), a, b),
            };
            result = match (result, found) {
                (_, Source::Unknown) => return Source::Unknown,
                (Source::Pointer, found) => found,
                (Source::Tables(mut all), Source::Tables(more)) => {
                    all.extend(more);
                    Source::Tables(all)
                }
                (Source::Tables(mut all) | Source::SomeOf(mut all), Source::Tables(more) | Source::SomeOf(more)) => {
                    all.extend(more);
                    Source::SomeOf(all)
                }
                (result, _) => result,
            };
        }
    }
    result
}

enum Step {
    Pointer,
    From(Vec<Register>),
    Sum(Register, Register),
    Unknown,
}

/// What the instruction that made the value tells about it.
fn step(instruction: &Instruction, register: Register) -> Step {
    let memory = instruction.op1_kind() == OpKind::Memory;
    match instruction.code() {
        Code::Mov_r64_rm64 | Code::Pop_r64 | Code::Mov_r64_imm64 | Code::Mov_rm64_imm32 | Code::Mov_r32_imm32 => {
            Step::Pointer
        }
        Code::Lea_r64_m if instruction.is_ip_rel_memory_operand() => Step::Pointer,
        Code::Lea_r64_m if instruction.memory_index_scale() == 1 && instruction.memory_displacement64() == 0 => {
            Step::Sum(instruction.memory_base(), instruction.memory_index())
        }
        // glibc keeps some pointers mangled: xor with a word of the thread, then rotated.
        Code::Xor_r64_rm64 if memory && instruction.segment_prefix() == Register::FS => Step::From(vec![register]),
        Code::Ror_rm64_imm8 | Code::Rol_rm64_imm8 => Step::From(vec![register]),
        Code::Add_r64_rm64 | Code::Add_rm64_r64 if instruction.op1_kind() == OpKind::Register => {
            Step::Sum(register, instruction.op1_register())
        }
        _ if is_cmov(instruction) && memory => Step::From(vec![register]),
        _ if is_cmov(instruction) => Step::From(vec![register, instruction.op1_register()]),
        _ => Step::Unknown,
    }
}

/// Of the instructions with a condition only these have two operands.
fn is_cmov(instruction: &Instruction) -> bool {
    instruction.condition_code() != ConditionCode::None && instruction.op_count() == 2
}

/// The tables behind `a + b` at `ip`: one of them an entry that `movsxd` loaded, the other what it is relative to.
fn sum(flow: &mut Flow<'_>, functions: &Functions, sweep: &Sweep, ip: u64, a: Register, b: Register) -> Source {
    let (a, b) = (flow.definitions(ip, a), flow.definitions(ip, b));
    let (entries, bases) = match (entry_loads(&a), entry_loads(&b)) {
        (Some(entries), _) => (entries, b),
        (_, Some(entries)) => (entries, a),
        _ => return Source::Unknown,
    };
    let mut tables = Vec::new();
    let mut all_seen = true;
    for load in entries {
        let displacement = load.memory_displacement64();
        let base = load.memory_base();
        let starts = if base == Register::None { Vec::new() } else { flow.definitions(load.ip(), base) };
        let same = base != Register::None && displacement == 0 && starts == bases;
        let here = match named(&starts) {
            _ if base == Register::None => Some(vec![displacement]),
            found => found.map(|all| all.iter().map(|t| t.wrapping_add(displacement)).collect()),
        };
        all_seen &= here.is_some();
        let here = here.unwrap_or_else(|| taken_in(sweep, functions.containing(ip)));
        if here.len() * bases.len() > MAX_TABLES {
            return Source::Unknown;
        }
        match named(&bases) {
            _ if same => tables.extend(here.iter().map(|t| (*t, *t))),
            Some(bases) => tables.extend(here.iter().flat_map(|t| bases.iter().map(|b| (*t, *b)))),
            None => return Source::Unknown,
        }
        if !flow.spend(here.len() * bases.len()) {
            return Source::Unknown;
        }
    }
    if all_seen {
        Source::Tables(tables)
    } else {
        Source::SomeOf(tables)
    }
}

/// The definitions, if every one loads a table's entry.
fn entry_loads(definitions: &[Definition]) -> Option<Vec<Instruction>> {
    let loads: Option<Vec<_>> = definitions.iter().map(entry_load).collect();
    loads.filter(|all| !all.is_empty())
}

fn entry_load(definition: &Definition) -> Option<Instruction> {
    match definition {
        Definition::Instruction(i)
            if i.code() == Code::Movsxd_r64_rm32
                && i.op1_kind() == OpKind::Memory
                && !i.is_ip_rel_memory_operand()
                && i.memory_index_scale() == 4 =>
        {
            Some(*i)
        }
        _ => None,
    }
}

/// The addresses, if every definition names one.
fn named(definitions: &[Definition]) -> Option<Vec<u64>> {
    let name = |definition: &Definition| match definition {
        Definition::Instruction(i) if i.code() == Code::Lea_r64_m && i.is_ip_rel_memory_operand() => {
            Some(i.memory_displacement64())
        }
        Definition::Instruction(i) if i.code() == Code::Mov_r32_imm32 => Some(u64::from(i.immediate32())),
        _ => None,
    };
    let all: Option<Vec<_>> = definitions.iter().map(name).collect();
    all.filter(|all| !all.is_empty())
}

/// Every address that the code of one function takes.
fn taken_in(sweep: &Sweep, function: Option<(u64, u64)>) -> Vec<u64> {
    let Some((start, end)) = function else { return Vec::new() };
    let first = sweep.addresses_taken.partition_point(|taken| taken.0 < start);
    let last = sweep.addresses_taken.partition_point(|taken| taken.0 < end);
    let mut all: Vec<u64> =
        sweep.addresses_taken.get(first..last).unwrap_or_default().iter().map(|taken| taken.1).collect();
    all.sort_unstable();
    all.dedup();
    all
}
