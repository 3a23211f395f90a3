//! Code as text in the syntax of the stub templates (Intel), so that what was assembled can be compared with what was
//! meant.

use iced_x86::{Decoder, DecoderOptions, Formatter, Instruction, IntelFormatter, MemorySizeOptions};

/// Address, length in bytes and text of every instruction of `code`, which stands at `addr`. Bytes that do not decode
/// end the list with the text "(bad)".
pub fn listing(code: &[u8], addr: u64) -> Vec<(u64, usize, String)> {
    let mut formatter = IntelFormatter::new();
    let options = formatter.options_mut();
    options.set_hex_prefix("0x");
    options.set_hex_suffix("");
    options.set_uppercase_hex(false);
    options.set_small_hex_numbers_in_decimal(false);
    options.set_branch_leading_zeros(false);
    options.set_space_after_operand_separator(true);
    options.set_space_between_memory_add_operators(true);
    options.set_show_zero_displacements(true);
    options.set_show_branch_size(false);
    options.set_rip_relative_addresses(false);
    options.set_memory_size_options(MemorySizeOptions::Always);
    let mut decoder = Decoder::with_ip(64, code, addr, DecoderOptions::NONE);
    let mut instruction = Instruction::default();
    let mut out = Vec::new();
    while decoder.can_decode() {
        decoder.decode_out(&mut instruction);
        let mut text = String::new();
        formatter.format(&instruction, &mut text);
        out.push((instruction.ip(), instruction.len(), text));
        if instruction.is_invalid() {
            break;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::listing;

    fn text(code: &[u8]) -> Vec<String> {
        listing(code, 0x1000).into_iter().map(|x| x.2).collect()
    }

    #[test]
    fn reads_like_the_templates() {
        assert_eq!(text(b"\x48\x8d\xa4\x24\x58\xff\xff\xff"), ["lea rsp, [rsp - 0xa8]"]);
        assert_eq!(text(b"\x48\x89\x04\x24\x74\x00"), ["mov qword ptr [rsp], rax", "je 0x1006"]);
        assert_eq!(text(b"\xf3\x48\x0f\xae\x25\x10\x00\x00\x00"), ["ptwrite qword ptr [0x1019]"]);
    }

    #[test]
    fn ends_at_what_does_not_decode() {
        assert_eq!(text(b"\x90\x06\x90"), ["nop", "(bad)"]);
    }
}
