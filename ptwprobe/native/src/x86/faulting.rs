//! Which instructions can raise a fault of their own.

use iced_x86::{Instruction, InstructionInfoFactory, Mnemonic, OpAccess, Register, UsedMemory};

use super::{each, CodeError, Kind};

/// Offset in `code` of the first instruction that can fault: it divides, is undefined, or has an operand in memory that is reached
/// by other than the stack pointer, the instruction pointer, thread-local storage (fs) or one of the registers in
/// `trusted` (names as in assembly). Code has to decode; its operands are taken to be mapped where a program keeps what
/// those registers lead to.
pub fn first_that_may_fault(code: &[u8], addr: u64, trusted: &[String]) -> Result<Option<u64>, CodeError> {
    let mut info = InstructionInfoFactory::new();
    let mut found = None;
    each(code, addr, |offset, instruction, _| {
        if found.is_none() && may_fault(instruction, &mut info, trusted) {
            found = Some(offset as u64);
        }
        Ok(())
    })?;
    Ok(found)
}

fn may_fault(instruction: &Instruction, info: &mut InstructionInfoFactory, trusted: &[String]) -> bool {
    let divides = matches!(instruction.mnemonic(), Mnemonic::Div | Mnemonic::Idiv);
    let trusts = |register| trusted.iter().any(|name| name.eq_ignore_ascii_case(&format!("{register:?}")));
    let is_safe = |m: &UsedMemory| {
        let base = m.base();
        let by_place = matches!(base, Register::RSP | Register::RIP)
            || base == Register::None && instruction.is_ip_rel_memory_operand();
        m.access() == OpAccess::NoMemAccess
            || m.segment() == Register::FS
            || m.index() == Register::None && (by_place || trusts(base))
    };
    divides || Kind::of(instruction) == Kind::Undefined || !info.info(instruction).used_memory().iter().all(is_safe)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(code: &[u8]) -> Option<u64> {
        first_that_may_fault(code, 0x1000, &["r14".into()]).expect("decodes")
    }

    #[test]
    fn operands_through_registers_may_fault() {
        assert_eq!(found(b"\x48\x8b\x07"), Some(0)); // mov (%rdi),%rax
        assert_eq!(found(b"\x55\x48\x89\x45\xf8"), Some(1)); // push %rbp; mov %rax,-8(%rbp)
        assert_eq!(found(b"\xa4"), Some(0)); // movsb
        assert_eq!(found(b"\xf0\xff\x04\xc4"), Some(0)); // lock incl (%rsp,%rax,8)
        assert_eq!(found(b"\xff\x27"), Some(0)); // jmp *(%rdi)
        assert_eq!(found(b"\x65\x48\x8b\x04\x25\x00\x00\x00\x00"), Some(0)); // mov %gs:0,%rax
        assert_eq!(found(b"\xa1\x00\x00\x00\x00\x00\x00\x00\x00"), Some(0)); // movabs 0,%eax
    }

    #[test]
    fn divisions_and_undefined_instructions_do() {
        assert_eq!(found(b"\x31\xd2\x48\xf7\xff"), Some(2)); // xor; idiv %rdi
        assert_eq!(found(b"\xf7\xf1"), Some(0));
        assert_eq!(found(b"\x90\x0f\x0b"), Some(1));
    }

    #[test]
    fn the_stack_the_code_itself_and_thread_local_storage_are_there() {
        for code in [
            &b"\x48\x89\xe5\x41\x57"[..],            // mov %rsp,%rbp; push %r15
            b"\x48\x8b\x44\x24\x08",                 // mov 8(%rsp),%rax
            b"\x48\x8b\x05\x00\x10\x00\x00",         // mov 0x1000(%rip),%rax
            b"\x64\x48\x8b\x04\x25\x28\x00\x00\x00", // mov %fs:0x28,%rax
            b"\x49\x3b\x66\x10",                     // cmp 0x10(%r14),%rsp
            b"\x48\x8d\x04\x07",                     // lea (%rdi,%rax),%rax
            b"\x0f\x1f\x44\x00\x00",                 // nopl
            b"\x0f\x18\x0f",                         // prefetcht0 (%rdi)
            b"\xc3",
        ] {
            assert_eq!(found(code), None, "{code:02x?}");
        }
    }
}
