//! A signal frame for a thread that executes calls for us: whatever happens to us, the thread goes on by itself.
//!
//! The thread calls through a `syscall; ret` of its own program with its stack pointer at the frame. Alive, we take it
//! back after the call and give it its own registers. If we are killed, it returns from the call into `rt_sigreturn`, which loads all that
//! it had from the frame: registers, signal mask, vector state. Layout: struct rt_sigframe and ucontext of x86-64
//! (arch/x86/include/uapi/asm/sigcontext.h, asm-generic/ucontext.h), with what `restore_sigcontext` wants of them.

use std::arch::x86_64::__cpuid_count;

use super::gadgets::Gadgets;
use super::sys::Regs;

const RED_ZONE: u64 = 128;
/// Return address, ucontext, siginfo.
const FRAME: usize = 8 + UCONTEXT + 128;
const UCONTEXT: usize = 304;
/// UC_FP_XSTATE | UC_SIGCONTEXT_SS | UC_STRICT_RESTORE_SS
const FLAGS: u64 = 7;
/// No mode of sigaltstack(2): the kernel then leaves the alternate stack, which we do not know, as it is.
const NO_STACK_MODE: u64 = 4;
const FP_XSTATE_MAGIC1: u32 = 0x4650_5853;
const FP_XSTATE_MAGIC2: u32 = 0x4650_5845;
/// The software bytes of the legacy area, and the header behind it.
const SW_BYTES: usize = 464;
const XSAVE_HEADER: usize = 512;
const XSAVE_LEGACY: u64 = 576;
/// A component that is no part of a frame unless the thread uses it (AMX tiles).
const TILE_DATA: u32 = 18;

/// Bytes to write into a target's stack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub addr: u64,
    pub bytes: Vec<u8>,
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

/// The features that the frame restores and the bytes that they take, of what PTRACE_GETREGSET gave.
fn features(xstate: &[u8]) -> Option<(u64, usize)> {
    let (all, used) = (word(xstate, SW_BYTES)?, word(xstate, XSAVE_HEADER)?);
    let features = if used >> TILE_DATA & 1 == 0 { all & !(1 << TILE_DATA) } else { all };
    let end = |component: u32| {
        let leaf = __cpuid_count(0xd, component);
        u64::from(leaf.ebx) + u64::from(leaf.eax)
    };
    let components = (2..63).filter(|i| features >> i & 1 == 1);
    let size = components.map(end).fold(XSAVE_LEGACY, u64::max);
    let size = usize::try_from(size).ok()?;
    (size <= xstate.len()).then_some((features, size))
}

impl Frame {
    /// `regs`: what the thread shall go on with. None where the vector state is not understood.
    pub fn below(stack: u64, regs: &Regs, mask: u64, xstate: &[u8], gadgets: &Gadgets) -> Option<Frame> {
        let (features, size) = features(xstate)?;
        let vector_at = stack.checked_sub(RED_ZONE + size as u64 + 4)? & !63;
        let frame_at = vector_at.checked_sub(FRAME as u64)? & !15;
        let addr = frame_at.checked_sub(8 * gadgets.pops)?;
        let mut bytes = vec![0u8; usize::try_from(vector_at - addr).ok()?];
        bytes.extend_from_slice(xstate.get(..size)?);
        bytes.extend_from_slice(&FP_XSTATE_MAGIC2.to_le_bytes());
        let mut put = |addr: u64, words: &[u64]| {
            let at = usize::try_from(addr.wrapping_sub(frame_at) + 8 * gadgets.pops).unwrap_or(usize::MAX);
            let to = bytes.get_mut(at..).unwrap_or_default().chunks_exact_mut(8);
            to.zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_le_bytes()));
        };
        let r = regs;
        put(frame_at, &[gadgets.sigreturn, FLAGS, 0, 0, NO_STACK_MODE, 0]);
        put(frame_at + 48, &[r.r8, r.r9, r.r10, r.r11, r.r12, r.r13, r.r14, r.r15]);
        put(frame_at + 112, &[r.rdi, r.rsi, r.rbp, r.rbx, r.rdx, r.rax, r.rcx, r.rsp, r.rip, r.eflags]);
        // cs, gs, fs, ss as 16-bit words; then error, trap, old mask, fault address, and where the vector state is.
        put(frame_at + 192, &[r.cs | r.ss << 48, 0, 0, mask, 0, vector_at]);
        put(frame_at + 304, &[mask]);
        let sizes = (size as u64 + 4) << 32 | u64::from(FP_XSTATE_MAGIC1);
        put(vector_at + SW_BYTES as u64, &[sizes, features, size as u64, 0, 0, 0]);
        put(vector_at + XSAVE_HEADER as u64, &[word(xstate, XSAVE_HEADER)? & features, 0]);
        Some(Frame { addr, bytes })
    }
}
