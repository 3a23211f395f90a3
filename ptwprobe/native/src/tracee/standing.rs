//! What the one stop of a change is used for besides the change: the thread ids that stubs will read are compared, and
//! when the last patch has come out, who is still in the stubs.

use std::collections::HashMap;

use super::lazy::Lazy;
use super::owner::Owner;
use super::plan::Site;
use super::procfs;
use super::scan::{Ranges, Scanner};
use super::{sys, Error, Result};

/// How a change is to be made.
#[derive(Debug, Default, Clone, Copy)]
pub struct Terms {
    /// Any word on a stack that points into a window refuses (for windows that hold a call), not only signal frames.
    pub all_words: bool,
    /// Where, from the base of its thread-local storage, every thread must have its id.
    pub thread_id_offset: Option<u64>,
    /// End the tracing of the process with the stop, rather than with another one.
    pub release: bool,
}

/// Made ready before the target stops.
pub(super) struct Standing {
    thread_ids: Option<(u64, ThreadIds)>,
    leaving: Option<(Ranges, Scanner)>,
}

/// The ids that threads have of themselves.
enum ThreadIds {
    /// The process is in our PID namespace.
    Ours,
    /// tid → id, of the threads that there were.
    Theirs(HashMap<i32, i32>),
}

impl ThreadIds {
    fn new(pid: i32) -> ThreadIds {
        if procfs::innermost_tid(pid) == Some(pid) {
            return ThreadIds::Ours;
        }
        let known = procfs::tasks(pid).unwrap_or_default().into_iter();
        ThreadIds::Theirs(known.filter_map(|tid| Some((tid, procfs::innermost_tid(tid)?))).collect())
    }

    fn of(&self, tid: i32) -> Option<i32> {
        match self {
            ThreadIds::Ours => Some(tid),
            ThreadIds::Theirs(known) => known.get(&tid).copied().or_else(|| procfs::innermost_tid(tid)),
        }
    }
}

impl Owner {
    /// Before the stop of a change of `sites`.
    pub(super) fn prepare_standing(&mut self, pid: i32, sites: &[&Site], terms: &Terms) -> Result<Standing> {
        self.prepare_calls(pid);
        self.lazy.remove(&pid);
        self.lazy.extend(Lazy::of(pid).map(|lazy| (pid, lazy)));
        let installed = self.installed.get(&pid);
        let comes_out = |i: &Site| {
            let at = sites.partition_point(|s| s.addr < i.addr);
            sites.get(at).is_some_and(|s| s.addr == i.addr && s.new == i.new)
        };
        let empties = installed.is_some_and(|sites| !sites.is_empty() && sites.values().all(comes_out));
        let mapped = self.mapped.get(&pid).filter(|_| empties);
        let leaving = match mapped {
            Some(mapped) => Some((mapped.ranges(), Scanner::new(pid)?)),
            None => None,
        };
        let thread_ids = terms.thread_id_offset.map(|offset| (offset, ThreadIds::new(pid)));
        Ok(Standing { thread_ids, leaving })
    }

    /// In the stop, before anything is changed.
    pub(super) fn check_standing(&mut self, pid: i32, standing: &Standing) -> Result<()> {
        self.is_same_program(pid)?;
        let Some((offset, ids)) = &standing.thread_ids else {
            return Ok(());
        };
        for (tid, thread) in self.proc(pid)?.threads.iter().filter(|(_, t)| t.is_stopped() && !t.sibling) {
            let mut found = [0u8; 4];
            let read = sys::read_memory(*tid, thread.regs.fs_base.wrapping_add(*offset), &mut found) == found.len();
            if !read || ids.of(*tid) != Some(i32::from_le_bytes(found)) {
                let why =
                    format!("thread {tid} of process {pid} does not have its id at {offset:#x} of its own storage");
                return Err(Error::new("thread-ids", why));
            }
        }
        Ok(())
    }

    /// In the stop, when the change is made.
    pub(super) fn look_standing(&mut self, pid: i32, standing: &mut Standing) -> Result<()> {
        self.inside.remove(&pid);
        if let Some((ranges, scanner)) = &mut standing.leaving {
            let inside = self.look_inside(pid, ranges, scanner)?;
            self.inside.insert(pid, inside);
        }
        Ok(())
    }
}
