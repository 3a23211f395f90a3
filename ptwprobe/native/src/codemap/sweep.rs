//! One pass over all code: where it branches to and what it takes the address of.
//!
//! Code is decoded straight on from every known start (function, symbol, end of a function, section), so that data
//! between functions cannot put the decoding out of step for longer than to the next start.

use iced_x86::{Decoder, DecoderOptions, Instruction, Mnemonic, OpKind};

use super::elf::Image;
use super::{TargetKind, Targets};
use crate::x86::{direct_target, Kind};

#[derive(Debug, Default)]
pub struct Sweep {
    /// (target, address of the jump), in order; direct jumps only, no calls.
    pub branches: Vec<(u64, u64)>,
    /// (address of the instruction, address it takes), in order.
    pub addresses_taken: Vec<(u64, u64)>,
    /// Addresses of indirect jumps, in order.
    pub indirect_jumps: Vec<u64>,
}

pub fn sweep(image: &Image, starts: &[u64], targets: &mut Targets) -> Sweep {
    let mut out = Sweep::default();
    for &(code_start, code_end) in &image.code {
        let first = starts.partition_point(|s| *s <= code_start);
        let last = starts.partition_point(|s| *s < code_end);
        let mut from = code_start;
        let inner = starts.get(first..last).unwrap_or_default();
        for &to in inner.iter().chain(std::iter::once(&code_end)) {
            let bytes = image.at(from, usize::try_from(to - from).unwrap_or(usize::MAX));
            decode_run(bytes, from, |instruction| record(image, instruction, targets, &mut out));
            from = to;
        }
    }
    out.branches.sort_unstable();
    out
}

/// Decodes `bytes` at `from` straight on; a byte with which nothing begins is passed over.
pub fn decode_run(bytes: &[u8], from: u64, mut visit: impl FnMut(&Instruction)) {
    let mut decoder = Decoder::with_ip(64, bytes, from, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        if !instruction.is_invalid() {
            visit(&instruction);
            continue;
        }
        let next = instruction.ip() + 1;
        if decoder.set_position((next - from) as usize).is_err() {
            return;
        }
        decoder.set_ip(next);
    }
}

fn record(image: &Image, instruction: &Instruction, targets: &mut Targets, out: &mut Sweep) {
    let ip = instruction.ip();
    if let Some(target) = direct_target(instruction).filter(|target| image.is_code(*target)) {
        if instruction.is_call_near() {
            targets.push(target, TargetKind::Call);
        } else {
            targets.push(target, TargetKind::Branch);
            out.branches.push((target, ip));
        }
    }
    match instruction.mnemonic() {
        Mnemonic::Call => targets.push(instruction.next_ip(), TargetKind::Return),
        Mnemonic::Endbr64 => targets.push(ip, TargetKind::Endbr),
        Mnemonic::Jmp if Kind::of(instruction) == Kind::IndirectJump => out.indirect_jumps.push(ip),
        Mnemonic::Lea if instruction.is_ip_rel_memory_operand() => {
            let address = instruction.memory_displacement64();
            out.addresses_taken.push((ip, address));
            if image.is_code(address) {
                targets.push(address, TargetKind::Pointer);
            }
        }
        _ if image.fixed_address => immediates(image, instruction, targets, out),
        _ => {}
    }
}

/// At a fixed address, an immediate may be a pointer.
fn immediates(image: &Image, instruction: &Instruction, targets: &mut Targets, out: &mut Sweep) {
    for operand in 0..instruction.op_count() {
        let value = match instruction.op_kind(operand) {
            OpKind::Immediate32 => u64::from(instruction.immediate32()),
            OpKind::Immediate32to64 | OpKind::Immediate64 => instruction.immediate(operand),
            _ => continue,
        };
        if image.is_code(value) {
            targets.push(value, TargetKind::Pointer);
        }
        if !image.at(value, 1).is_empty() {
            out.addresses_taken.push((instruction.ip(), value));
        }
    }
}
