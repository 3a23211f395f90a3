//! What /proc says about a process: its tasks, their state and masks, its mappings.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;

use super::Error;

/// PF_IO_WORKER and PF_USER_WORKER (linux/sched.h) of the flags in proc_pid_stat(5).
const KERNELS_WORKER: u64 = 0x10 | 0x4000;
/// Bytes of a folder's entries that are read at a time.
const ENTRIES: usize = 32 << 10;

/// The fields of /proc/PID/status that tracing needs. Signal sets have bit N-1 for signal N.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Status {
    pub name: String,
    pub state: char,
    pub tgid: i32,
    pub tracer: i32,
    pub uid: u32,
    pub seccomp: u32,
    pub pending: u64,
    pub blocked: u64,
    pub ignored: u64,
    pub caught: u64,
    pub has_memory: bool,
    /// The thread keeps its return addresses on a shadow stack too (Documentation/arch/x86/shstk.rst): its registers can be
    /// changed, but a signal frame that we wrote would not return, since it needs a token there.
    pub has_shadow_stack: bool,
}

impl Status {
    /// Of any task, by its tid; None when it is gone.
    pub fn read(tid: i32) -> Option<Status> {
        Some(Status::parse(&fs::read_to_string(format!("/proc/{tid}/status")).ok()?))
    }

    fn parse(text: &str) -> Status {
        let mut out = Status { state: '?', ..Status::default() };
        for line in text.lines() {
            let Some((key, value)) = line.split_once(':') else {
                continue;
            };
            let value = value.trim();
            let hex = || u64::from_str_radix(value, 16).unwrap_or(0);
            match key {
                "Name" => out.name = value.to_owned(),
                "State" => out.state = value.chars().next().unwrap_or('?'),
                "Tgid" => out.tgid = value.parse().unwrap_or(0),
                "TracerPid" => out.tracer = value.parse().unwrap_or(0),
                "Uid" => out.uid = value.split_whitespace().next().and_then(|v| v.parse().ok()).unwrap_or(0),
                "Seccomp" => out.seccomp = value.parse().unwrap_or(0),
                "SigPnd" | "ShdPnd" => out.pending |= hex(),
                "SigBlk" => out.blocked = hex(),
                "SigIgn" => out.ignored = hex(),
                "SigCgt" => out.caught = hex(),
                "VmSize" => out.has_memory = true,
                "x86_Thread_features" => out.has_shadow_stack = value.split_whitespace().any(|v| v == "shstk"),
                _ => {}
            }
        }
        out
    }

    /// A task that ended and only waits to be collected.
    pub fn is_dead(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }

    /// Whether the program ignores `signal`, by its own wish or by default (signal(7)).
    pub fn ignores(&self, signal: i32) -> bool {
        let bit = bit(signal);
        let default_ignored = matches!(signal, libc::SIGCHLD | libc::SIGURG | libc::SIGWINCH | libc::SIGCONT);
        self.ignored & bit != 0 || default_ignored && self.caught & bit == 0
    }
}

/// The bit of a signal in a kernel signal set.
pub fn bit(signal: i32) -> u64 {
    u32::try_from(signal - 1).ok().and_then(|n| 1u64.checked_shl(n)).unwrap_or(0)
}

/// What a task does, as the letter of proc_pid_stat(5); None when it is gone.
pub fn run_state(tid: i32) -> Option<char> {
    stat(tid).map(|(state, _)| state)
}

/// Whether a thread is one that the kernel has made to work for the process (io_uring, vhost). It never executes the
/// program's code, and does not stop like one that does.
pub fn is_kernels_worker(tid: i32) -> bool {
    stat(tid).is_some_and(|(_, flags)| flags & KERNELS_WORKER != 0)
}

fn stat(tid: i32) -> Option<(char, u64)> {
    parse_stat(&fs::read_to_string(format!("/proc/{tid}/stat")).ok()?)
}

/// State and flags; the name before them may have blanks and brackets.
fn parse_stat(text: &str) -> Option<(char, u64)> {
    let mut fields = text.get(text.rfind(')')? + 1..)?.split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(5)?.parse().ok()?))
}

/// The id that a task has in its own PID namespace.
pub fn innermost_tid(tid: i32) -> Option<i32> {
    let status = fs::read(format!("/proc/{tid}/status")).ok()?;
    let line = status.split(|b| *b == b'\n').find_map(|line| line.strip_prefix(b"NSpid:"))?;
    std::str::from_utf8(line).ok()?.split_whitespace().last()?.parse().ok()
}

/// The tids of a process; an error when there is no such process.
pub fn tasks(pid: i32) -> Result<Vec<i32>, Error> {
    let names = names(&format!("/proc/{pid}/task")).map_err(|_| Error::gone(pid))?;
    Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
}

/// The names of what is in a folder. Not by opendir, which takes memory from the system's allocator (`heap`).
pub fn names(folder: &str) -> io::Result<Vec<String>> {
    let folder = File::open(folder)?;
    let mut names = Vec::new();
    let mut entries = vec![0u8; ENTRIES];
    loop {
        // SAFETY: the buffer is valid for its length.
        let got =
            unsafe { libc::syscall(libc::SYS_getdents64, folder.as_raw_fd(), entries.as_mut_ptr(), entries.len()) };
        let got = usize::try_from(got).map_err(|_| io::Error::last_os_error())?;
        if got == 0 {
            return Ok(names);
        }
        let mut left = entries.get(..got).unwrap_or_default();
        // getdents64(2): inode and offset, 8 bytes each, the length of the entry, 2 bytes, its type, and the name.
        while let Some([low, high]) = left.get(16..18) {
            let length = usize::from(u16::from_ne_bytes([*low, *high]));
            let name = left.get(19..length).unwrap_or_default().split(|byte| *byte == 0).next().unwrap_or_default();
            names.push(String::from_utf8_lossy(name).into_owned());
            left = left.get(length.max(1)..).unwrap_or_default();
        }
    }
}

/// How the memfds begin that take the place of code; the name tells, last but one, where the file's pages are meanwhile.
const CODE_NAME: &str = "/memfd:ptwprobe-code:";

/// One line of /proc/PID/maps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    pub start: u64,
    pub end: u64,
    /// Code of the program, or of ours. Pages that wait aside while a copy of ours is in their place are none.
    pub executable: bool,
    pub name: String,
}

/// Of the process of any task, by its tid.
pub fn maps(pid: i32) -> Result<Vec<Mapping>, Error> {
    let text = fs::read(format!("/proc/{pid}/maps")).map_err(|_| Error::gone(pid))?;
    let mut maps: Vec<Mapping> = String::from_utf8_lossy(&text).lines().filter_map(parse_mapping).collect();
    for aside in maps.iter().filter_map(aside).collect::<Vec<_>>() {
        maps.iter_mut().filter(|m| (m.start..m.end).contains(&aside)).for_each(|m| m.executable = false);
    }
    Ok(maps)
}

/// Where the first page is that a copy of ours stands for.
fn aside(mapping: &Mapping) -> Option<u64> {
    let delta = mapping.name.strip_prefix(CODE_NAME)?.split(':').nth(3)?;
    let delta = i64::from_str_radix(delta, 16).ok()?;
    Some(mapping.start.wrapping_add_signed(delta))
}

fn parse_mapping(line: &str) -> Option<Mapping> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let executable = words.next()?.contains('x');
    let name = words.nth(3).unwrap_or("").trim_start().to_owned();
    let hex = |v| u64::from_str_radix(v, 16).ok();
    Some(Mapping { start: hex(start)?, end: hex(end)?, executable, name })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_fields() {
        let s = Status::parse(
            "Name:\tx y\nState:\tS (sleeping)\nTgid:\t7\nTracerPid:\t0\nUid:\t5\t6\t7\t8\nSeccomp:\t2\n\
             SigPnd:\t0000000000000001\nShdPnd:\t0000000000004000\nSigBlk:\t0000000000000001\n\
             SigIgn:\t0000000000001000\nSigCgt:\t0000000000004000\nVmSize:\t 1 kB\n",
        );
        assert_eq!((s.name.as_str(), s.state, s.tgid, s.uid, s.seccomp), ("x y", 'S', 7, 5, 2));
        assert!(s.has_memory && !s.is_dead());
        assert!(s.ignores(13) && s.ignores(libc::SIGCHLD) && !s.ignores(15));
    }

    #[test]
    fn state_and_flags_behind_any_name() {
        let text = "17 (a) R (b) S 1 17 17 0 -1 4194320 0 0\n";
        let parsed = parse_stat(text);
        assert_eq!(parsed, Some(('S', 4194320)));
        assert!(parsed.is_some_and(|(_, flags)| flags & KERNELS_WORKER != 0));
        assert!(!is_kernels_worker(std::process::id() as i32));
        assert_eq!(parse_stat("17 (a"), None);
    }

    #[test]
    fn shadow_stack_of_a_thread() {
        let has = |text: &str| Status::parse(text).has_shadow_stack;
        assert!(has("Name:\tx\nx86_Thread_features:\tshstk wrss \nx86_Thread_features_locked:\tshstk\n"));
        assert!(!has("x86_Thread_features:\t\nx86_Thread_features_locked:\tshstk wrss\n") && !has("Name:\tshstk\n"));
    }

    #[test]
    fn mapping_lines() {
        let m = parse_mapping("7f00-8000 r-xp 00000000 08:01 12    /lib/a b (deleted)").expect("parses");
        assert_eq!((m.start, m.end, m.executable, m.name.as_str()), (0x7f00, 0x8000, true, "/lib/a b (deleted)"));
        assert_eq!(parse_mapping("zz"), None);
        assert_eq!(parse_mapping("1000-2000 rw-p 0 0:0 0").map(|m| m.name), Some(String::new()));
    }

    #[test]
    fn a_copy_tells_where_the_pages_are_that_it_stands_for() {
        let m = parse_mapping("8000-9000 r-xp 00001000 00:01 5 /memfd:ptwprobe-code:fe:0:7:-1000:/a:b (deleted)");
        assert_eq!(m.as_ref().and_then(aside), Some(0x7000));
        assert_eq!(parse_mapping("8000-9000 r-xp 00001000 fe:00 5 /a").as_ref().and_then(aside), None);
    }

    #[test]
    fn own_tasks_and_maps() {
        let pid = std::process::id() as i32;
        assert!(tasks(pid).expect("own tasks").contains(&pid));
        assert!(maps(pid).expect("own maps").iter().any(|m| m.name == "[vdso]" && m.executable));
    }
}
