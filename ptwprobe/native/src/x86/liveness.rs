//! Whether anything will read a register again.

use iced_x86::{Decoder, DecoderOptions, Instruction, InstructionInfoFactory, OpAccess, Register};

use super::{direct_target, Kind};

/// Paths through more instructions than this are not followed.
const MOST_INSTRUCTIONS: usize = 200;
/// A call passes these on; r10 it does not (System V ABI, 3.2.1).
const ARGUMENTS: [Register; 6] =
    [Register::RDI, Register::RSI, Register::RDX, Register::RCX, Register::R8, Register::R9];

/// Whether `register`, one that a function need not preserve, is written before it is read on every path that begins at
/// `addr`, the first byte of `code`. A return or a call ends a path. False where that cannot be seen.
pub fn is_dead(code: &[u8], addr: u64, register: Register) -> bool {
    let mut factory = InstructionInfoFactory::new();
    let mut decoder = Decoder::with_ip(64, code, addr, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    let mut seen = Vec::new();
    let mut todo = vec![addr];
    while let Some(mut at) = todo.pop() {
        loop {
            let offset = at.wrapping_sub(addr);
            if seen.contains(&at) {
                break;
            }
            let inside = usize::try_from(offset).is_ok_and(|o| decoder.set_position(o).is_ok());
            if !inside || seen.len() >= MOST_INSTRUCTIONS {
                return false;
            }
            seen.push(at);
            decoder.set_ip(at);
            decoder.decode_out(&mut instruction);
            if instruction.is_invalid() {
                return false;
            }
            match use_of(&mut factory, &instruction, register) {
                Use::Read => return false,
                Use::Written => break,
                Use::None => {}
            }
            match Kind::of(&instruction) {
                Kind::Return | Kind::Trap | Kind::Undefined => break,
                Kind::Call if !ARGUMENTS.contains(&register) => break,
                Kind::Nop | Kind::Endbr | Kind::Plain => {}
                Kind::Branch => match direct_target(&instruction) {
                    Some(target) => todo.push(target),
                    None => return false,
                },
                Kind::Jump => match direct_target(&instruction) {
                    Some(target) => {
                        at = target;
                        continue;
                    }
                    None => return false,
                },
                Kind::Call | Kind::IndirectJump | Kind::System | Kind::Fixed => return false,
            }
            at = instruction.next_ip();
        }
    }
    true
}

enum Use {
    None,
    Read,
    Written,
}

fn use_of(factory: &mut InstructionInfoFactory, instruction: &Instruction, register: Register) -> Use {
    let mut found = Use::None;
    for used in factory.info(instruction).used_registers() {
        if used.register().full_register() != register {
            continue;
        }
        match used.access() {
            // A write of 32 bits clears the others; one of 8 or 16 leaves them.
            OpAccess::Write if used.register().size() >= 4 => found = Use::Written,
            OpAccess::Write | OpAccess::CondWrite | OpAccess::NoMemAccess | OpAccess::None => {}
            _ => return Use::Read,
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dead(code: &[u8], register: Register) -> bool {
        is_dead(code, 0x1000, register)
    }

    #[test]
    fn a_return_or_a_write_ends_a_register_and_a_read_keeps_it() {
        // cmp rax, -4096; ja +1; ret; neg eax; ret
        let wrapper = b"\x48\x3d\x00\xf0\xff\xff\x77\x01\xc3\xf7\xd8\xc3";
        assert!(dead(wrapper, Register::R10) && dead(wrapper, Register::RDX));
        // xor edx, edx; mov eax, edx; ret
        assert!(dead(b"\x31\xd2\x89\xd0\xc3", Register::RDX));
        // mov eax, edx; ret
        assert!(!dead(b"\x89\xd0\xc3", Register::RDX));
        // lea rax, [r10+8]; ret
        assert!(!dead(b"\x49\x8d\x42\x08\xc3", Register::R10));
        // mov dl, 1; mov eax, edx; ret
        assert!(!dead(b"\xb2\x01\x89\xd0\xc3", Register::RDX));
    }

    #[test]
    fn calls_take_arguments_and_loops_end() {
        // mov edi, r8d; call +0; jmp to itself
        let code = b"\x44\x89\xc7\xe8\x00\x00\x00\x00\xeb\xfe";
        assert!(dead(code, Register::R10));
        assert!(!dead(code, Register::R8) && !dead(code, Register::RDX));
        assert!(dead(b"\xeb\xfe", Register::RDX));
        // A jump out of what is known; another system call; code that ends.
        assert!(!dead(b"\xeb\x7f", Register::R10));
        assert!(!dead(b"\x0f\x05\xc3", Register::R10));
        assert!(!dead(b"\x90", Register::R10));
    }
}
