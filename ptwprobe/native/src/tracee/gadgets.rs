//! Instructions of a target that serve its remote calls. Nothing of ours is in the target when the first is made.

use std::os::fd::{AsFd, BorrowedFd};

use super::owner::Owner;
use super::procfs::{self, Status};
use super::{sys, Error, Result};

/// Of one mapping; the kernel's instructions are in the first pages of a libc or the vDSO.
const MOST_TEXT: u64 = 4 << 20;
const MOST_SEARCHED: u64 = 64 << 20;
/// Of the gadgets, in bytes.
const LONGEST: usize = 16;
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// `mov $15, %eax` or `%rax`, `syscall`: how every libc returns from a signal handler.
const SIGRETURN: [&[u8]; 2] = [&[0xb8, 15, 0, 0, 0, 0x0f, 0x05], &[0x48, 0xc7, 0xc0, 15, 0, 0, 0, 0x0f, 0x05]];

/// Addresses in a target; 0: it has none.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Gadgets {
    /// A `syscall`.
    pub syscall: u64,
    /// A `syscall` that is followed by `pops` pops and a `ret`.
    pub syscall_ret: u64,
    pub pops: u64,
    /// The way into `rt_sigreturn`.
    pub sigreturn: u64,
}

impl Gadgets {
    /// Whether a thread can come back from a call without us.
    pub fn can_return(&self) -> bool {
        self.syscall_ret != 0 && self.sigreturn != 0
    }

    /// Take from `text`, which is at `addr`, what is still missing.
    fn search(&mut self, addr: u64, text: &[u8]) {
        for (at, _) in text.windows(2).enumerate().filter(|(_, w)| *w == SYSCALL) {
            let found = addr + at as u64;
            if self.syscall == 0 {
                self.syscall = found;
            }
            if let Some(pops) = text.get(at + 2..).and_then(pops_before_return).filter(|_| self.syscall_ret == 0) {
                (self.syscall_ret, self.pops) = (found, pops);
            }
            let starts = SIGRETURN.iter().filter_map(|code| Some((*code, (at + 2).checked_sub(code.len())?)));
            let mut starts = starts.filter(|(code, start)| text.get(*start..at + 2) == Some(code));
            if let Some((_, start)) = starts.next().filter(|_| self.sigreturn == 0) {
                self.sigreturn = addr + start as u64;
            }
        }
    }
}

/// How many registers are popped before the `ret` that `code` comes to; None where it does something else.
fn pops_before_return(code: &[u8]) -> Option<u64> {
    let mut rest = code;
    for pops in 0..4 {
        rest = match rest {
            [0xc3, ..] => return Some(pops),
            // `pop %rsp` would leave the frame.
            [0x5c, ..] => return None,
            [0x58..=0x5f, rest @ ..] | [0x41, 0x58..=0x5f, rest @ ..] => rest,
            _ => return None,
        };
    }
    None
}

/// In the process of the task `tid`, whose memory is `memory`; Gadgets with no `syscall` where there is none.
fn search(tid: i32, memory: BorrowedFd<'_>) -> Result<Gadgets> {
    let mut found = Gadgets::default();
    let mut maps = procfs::maps(tid)?;
    maps.retain(|m| m.executable && m.name != "[vsyscall]" && !m.name.starts_with("/memfd:"));
    maps.sort_by_key(|m| (m.name != "[vdso]", !m.name.contains("/libc") && !m.name.contains("/ld-")));
    let mut searched = 0;
    for map in maps {
        let len = (map.end - map.start).min(MOST_TEXT);
        let mut text = vec![0; usize::try_from(len).unwrap_or(0)];
        if sys::read_at(memory, map.start, &mut text).is_ok() {
            found.search(map.start, &text);
        }
        searched += len;
        if found.can_return() || found.syscall != 0 && searched > MOST_SEARCHED {
            break;
        }
    }
    Ok(found)
}

fn are_there(memory: BorrowedFd<'_>, gadgets: &Gadgets) -> bool {
    let at = |addr: u64| {
        let mut text = [0u8; LONGEST];
        let mut here = Gadgets::default();
        if addr != 0 && sys::read_at(memory, addr, &mut text).is_ok() {
            here.search(addr, &text);
        }
        here
    };
    let (returning, sigreturn) = (at(gadgets.syscall_ret), at(gadgets.sigreturn));
    at(gadgets.syscall).syscall == gadgets.syscall
        && (returning.syscall_ret, returning.pops) == (gadgets.syscall_ret, gadgets.pops)
        && sigreturn.sigreturn == gadgets.sigreturn
}

impl Owner {
    /// Look for the gadgets of `pid`, in its memory as the task `tid` has it, unless they are known.
    pub(super) fn find_gadgets(&mut self, pid: i32, tid: i32, memory: BorrowedFd<'_>) -> Result<Gadgets> {
        if let Some(known) = self.gadgets.get(&pid).filter(|known| are_there(memory, known)) {
            return Ok(*known);
        }
        let found = search(tid, memory)?;
        if found.syscall != 0 {
            self.gadgets.insert(pid, found);
            return Ok(found);
        }
        if Status::read(tid).is_none_or(|s| s.is_dead() || !s.has_memory) {
            return Err(Error::gone(pid));
        }
        Err(Error::new("unsupported", format!("process {pid} has no syscall instruction")))
    }

    /// Same, of an attached process. `tid`: a thread that lives, since a first thread that has ended has no memory any more.
    pub(super) fn gadgets(&mut self, pid: i32, tid: i32) -> Result<Gadgets> {
        let memory = self.proc(pid)?.memory(pid)?.try_clone_to_owned();
        let memory = memory.map_err(|e| Error::new("failed", format!("the memory of process {pid}: {e}")))?;
        self.find_gadgets(pid, tid, memory.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_calls_that_return() {
        let mut found = Gadgets::default();
        found.search(0x1000, &[0x0f, 0x05, 0x48, 0x90]);
        assert_eq!(found, Gadgets { syscall: 0x1000, ..Gadgets::default() });
        found.search(0x2000, &[0x90, 0x0f, 0x05, 0x5d, 0x41, 0x5c, 0xc3, 0x0f, 0x05, 0xc3]);
        assert_eq!((found.syscall, found.syscall_ret, found.pops), (0x1000, 0x2001, 2));
        found.search(0x3000, &[0xc3, 0x48, 0xc7, 0xc0, 15, 0, 0, 0, 0x0f, 0x05, 0x0f, 0x1f]);
        assert_eq!(found.sigreturn, 0x3001);
        assert!(found.can_return());
    }

    #[test]
    fn only_pops_of_registers_may_come_before_the_return() {
        assert_eq!(pops_before_return(&[0xc3]), Some(0));
        assert_eq!(pops_before_return(&[0x5c, 0xc3]), None);
        assert_eq!(pops_before_return(&[0x41, 0x5c, 0xc3]), Some(1));
        assert_eq!(pops_before_return(&[0x90, 0xc3]), None);
        assert_eq!(pops_before_return(&[0x5b]), None);
    }
}
