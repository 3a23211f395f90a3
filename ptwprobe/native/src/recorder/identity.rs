//! Who a thread word of a record stands for: the tid as this process sees it, and the thread's name.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

/// The kernel's largest tid (PID_MAX_LIMIT); a larger thread word is an fs base.
const MAX_TID: u64 = 1 << 22;

/// Names the threads of one target. Reads /proc once per thread.
#[derive(Debug)]
pub struct Identity {
    pid: i32,
    comm: Vec<u8>,
    /// The target numbers its threads in a pid namespace that is not ours.
    foreign_namespace: bool,
    /// (tid in the target's namespace, or fs base) to our tid.
    known: HashMap<u64, i32>,
}

/// A thread as it goes into the trace.
#[derive(Debug, PartialEq, Eq)]
pub struct Named {
    pub tid: i32,
    pub comm: Vec<u8>,
    /// False where the thread could not be told and the process stands for it.
    pub certain: bool,
}

impl Identity {
    pub fn new(pid: i32, comm: Vec<u8>) -> Self {
        let ours = fs::read_link("/proc/self/ns/pid");
        let theirs = fs::read_link(format!("/proc/{pid}/ns/pid"));
        let foreign_namespace = matches!((ours, theirs), (Ok(a), Ok(b)) if a != b);
        Identity { pid, comm, foreign_namespace, known: HashMap::new() }
    }

    /// `fs_base` is thread `tid` (as we see it).
    pub fn set_thread(&mut self, fs_base: u64, tid: i32) {
        self.known.insert(fs_base, tid);
    }

    pub fn name(&mut self, word: u64) -> Named {
        let tid = self.known.get(&word).copied().or_else(|| match i32::try_from(word) {
            Ok(tid) if tid > 0 && word <= MAX_TID => self.own_tid(tid),
            _ => None,
        });
        let pid = self.pid;
        let comm = fs::read(format!("/proc/{pid}/task/{}/comm", tid.unwrap_or(pid)));
        let comm = match comm {
            Ok(text) => text.trim_ascii_end().to_vec(),
            Err(_) => self.comm.clone(),
        };
        Named { tid: tid.unwrap_or(pid), comm, certain: tid.is_some() }
    }

    /// Our number for the thread that is `tid` in the target's namespace.
    fn own_tid(&mut self, tid: i32) -> Option<i32> {
        if self.foreign_namespace {
            self.scan_namespace();
            return self.known.get(&u64::from(tid.unsigned_abs())).copied();
        }
        // A thread may be gone by now; but a live one of another process is not one of the target's.
        let own = Path::new(&format!("/proc/{}/task/{tid}", self.pid)).exists();
        let foreign = !own && Path::new(&format!("/proc/{tid}")).exists();
        (!foreign).then_some(tid)
    }

    fn scan_namespace(&mut self) {
        let Ok(tasks) = fs::read_dir(format!("/proc/{}/task", self.pid)) else { return };
        for task in tasks.flatten() {
            let Ok(status) = fs::read_to_string(task.path().join("status")) else { continue };
            if let Some((outer, inner)) = namespace_tids(&status) {
                self.known.insert(inner, outer);
            }
        }
    }
}

/// First (ours) and last (its own) number of the `NSpid:` line of a status file.
fn namespace_tids(status: &str) -> Option<(i32, u64)> {
    let mut numbers = status.lines().find_map(|l| l.strip_prefix("NSpid:"))?.split_whitespace();
    let outer = numbers.next()?;
    Some((outer.parse().ok()?, numbers.last().unwrap_or(outer).parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_of_ours_has_its_own_name() {
        let (tx, rx) = std::sync::mpsc::channel();
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::Builder::new().name("some-name".into()).spawn(move || {
            // SAFETY: no arguments, no memory.
            tx.send(unsafe { libc::gettid() }).unwrap();
            let _ = wait.recv();
        });
        let tid = rx.recv().unwrap();
        let mut identity = Identity::new(std::process::id() as i32, b"process".to_vec());
        let named = identity.name(tid as u64);
        assert_eq!(named, Named { tid, comm: b"some-name".to_vec(), certain: true });
        identity.set_thread(0x7f00_0000_1000, tid);
        assert_eq!(identity.name(0x7f00_0000_1000), named);
        drop(done);
        thread.unwrap().join().unwrap();
    }

    #[test]
    fn what_cannot_be_a_thread_of_the_target_is_its_process() {
        let pid = std::process::id() as i32;
        let mut identity = Identity::new(pid, b"process".to_vec());
        for word in [0, 1, MAX_TID + 1, 0x7f00_0000_1000, u64::MAX] {
            let named = identity.name(word);
            assert_eq!((named.tid, named.certain), (pid, false), "{word:#x}");
        }
    }

    #[test]
    fn nspid_gives_the_outermost_and_the_innermost_number() {
        assert_eq!(namespace_tids("Name:\tx\nNSpid:\t4711\t20\t3\n"), Some((4711, 3)));
        assert_eq!(namespace_tids("NSpid:\t12\n"), Some((12, 12)));
        assert_eq!(namespace_tids("Name:\tx\n"), None);
        assert_eq!(namespace_tids("NSpid:\tno\n"), None);
    }
}
