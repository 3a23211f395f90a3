//! Where the threads of a standing process are, and what their stacks refer to.

use super::lazy::Lazy;
use super::owner::Owner;
use super::{procfs, sys, Result};

/// A signal handler's frame keeps `cs` and `ss` of the interrupted code in this one word (struct sigcontext_64).
const SEGMENTS: u64 = 0x002b_0000_0000_0033;
/// How far up a stack is read.
const STACK_LIMIT: u64 = 8 << 20;
const READ_AT_ONCE: usize = 256 << 10;
const RED_ZONE: u64 = 128;
/// Stacks that signal frames lead on to (alternate stacks nest rarely).
const STACKS_FOLLOWED: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadState {
    pub tid: i32,
    pub rip: u64,
    pub rsp: u64,
    pub fs_base: u64,
    pub orig_rax: u64,
    pub rax: u64,
}

/// Sorted ranges [start, end) of addresses.
pub struct Ranges(Vec<(u64, u64)>);

impl Ranges {
    pub fn new(mut ranges: Vec<(u64, u64)>) -> Self {
        ranges.retain(|(start, end)| start < end);
        ranges.sort_unstable();
        Ranges(ranges)
    }

    pub fn contains(&self, addr: u64) -> bool {
        match self.0.get(self.0.partition_point(|(start, _)| *start <= addr).wrapping_sub(1)) {
            // Ranges may overlap; the one that starts last before `addr` is not always the one that reaches furthest.
            Some((_, end)) if addr < *end => true,
            Some(_) => self.0.iter().any(|(start, end)| (*start..*end).contains(&addr)),
            None => false,
        }
    }
}

/// What of a stack counts as a reference to a range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Words {
    /// The saved `rip` of signal frames.
    SignalFrames,
    /// Every aligned word.
    All,
}

/// Buffers for reading stacks, made before the target stops.
pub struct Scanner {
    buffer: Vec<u8>,
    /// (start, end) of every mapping.
    areas: Vec<(u64, u64)>,
    lazy: Option<Lazy>,
}

impl Scanner {
    pub fn new(pid: i32) -> Result<Scanner> {
        let areas = procfs::maps(pid)?.iter().map(|m| (m.start, m.end)).collect();
        Ok(Scanner { buffer: vec![0; READ_AT_ONCE], areas, lazy: Lazy::of(pid) })
    }

    /// The first word of the stack at `rsp`, or of a stack that it interrupted, that refers into `ranges`:
    /// (address of the word, the word).
    pub fn find(&mut self, tid: i32, rsp: u64, ranges: &Ranges, words: Words) -> Option<(u64, u64)> {
        let mut todo = [0u64; STACKS_FOLLOWED];
        todo[0] = rsp;
        let mut known = 1;
        let mut next = 0;
        while next < known {
            let start = todo.get(next).copied()?.saturating_sub(RED_ZONE) & !7;
            next += 1;
            let area = self.areas.iter().find(|(low, high)| (*low..*high).contains(&start));
            let end = area.map_or(u64::MAX, |(_, high)| *high).min(start.saturating_add(STACK_LIMIT));
            let mut at = start;
            // The three words before the one in hand: rsp, rip and flags of a frame whose segments come now.
            let mut before = [0u64; 3];
            while at < end {
                let want = usize::try_from(end - at).unwrap_or(READ_AT_ONCE).min(READ_AT_ONCE);
                let buffer = self.buffer.get_mut(..want)?;
                let got = match &self.lazy {
                    Some(lazy) => lazy.read_memory(tid, at, buffer),
                    None => sys::read_memory(tid, at, buffer),
                };
                for (i, word) in buffer.get(..got)?.chunks_exact(8).enumerate() {
                    let word = u64::from_le_bytes(word.try_into().unwrap_or_default());
                    let addr = at + 8 * i as u64;
                    if words == Words::All && ranges.contains(word) {
                        return Some((addr, word));
                    }
                    if word == SEGMENTS {
                        let [saved_rsp, saved_rip, _] = before;
                        if ranges.contains(saved_rip) {
                            return Some((addr - 16, saved_rip));
                        }
                        if !(start..end).contains(&saved_rsp) && !todo.contains(&saved_rsp) {
                            if let Some(slot) = todo.get_mut(known) {
                                *slot = saved_rsp;
                                known += 1;
                            }
                        }
                    }
                    before = [before[1], before[2], word];
                }
                if got < want {
                    break;
                }
                at += got as u64;
            }
        }
        None
    }
}

impl Owner {
    /// A snapshot of all threads, taken in one short stop.
    pub fn threads(&mut self, pid: i32) -> Result<Vec<ThreadState>> {
        self.stopped(pid, |owner| {
            let proc = owner.proc(pid)?;
            let state = |(tid, t): (&i32, &super::owner::Thread)| ThreadState {
                tid: *tid,
                rip: t.regs.rip,
                rsp: t.regs.rsp,
                fs_base: t.regs.fs_base,
                orig_rax: t.regs.orig_rax,
                rax: t.regs.rax,
            };
            Ok(proc.threads.iter().filter(|(_, t)| t.is_stopped() && !t.sibling).map(state).collect())
        })
    }

    /// The threads whose `rip`, or any word of whose stacks, refers into `ranges`.
    pub fn threads_in_ranges(&mut self, pid: i32, ranges: Vec<(u64, u64)>) -> Result<Vec<i32>> {
        let ranges = Ranges::new(ranges);
        self.attached(pid, |owner| {
            let mut scanner = Scanner::new(pid)?;
            owner.stop_all(pid)?;
            owner.standing_in(pid, &ranges, &mut scanner)
        })
    }

    /// Same, when everything stands already.
    pub(super) fn standing_in(&mut self, pid: i32, ranges: &Ranges, scanner: &mut Scanner) -> Result<Vec<i32>> {
        let standing = self.proc(pid)?.threads.iter().filter(|(_, t)| t.is_stopped());
        let tids: Vec<i32> = standing.map(|(tid, _)| *tid).collect();
        Ok(tids.into_iter().filter(|tid| self.stands_in(pid, *tid, ranges, scanner)).collect())
    }

    /// Same for one stopped thread; false where it is gone.
    pub(super) fn stands_in(&self, pid: i32, tid: i32, ranges: &Ranges, scanner: &mut Scanner) -> bool {
        let thread = self.procs.get(&pid).and_then(|p| p.threads.get(&tid));
        thread.is_some_and(|thread| {
            let regs = &thread.regs;
            ranges.contains(regs.rip) || scanner.find(tid, regs.rsp, ranges, Words::All).is_some()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_overlap_and_touch() {
        let r = Ranges::new(vec![(10, 100), (20, 30), (200, 201), (5, 5)]);
        assert!(!r.contains(9) && r.contains(10) && r.contains(50) && !r.contains(100));
        assert!(r.contains(200) && !r.contains(201) && !r.contains(5));
    }

    #[test]
    fn finds_words_and_signal_frames_of_a_stack() {
        let pid = std::process::id() as i32;
        let mut stack = vec![0u64; 256];
        stack[100] = 0x1234;
        stack[150] = 0x7777_0000; // saved rsp
        stack[151] = 0x5678; // saved rip
        stack[152] = 0x246;
        stack[153] = SEGMENTS;
        let mut scanner = Scanner { buffer: vec![0; READ_AT_ONCE], areas: Vec::new(), lazy: None };
        let base = stack.as_ptr() as u64;
        scanner.areas.push((base & !0xf, base + 2048));
        let rsp = base + 256;
        let mut find = |range, words| scanner.find(pid, rsp, &Ranges::new(vec![range]), words);
        assert_eq!(find((0x1230, 0x1240), Words::All), Some((base + 800, 0x1234)));
        assert_eq!(find((0x1230, 0x1240), Words::SignalFrames), None);
        assert_eq!(find((0x5678, 0x5679), Words::SignalFrames), Some((base + 151 * 8, 0x5678)));
    }
}
