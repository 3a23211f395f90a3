//! Basic blocks: straight-line code up to the first instruction that the trace, or control itself, has a say in.

use iced_x86::{Code as Op, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic};

use super::code::Code;
use super::sink::BranchKind;
use crate::x86::direct_target;

/// A link that has not been followed yet.
pub const NONE: u32 = u32::MAX;

/// Longer blocks are split: their offsets have 16 bits, and what is built at once is bounded.
const MAX_INSNS: u16 = 512;
const READ_LEN: usize = 512;
const MAX_INSN_LEN: usize = 15;

/// What ends a block.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Term {
    Cond,
    Jump,
    Call,
    Return,
    IndirectJump,
    IndirectCall,
    /// Nothing: the block was only long enough.
    Split,
    Syscall,
    FarReturn,
    FarOther,
    /// An instruction that control never passes: `ud2`.
    Stop,
    /// Bytes that are no instruction.
    Invalid,
    /// Here the code is not known.
    Unknown,
}

/// What the walk needs of a block at every branch. `branch`: address of the instruction that ends it (of what follows,
/// where none does), `target`: of a direct branch. `taken` and `fall` are links to other blocks.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    pub branch: u64,
    pub target: u64,
    pub taken: u32,
    pub fall: u32,
    pub term: Term,
    /// Bytes of the instruction that ends it.
    pub branch_len: u8,
}

impl Block {
    /// The address behind it.
    #[inline]
    #[must_use]
    pub fn after(&self) -> u64 {
        self.branch.wrapping_add(self.branch_len.into())
    }

    /// Whether it may be one without any instruction: where it begins the code is not known.
    #[inline]
    #[must_use]
    pub fn is_nowhere(&self) -> bool {
        self.branch_len == 0
    }
}

/// What else is known of a block: its address, and where its instructions begin.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    pub start: u64,
    /// Index of the first in `Offsets`.
    offsets: u32,
    insns: u16,
}

/// What of an instruction ends a block.
fn term_of(instruction: &Instruction) -> Option<Term> {
    let near = |term| if is_far(instruction) { Term::FarOther } else { term };
    Some(match instruction.flow_control() {
        FlowControl::Next | FlowControl::XbeginXabortXend => return None,
        FlowControl::ConditionalBranch => Term::Cond,
        FlowControl::UnconditionalBranch => near(Term::Jump),
        FlowControl::IndirectBranch => near(Term::IndirectJump),
        FlowControl::IndirectCall => near(Term::IndirectCall),
        FlowControl::Call => match instruction.mnemonic() {
            Mnemonic::Call => near(Term::Call),
            Mnemonic::Syscall | Mnemonic::Sysenter => Term::Syscall,
            _ => Term::FarOther,
        },
        FlowControl::Return => match instruction.mnemonic() {
            Mnemonic::Ret => Term::Return,
            _ => Term::FarReturn,
        },
        FlowControl::Interrupt => Term::FarOther,
        FlowControl::Exception => Term::Stop,
    })
}

fn is_far(instruction: &Instruction) -> bool {
    matches!(
        instruction.code(),
        Op::Jmp_m1616
            | Op::Jmp_m1632
            | Op::Jmp_m1664
            | Op::Jmp_ptr1616
            | Op::Jmp_ptr1632
            | Op::Call_m1616
            | Op::Call_m1632
            | Op::Call_m1664
            | Op::Call_ptr1616
            | Op::Call_ptr1632
    )
}

/// The kind of a branch by an instruction that ends a block so.
#[must_use]
pub fn branch_kind(term: Term) -> BranchKind {
    match term {
        Term::Cond => BranchKind::Cond,
        Term::Jump => BranchKind::Jump,
        Term::Call => BranchKind::Call,
        Term::Return => BranchKind::Return,
        Term::IndirectJump => BranchKind::IndirectJump,
        Term::IndirectCall => BranchKind::IndirectCall,
        Term::Syscall => BranchKind::Syscall,
        Term::FarReturn => BranchKind::FarReturn,
        Term::FarOther => BranchKind::FarOther,
        Term::Split | Term::Stop | Term::Invalid | Term::Unknown => BranchKind::TraceEnd,
    }
}

/// Where the instructions of all blocks begin, as offsets from their block's start.
#[derive(Debug, Default)]
pub struct Offsets(Vec<u16>);

impl Offsets {
    /// The address behind the instruction at `ip`, where one of the block's instructions begins there.
    #[must_use]
    pub fn find(&self, block: &Block, extent: &Extent, ip: u64) -> Option<u64> {
        let offset = u16::try_from(ip.checked_sub(extent.start)?).ok()?;
        let first = extent.offsets as usize;
        let offsets = self.0.get(first..first + usize::from(extent.insns))?;
        let at = offsets.binary_search(&offset).ok()?;
        Some(offsets.get(at + 1).map_or(block.after(), |&next| extent.start.wrapping_add(next.into())))
    }
}

/// Whether it is the jump that a probe's site was patched with.
fn enters_stub(code: &dyn Code, instruction: &Instruction) -> bool {
    let stub = direct_target(instruction).and_then(|target| code.stub(target));
    stub.is_some_and(|stub| stub.site == instruction.ip())
}

/// The block at `ip` in code of `bits` (16, 32 or 64).
pub fn build(code: &dyn Code, bits: u32, ip: u64, offsets: &mut Offsets) -> (Block, Extent) {
    let mut buffer = [0; READ_LEN];
    let mut instruction = Instruction::default();
    let first = offsets.0.len();
    let mut at = ip;
    let mut end = None;
    let closed = code.closed_site(ip);
    'code: while end.is_none() {
        let known = code.read(at, &mut buffer).min(READ_LEN);
        let bytes = buffer.get(..known).unwrap_or_default();
        if bytes.is_empty() {
            // A stub that cannot be read is passed: what it displaced ran in it.
            end = match code.stub(ip).filter(|stub| at == ip && ![0, ip].contains(&stub.continue_addr)) {
                Some(stub) => Some((Term::Split, stub.continue_addr, 0)),
                None => Some((Term::Unknown, at, 0)),
            };
            break;
        }
        let mut decoder = Decoder::with_ip(bits, bytes, at, DecoderOptions::NONE);
        while decoder.can_decode() {
            // An instruction that the piece read may have cut is read again; one that the code's end cuts is unknown.
            let rest = known - decoder.position();
            if rest < MAX_INSN_LEN && known == READ_LEN && decoder.position() != 0 {
                continue 'code;
            }
            let insns = offsets.0.len() - first;
            if insns >= usize::from(MAX_INSNS) {
                end = Some((Term::Split, at, 0));
                continue 'code;
            }
            decoder.decode_out(&mut instruction);
            if closed == Some(at) && !enters_stub(code, &instruction) {
                end = Some((Term::Unknown, at, 0));
                continue 'code;
            }
            if instruction.is_invalid() {
                let cut = decoder.last_error() == iced_x86::DecoderError::NoMoreBytes;
                end = Some((if cut { Term::Unknown } else { Term::Invalid }, at, 0));
                continue 'code;
            }
            // 512 instructions have at most 7,680 bytes.
            offsets.0.push((at.wrapping_sub(ip)) as u16);
            if let Some(term) = term_of(&instruction) {
                let target = direct_target(&instruction).unwrap_or(0);
                end = Some((term, at, target));
                at = instruction.next_ip();
                continue 'code;
            }
            at = instruction.next_ip();
        }
    }
    let (term, branch, target) = end.unwrap_or((Term::Unknown, at, 0));
    // An instruction has 15 bytes at most; a stub that is passed ends where it goes on.
    let branch_len = at.checked_sub(branch).and_then(|len| u8::try_from(len).ok()).unwrap_or(0);
    let extent = Extent { start: ip, offsets: first as u32, insns: (offsets.0.len() - first) as u16 };
    (Block { branch, target, taken: NONE, fall: NONE, term, branch_len }, extent)
}
