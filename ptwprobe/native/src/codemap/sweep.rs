//! One pass over all code: where it branches to, what it takes the address of, and what its indirect jumps jump by.
//!
//! Code is decoded straight on from every known start (function, symbol, end of a function, section), so that data
//! between functions cannot put the decoding out of step for longer than to the next start.

use iced_x86::{
    Code, Decoder, DecoderOptions, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, OpKind, Register,
};

use super::elf::Image;
use super::{TargetKind, Targets};
use crate::x86::{direct_target, Kind};

/// What an indirect jump takes its target from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JumpSource {
    /// A whole pointer from memory, a register of the caller or a named address: all of these are known as targets.
    Pointer,
    /// Base plus a 4-byte entry of a table; the base if it was seen.
    RelativeTable(Option<u64>),
    Unknown,
}

#[derive(Debug, Default)]
pub struct Sweep {
    /// (address of the instruction, address it takes), in order.
    pub addresses_taken: Vec<(u64, u64)>,
    pub indirect_jumps: Vec<(u64, JumpSource)>,
}

/// How many instructions are kept to look back from an indirect jump (a power of two).
const HISTORY: usize = 64;

pub fn sweep(image: &Image, starts: &[u64], targets: &mut Targets) -> Sweep {
    let mut out = Sweep::default();
    let mut factory = InstructionInfoFactory::new();
    for &(code_start, code_end) in &image.code {
        let first = starts.partition_point(|s| *s <= code_start);
        let last = starts.partition_point(|s| *s < code_end);
        let mut from = code_start;
        let inner = starts.get(first..last).unwrap_or_default();
        for &to in inner.iter().chain(std::iter::once(&code_end)) {
            run(image, from, to, targets, &mut out, &mut factory);
            from = to;
        }
    }
    out
}

fn run(
    image: &Image,
    from: u64,
    to: u64,
    targets: &mut Targets,
    out: &mut Sweep,
    factory: &mut InstructionInfoFactory,
) {
    let bytes = image.at(from, (to - from) as usize);
    let mut decoder = Decoder::with_ip(64, bytes, from, DecoderOptions::NONE);
    let mut history = [Instruction::default(); HISTORY];
    let mut count = 0usize;
    while decoder.can_decode() {
        let Some(instruction) = history.get_mut(count % HISTORY) else {
            return;
        };
        decoder.decode_out(instruction);
        if instruction.is_invalid() {
            let next = instruction.ip() + 1;
            if decoder.set_position((next - from) as usize).is_err() {
                return;
            }
            decoder.set_ip(next);
            continue;
        }
        count += 1;
        let instruction = *instruction;
        record(image, &instruction, targets, out);
        if Kind::of(&instruction) == Kind::IndirectJump {
            let source = jump_source(&History { ring: &history, count }, factory);
            out.indirect_jumps.push((instruction.ip(), source));
        }
    }
}

fn record(image: &Image, instruction: &Instruction, targets: &mut Targets, out: &mut Sweep) {
    let ip = instruction.ip();
    if let Some(target) = direct_target(instruction) {
        let kind = if instruction.is_call_near() { TargetKind::Call } else { TargetKind::Branch };
        if image.is_code(target) {
            targets.push(target, kind);
        }
    }
    match instruction.mnemonic() {
        Mnemonic::Call => targets.push(instruction.next_ip(), TargetKind::Return),
        Mnemonic::Endbr64 => targets.push(ip, TargetKind::Endbr),
        Mnemonic::Lea if instruction.is_ip_rel_memory_operand() => {
            let address = instruction.memory_displacement64();
            out.addresses_taken.push((ip, address));
            if image.is_code(address) {
                targets.push(address, TargetKind::Pointer);
            }
        }
        _ if image.fixed_address => {
            for operand in 0..instruction.op_count() {
                let value = match instruction.op_kind(operand) {
                    OpKind::Immediate32 => u64::from(instruction.immediate32()),
                    OpKind::Immediate32to64 | OpKind::Immediate64 => instruction.immediate(operand),
                    _ => continue,
                };
                if image.is_code(value) {
                    targets.push(value, TargetKind::Pointer);
                }
            }
        }
        _ => {}
    }
}

/// The last instructions, newest first.
struct History<'a> {
    ring: &'a [Instruction; HISTORY],
    count: usize,
}

impl<'a> History<'a> {
    /// The instruction `back` steps before the newest; None where the run began or it is no longer kept.
    fn get(&self, back: usize) -> Option<&'a Instruction> {
        if back >= HISTORY || back >= self.count {
            return None;
        }
        self.ring.get((self.count - 1 - back) % HISTORY)
    }

    fn reached_start(&self, back: usize) -> bool {
        back >= self.count
    }
}

/// Follows the register of the newest instruction, an indirect jump, back to what made its value.
fn jump_source(history: &History<'_>, factory: &mut InstructionInfoFactory) -> JumpSource {
    let Some(jump) = history.get(0) else {
        return JumpSource::Unknown;
    };
    if jump.op0_kind() == OpKind::Memory {
        return JumpSource::Pointer;
    }
    let mut register = jump.op0_register();
    let mut back = 1;
    loop {
        let Some(instruction) = history.get(back) else {
            // At the function's first instruction the value is the caller's: a pointer to somewhere that is known.
            return if history.reached_start(back) { JumpSource::Pointer } else { JumpSource::Unknown };
        };
        back += 1;
        let kind = Kind::of(instruction);
        if kind.ends_flow() {
            return JumpSource::Unknown;
        }
        if kind == Kind::Call {
            match register {
                Register::RAX => return JumpSource::Pointer,
                Register::RCX | Register::RDX | Register::RSI | Register::RDI => return JumpSource::Unknown,
                Register::R8 | Register::R9 | Register::R10 | Register::R11 => return JumpSource::Unknown,
                _ => continue,
            }
        }
        if !writes(instruction, register, factory) {
            continue;
        }
        match (instruction.code(), instruction.op1_kind()) {
            (Code::Mov_r64_rm64 | Code::Mov_rm64_r64, OpKind::Register) => register = instruction.op1_register(),
            (Code::Mov_r64_rm64, OpKind::Memory) => return JumpSource::Pointer,
            (Code::Mov_r64_imm64 | Code::Mov_rm64_imm32 | Code::Mov_r32_imm32, _) => return JumpSource::Pointer,
            (Code::Lea_r64_m, _) if instruction.is_ip_rel_memory_operand() => return JumpSource::Pointer,
            (Code::Pop_r64, _) => return JumpSource::Pointer,
            // glibc keeps some pointers mangled: xor with a word of the thread, then rotate.
            (Code::Xor_r64_rm64, OpKind::Memory) if instruction.segment_prefix() == Register::FS => {}
            (Code::Ror_rm64_imm8 | Code::Rol_rm64_imm8, _) => {}
            (Code::Add_r64_rm64 | Code::Add_rm64_r64, OpKind::Register) => {
                return table_source(history, back, register, instruction.op1_register(), factory);
            }
            _ => return JumpSource::Unknown,
        }
    }
}

/// For `add a, b` before the jump: one of them has to be an entry that `movsxd` loaded, the other the base.
fn table_source(
    history: &History<'_>,
    from: usize,
    a: Register,
    b: Register,
    factory: &mut InstructionInfoFactory,
) -> JumpSource {
    let mut definition = |register: Register| {
        let mut back = from;
        while let Some(instruction) = history.get(back) {
            if Kind::of(instruction).ends_flow() {
                return None;
            }
            if writes(instruction, register, factory) {
                return Some(instruction);
            }
            back += 1;
        }
        None
    };
    let (a, b) = (definition(a), definition(b));
    let is_entry = |i: &Instruction| i.code() == Code::Movsxd_r64_rm32 && i.op1_kind() == OpKind::Memory;
    let base = match (a, b) {
        (Some(entry), base) if is_entry(entry) => base,
        (base, Some(entry)) if is_entry(entry) => base,
        _ => return JumpSource::Unknown,
    };
    let base = base.filter(|i| i.code() == Code::Lea_r64_m && i.is_ip_rel_memory_operand());
    JumpSource::RelativeTable(base.map(Instruction::memory_displacement64))
}

fn writes(instruction: &Instruction, register: Register, factory: &mut InstructionInfoFactory) -> bool {
    factory.info(instruction).used_registers().iter().any(|used| {
        used.register().full_register() == register
            && matches!(
                used.access(),
                OpAccess::Write | OpAccess::CondWrite | OpAccess::ReadWrite | OpAccess::ReadCondWrite
            )
    })
}
