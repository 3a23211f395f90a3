//! The same code at another address.
//!
//! Instructions are copied byte for byte; only what is relative to their place changes. A direct branch becomes the
//! form with a 4-byte displacement (`loop` and `jrcxz`, which have none, jump over a jump).

use iced_x86::Instruction;

use super::{direct_target, each, CodeError, Kind};

/// Code re-encoded at a new address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Relocated {
    pub code: Vec<u8>,
    /// (offset in the old code, offset in the new code) of every instruction.
    pub map: Vec<(usize, usize)>,
}

/// One instruction of the new code, before its address is known.
struct Piece {
    old_offset: usize,
    bytes: Vec<u8>,
    /// Offset of a 4-byte field in `bytes` that is relative to the end of the instruction, and what it names.
    field: Option<(usize, u64)>,
    is_branch: bool,
}

/// Moves `code` from `from` to `to`. What it branches to, reads and writes stays the same absolute address; branches to
/// `from` itself stay there (so they meet whatever was put there), branches to an instruction inside the code go to its
/// copy. Code after an instruction that control never passes, and that nothing here jumps to, is left out.
pub fn relocate(code: &[u8], from: u64, to: u64) -> Result<Relocated, CodeError> {
    let live = live_length(code, from);
    let mut pieces = Vec::new();
    each(code.get(..live).unwrap_or(code), from, |offset, instruction, displacement| {
        let bytes = code.get(offset..offset + instruction.len()).unwrap_or_default();
        pieces.push(piece(instruction, offset, bytes, displacement)?);
        Ok(())
    })?;
    let mut map = Vec::with_capacity(pieces.len());
    let mut length = 0;
    for piece in &pieces {
        map.push((piece.old_offset, length));
        length += piece.bytes.len();
    }
    let mut out = Vec::with_capacity(length);
    for piece in &pieces {
        let mut bytes = piece.bytes.clone();
        if let Some((at, target)) = piece.field {
            let target = moved(target, from, to, live, &map, piece)?;
            let next = to.wrapping_add((out.len() + bytes.len()) as u64);
            let distance = target.wrapping_sub(next) as i64;
            let Ok(distance) = i32::try_from(distance) else {
                return Err(CodeError::new(
                    "out-of-reach",
                    format!("{target:#x} is more than 2 GiB away from {next:#x}"),
                    piece.old_offset,
                ));
            };
            match bytes.get_mut(at..at + 4) {
                Some(field) => field.copy_from_slice(&distance.to_le_bytes()),
                None => return Err(fixed("its displacement is not where it should be", piece.old_offset)),
            }
        }
        out.extend_from_slice(&bytes);
    }
    Ok(Relocated { code: out, map })
}

/// Length of the code up to the first instruction that control does not pass, if nothing before it jumps beyond it.
fn live_length(code: &[u8], from: u64) -> usize {
    let mut furthest = 0;
    let mut live = 0;
    let mut ended = false;
    let _ = each(code, from, |offset, instruction, _| {
        if ended && offset > furthest {
            return Err(fixed("dead", offset));
        }
        live = offset + instruction.len();
        ended = Kind::of(instruction).ends_flow();
        if let Some(target) = direct_target(instruction) {
            let inside = target.wrapping_sub(from);
            if inside < code.len() as u64 {
                furthest = furthest.max(inside as usize);
            }
        }
        Ok(())
    });
    if ended {
        live
    } else {
        code.len()
    }
}

/// Where the copy names what the original named as `target`.
fn moved(
    target: u64,
    from: u64,
    to: u64,
    live: usize,
    map: &[(usize, usize)],
    piece: &Piece,
) -> Result<u64, CodeError> {
    let inside = target.wrapping_sub(from);
    if !piece.is_branch || inside == 0 || inside >= live as u64 {
        return Ok(target);
    }
    match map.binary_search_by_key(&(inside as usize), |x| x.0).ok().and_then(|i| map.get(i)) {
        Some((_, new)) => Ok(to.wrapping_add(*new as u64)),
        None => Err(fixed("it jumps into the middle of an instruction", piece.old_offset)),
    }
}

fn fixed(message: &str, offset: usize) -> CodeError {
    CodeError::new("not-relocatable", message, offset)
}

fn piece(instruction: &Instruction, offset: usize, bytes: &[u8], displacement: usize) -> Result<Piece, CodeError> {
    let mut piece = Piece { old_offset: offset, bytes: bytes.to_vec(), field: None, is_branch: false };
    match Kind::of(instruction) {
        Kind::Call => return Err(CodeError::new("call-in-window", "a call", offset)),
        Kind::System | Kind::Trap => {
            return Err(CodeError::new("syscall-in-window", "an instruction that enters the kernel", offset));
        }
        Kind::Fixed => return Err(fixed("it is far, privileged, transactional or bound to its place", offset)),
        Kind::Jump | Kind::Branch => branch(&mut piece, instruction, bytes)?,
        _ if instruction.is_ip_rel_memory_operand() => {
            if displacement == 0 {
                return Err(fixed("its displacement has no 4-byte field", offset));
            }
            piece.field = Some((displacement, instruction.memory_displacement64()));
        }
        _ => {}
    }
    Ok(piece)
}

/// Rewrites a direct branch. Of its prefixes those stay that mean something on a branch: F2 (bnd), 2E and 3E (hints).
fn branch(piece: &mut Piece, instruction: &Instruction, bytes: &[u8]) -> Result<(), CodeError> {
    let prefixes = bytes.iter().take_while(|b| is_prefix(**b)).copied();
    let mut new: Vec<u8> = prefixes.clone().filter(|b| matches!(b, 0xf2 | 0x2e | 0x3e)).collect();
    if prefixes.clone().any(|b| b == 0x66) {
        return Err(fixed("processors disagree about a branch with an operand-size prefix", piece.old_offset));
    }
    let opcode = bytes.iter().copied().find(|b| !is_prefix(*b)).unwrap_or_default();
    if instruction.is_jmp_short_or_near() {
        new.push(0xe9);
    } else if instruction.is_jcc_short_or_near() {
        let condition = if opcode == 0x0f { bytes.iter().rev().nth(4).copied().unwrap_or_default() } else { opcode };
        new.extend([0x0f, 0x80 | condition & 0x0f]);
    } else {
        new.clear();
        new.extend(prefixes.filter(|b| *b == 0x67));
        new.extend([opcode, 2, 0xeb, 5, 0xe9]);
    }
    let at = new.len();
    new.extend([0; 4]);
    piece.bytes = new;
    piece.field = Some((at, instruction.near_branch_target()));
    piece.is_branch = true;
    Ok(())
}

fn is_prefix(byte: u8) -> bool {
    matches!(byte, 0x26 | 0x2e | 0x36 | 0x3e | 0x40..=0x4f | 0x64..=0x67 | 0xf0 | 0xf2 | 0xf3)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(code: &[u8], from: u64, to: u64) -> Result<Vec<u8>, &'static str> {
        relocate(code, from, to).map(|r| r.code).map_err(|e| e.kind)
    }

    #[test]
    fn rip_relative_operands_keep_their_address() {
        // cmpl $1, 0x10(%rip): the displacement counts from behind the immediate
        assert_eq!(code(b"\x83\x3d\x10\x00\x00\x00\x01", 0x1000, 0x2000), Ok(b"\x83\x3d\x10\xf0\xff\xff\x01".to_vec()));
    }

    #[test]
    fn short_branches_grow() {
        assert_eq!(code(b"\x74\x10", 0x1000, 0x1000), Ok(b"\x0f\x84\x0c\x00\x00\x00".to_vec()));
        assert_eq!(code(b"\xeb\x10", 0x1000, 0x1000), Ok(b"\xe9\x0d\x00\x00\x00".to_vec()));
        assert_eq!(code(b"\x67\xe3\x10", 0x1000, 0x1000), Ok(b"\x67\xe3\x02\xeb\x05\xe9\x09\x00\x00\x00".to_vec()));
        assert_eq!(code(b"\xe2\x10", 0x1000, 0x1000), Ok(b"\xe2\x02\xeb\x05\xe9\x09\x00\x00\x00".to_vec()));
    }

    #[test]
    fn branches_inside_follow_the_copy_and_the_first_byte_stays_the_site() {
        // 0: nop; 1: jne 1; 3: nop
        assert_eq!(code(b"\x90\x75\xfe\x90", 0x1000, 0x9000), Ok(b"\x90\x0f\x85\xfa\xff\xff\xff\x90".to_vec()));
        // 0: nop; 1: jne 0
        assert_eq!(code(b"\x90\x75\xfd", 0x1000, 0x1000), Ok(b"\x90\x0f\x85\xf9\xff\xff\xff".to_vec()));
        // jne into the middle of a mov
        assert_eq!(code(b"\x75\x02\x48\x89\xc3\x90\x90", 0x1000, 0x9000), Err("not-relocatable"));
    }

    #[test]
    fn dead_code_is_left_out() {
        assert_eq!(code(b"\xc3\xcc\xcc\xcc\xcc", 0x1000, 0x9000), Ok(b"\xc3".to_vec()));
        assert_eq!(relocate(b"\x90\xc3\xcc", 0, 0).map(|r| r.map), Ok(vec![(0, 0), (1, 1)]));
    }

    #[test]
    fn refusals() {
        assert_eq!(code(b"\xe8\x00\x00\x00\x00", 0, 0x100), Err("call-in-window"));
        assert_eq!(code(b"\x0f\x05", 0, 0x100), Err("syscall-in-window"));
        assert_eq!(code(b"\xcc", 0, 0x100), Err("syscall-in-window"));
        assert_eq!(code(b"\x48\xcf", 0, 0x100), Err("not-relocatable"));
        assert_eq!(code(b"\xeb\x00", 0, 1 << 32), Err("out-of-reach"));
        assert_eq!(code(b"\x66\xe9\x00\x00\x00\x00", 0, 0x100), Err("not-relocatable"));
        assert_eq!(code(b"\x06", 0, 0x100), Err("not-an-instruction"));
    }
}
