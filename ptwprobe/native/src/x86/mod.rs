//! Decoding x86-64 code: what kind of instruction stands where, as text, and the same code at another address
//! (`relocate`).

mod faulting;
mod liveness;
mod relocate;

use iced_x86::{Code, Decoder, DecoderOptions, FlowControl, Formatter, GasFormatter, Instruction, Mnemonic, Register};

pub use faulting::first_that_may_fault;
pub use liveness::is_dead;
pub use relocate::{relocate, Relocated};

/// Why code was not decoded or moved. `kind` is the stable word that Python sees, `offset` counts from the first byte
/// of the code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CodeError {
    pub kind: &'static str,
    pub message: String,
    pub offset: u64,
}

impl CodeError {
    fn new(kind: &'static str, message: impl Into<String>, offset: usize) -> Self {
        Self { kind, message: message.into(), offset: offset as u64 }
    }
}

/// What an instruction does to the flow of control, as far as moving it elsewhere is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Nop,
    /// `endbr64`: an indirect branch may land here.
    Endbr,
    /// Falls through to the next instruction and nowhere else.
    Plain,
    /// Direct jump.
    Jump,
    /// Direct conditional jump, `loop*` and `j*cxz` included.
    Branch,
    IndirectJump,
    Return,
    Call,
    /// Enters the kernel or a monitor at a return address of its own: `syscall`, `sysenter`, `int n`, `vmcall`.
    System,
    /// `int3`, also used to fill the room between functions.
    Trap,
    /// Raises #UD: `ud0`, `ud1`, `ud2`.
    Undefined,
    /// Cannot run elsewhere with the same effect: far, privileged, transactional, enclave.
    Fixed,
}

impl Kind {
    pub fn of(instruction: &Instruction) -> Self {
        let code = instruction.code();
        match instruction.flow_control() {
            FlowControl::Next if instruction.is_privileged() => Self::Fixed,
            FlowControl::Next => match instruction.mnemonic() {
                Mnemonic::Nop => Self::Nop,
                Mnemonic::Endbr64 => Self::Endbr,
                Mnemonic::Enclu => Self::Fixed,
                // An operand relative to the low half of rip cannot be told from one that wraps.
                _ if instruction.memory_base() == Register::EIP => Self::Fixed,
                _ => Self::Plain,
            },
            FlowControl::UnconditionalBranch if code.is_jmp_short_or_near() => Self::Jump,
            FlowControl::ConditionalBranch if is_conditional(code) => Self::Branch,
            FlowControl::IndirectBranch if code == Code::Jmp_rm64 && instruction.memory_base() != Register::EIP => {
                Self::IndirectJump
            }
            FlowControl::Return if matches!(code, Code::Retnq | Code::Retnq_imm16) => Self::Return,
            FlowControl::Call | FlowControl::IndirectCall => match instruction.mnemonic() {
                Mnemonic::Call => Self::Call,
                _ => Self::System,
            },
            FlowControl::Interrupt if code == Code::Int3 => Self::Trap,
            FlowControl::Interrupt => Self::System,
            FlowControl::Exception => Self::Undefined,
            FlowControl::XbeginXabortXend if code != Code::Xbegin_rel16 && code != Code::Xbegin_rel32 => Self::Plain,
            _ => Self::Fixed,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Nop => "nop",
            Self::Endbr => "endbr",
            Self::Plain => "plain",
            Self::Jump => "jump",
            Self::Branch => "branch",
            Self::IndirectJump => "indirect",
            Self::Return => "return",
            Self::Call => "call",
            Self::System => "system",
            Self::Trap => "trap",
            Self::Undefined => "undefined",
            Self::Fixed => "fixed",
        }
    }

    /// Whether control never goes on to the next instruction.
    pub fn ends_flow(self) -> bool {
        matches!(self, Self::Jump | Self::IndirectJump | Self::Return | Self::Undefined)
    }
}

fn is_conditional(code: Code) -> bool {
    code.is_jcc_short_or_near() || code.is_loop() || code.is_loopcc() || code.is_jcx_short()
}

/// Whether the instruction has a direct branch target in this code segment.
pub fn direct_target(instruction: &Instruction) -> Option<u64> {
    match instruction.flow_control() {
        FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch | FlowControl::Call
            if instruction.is_jcc_short_or_near()
                || instruction.is_jmp_short_or_near()
                || instruction.is_call_near()
                || is_conditional(instruction.code()) =>
        {
            Some(instruction.near_branch_target())
        }
        FlowControl::XbeginXabortXend if matches!(instruction.code(), Code::Xbegin_rel16 | Code::Xbegin_rel32) => {
            Some(instruction.near_branch_target())
        }
        _ => None,
    }
}

/// Offset, length and kind of the instructions that `code` at `addr` starts with, up to the first that does not decode.
pub fn decode(code: &[u8], addr: u64) -> Vec<(usize, usize, Kind)> {
    let mut decoder = Decoder::with_ip(64, code, addr, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    let mut out = Vec::new();
    while decoder.can_decode() {
        let offset = decoder.position();
        decoder.decode_out(&mut instruction);
        if instruction.is_invalid() {
            break;
        }
        out.push((offset, instruction.len(), Kind::of(&instruction)));
    }
    out
}

/// Address, length and text (GNU syntax) of every instruction of `code`, all of which has to decode.
pub fn disassemble(code: &[u8], addr: u64) -> Result<Vec<(u64, usize, String)>, CodeError> {
    let mut formatter = GasFormatter::new();
    formatter.options_mut().set_branch_leading_zeros(false);
    formatter.options_mut().set_uppercase_hex(false);
    formatter.options_mut().set_rip_relative_addresses(false);
    formatter.options_mut().set_small_hex_numbers_in_decimal(false);
    let mut out = Vec::new();
    each(code, addr, |_, instruction, _| {
        let mut text = String::new();
        formatter.format(instruction, &mut text);
        out.push((instruction.ip(), instruction.len(), text));
        Ok(())
    })?;
    Ok(out)
}

/// The absolute addresses that the code names relative to its own place: branch targets and rip-relative operands.
pub fn relative_operands(code: &[u8], addr: u64) -> Result<Vec<u64>, CodeError> {
    let mut out = Vec::new();
    each(code, addr, |_, instruction, _| {
        if instruction.is_ip_rel_memory_operand() {
            out.push(instruction.memory_displacement64());
        } else if let Some(target) = direct_target(instruction) {
            out.push(target);
        }
        Ok(())
    })?;
    Ok(out)
}

/// Calls `visit(offset, instruction, displacement offset)` for every instruction; all of `code` has to decode. The
/// displacement offset is that of a 4-byte memory displacement in the instruction, 0 if there is none.
fn each(
    code: &[u8],
    addr: u64,
    mut visit: impl FnMut(usize, &Instruction, usize) -> Result<(), CodeError>,
) -> Result<(), CodeError> {
    let mut decoder = Decoder::with_ip(64, code, addr, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    while decoder.can_decode() {
        let offset = decoder.position();
        decoder.decode_out(&mut instruction);
        if instruction.is_invalid() {
            return Err(CodeError::new("not-an-instruction", "the bytes do not decode", offset));
        }
        let constants = decoder.get_constant_offsets(&instruction);
        let displacement = if constants.displacement_size() == 4 { constants.displacement_offset() } else { 0 };
        visit(offset, &instruction, displacement)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds() {
        let kind = |bytes: &[u8]| decode(bytes, 0x1000).first().map(|x| x.2);
        assert_eq!(kind(b"\x0f\x1f\x44\x00\x00"), Some(Kind::Nop));
        assert_eq!(kind(b"\xf3\x0f\x1e\xfa"), Some(Kind::Endbr));
        assert_eq!(kind(b"\xe8\x00\x00\x00\x00"), Some(Kind::Call));
        assert_eq!(kind(b"\x0f\x05"), Some(Kind::System));
        assert_eq!(kind(b"\xcd\x80"), Some(Kind::System));
        assert_eq!(kind(b"\xcc"), Some(Kind::Trap));
        assert_eq!(kind(b"\xeb\xfe"), Some(Kind::Jump));
        assert_eq!(kind(b"\xe3\xfe"), Some(Kind::Branch));
        assert_eq!(kind(b"\x3e\xff\xe0"), Some(Kind::IndirectJump));
        assert_eq!(kind(b"\xc3"), Some(Kind::Return));
        assert_eq!(kind(b"\x48\xcf"), Some(Kind::Fixed));
        assert_eq!(kind(b"\xf4"), Some(Kind::Fixed));
        assert_eq!(kind(b"\x0f\x0b"), Some(Kind::Undefined));
        assert_eq!(kind(b"\xc7\xf8\x00\x00\x00\x00"), Some(Kind::Fixed));
        assert_eq!(kind(b"\xff\x2d\x00\x00\x00\x00"), Some(Kind::Fixed));
        assert_eq!(kind(b"\x06"), None);
    }

    #[test]
    fn text_is_gas() {
        let text = disassemble(b"\x48\x8b\x05\x10\x00\x00\x00\x75\xf7", 0x40_0000);
        let text: Vec<_> = text.into_iter().flatten().collect();
        assert_eq!(text[0], (0x40_0000, 7, "mov 0x400017,%rax".into()));
        assert_eq!(text[1], (0x40_0007, 2, "jne 0x400000".into()));
        assert_eq!(disassemble(b"\x90\x06", 0).map_err(|e| e.offset), Err(1));
    }
}
