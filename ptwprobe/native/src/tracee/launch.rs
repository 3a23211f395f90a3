//! Starting a program under our hand, and following it while it maps its objects.

use std::ffi::CString;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::time::{Duration, Instant};

use super::owner::{Goal, Owner, Proc};
use super::spawn::Halt;
use super::{sys, Error, Result};

/// Calls after which other objects may be mapped, or threads be set up.
const MAPPING_CALLS: &[i64] = &[
    libc::SYS_mmap,
    libc::SYS_mprotect,
    libc::SYS_arch_prctl,
    libc::SYS_set_tid_address,
    libc::SYS_set_robust_list,
    libc::SYS_clone,
    libc::SYS_clone3,
];
/// Ignored by Python for itself; a program starts with the defaults.
const RESET: [i32; 2] = [libc::SIGPIPE, libc::SIGXFSZ];
const EXEC_LIMIT: Duration = Duration::from_secs(30);

fn pipe() -> Result<(OwnedFd, OwnedFd)> {
    let mut fds = [0; 2];
    // SAFETY: `fds` takes two descriptors, which are then owned here only.
    unsafe {
        if libc::pipe2(fds.as_mut_ptr(), libc::O_CLOEXEC) < 0 {
            return Err(Error::new("failed", format!("no pipe (errno {})", sys::errno())));
        }
        Ok((OwnedFd::from_raw_fd(fds[0]), OwnedFd::from_raw_fd(fds[1])))
    }
}

fn c_string(text: &[u8]) -> Result<CString> {
    CString::new(text).map_err(|_| Error::new("invalid", "an argument holds a NUL byte"))
}

/// Everything the child needs, made before the fork.
struct Image {
    paths: Vec<CString>,
    argv: Vec<CString>,
    env: Vec<CString>,
    cwd: Option<CString>,
    mask: libc::sigset_t,
}

impl Image {
    fn new(argv: &[Vec<u8>], env: &[Vec<u8>], cwd: Option<&[u8]>, mask: libc::sigset_t) -> Result<Image> {
        let name = argv.first().ok_or_else(|| Error::new("invalid", "no command"))?;
        let mut paths = Vec::new();
        if name.contains(&b'/') {
            paths.push(c_string(name)?);
        } else {
            let path = env.iter().find_map(|e| e.strip_prefix(b"PATH=")).unwrap_or(b"/usr/local/bin:/usr/bin:/bin");
            for folder in path.split(|b| *b == b':') {
                let folder = if folder.is_empty() { b"." } else { folder };
                paths.push(c_string(&[folder, name].join(&b'/'))?);
            }
        }
        let all = |list: &[Vec<u8>]| list.iter().map(|a| c_string(a)).collect::<Result<Vec<_>>>();
        Ok(Image { paths, argv: all(argv)?, env: all(env)?, cwd: cwd.map(c_string).transpose()?, mask })
    }

    /// In the child: wait for the word to go, then become the program. Returns the errno of the failure.
    fn exec(&self, go: i32, argv: &[*const libc::c_char], env: &[*const libc::c_char]) -> i32 {
        // SAFETY: only async-signal-safe calls, on memory that was made before the fork.
        unsafe {
            let mut byte = 0u8;
            if libc::read(go, (&raw mut byte).cast(), 1) != 1 {
                return libc::ECANCELED;
            }
            for signal in RESET {
                libc::signal(signal, libc::SIG_DFL);
            }
            libc::sigprocmask(libc::SIG_SETMASK, &self.mask, std::ptr::null_mut());
            if let Some(cwd) = &self.cwd {
                if libc::chdir(cwd.as_ptr()) < 0 {
                    return sys::errno();
                }
            }
            let mut result = libc::ENOENT;
            for path in &self.paths {
                libc::execve(path.as_ptr(), argv.as_ptr(), env.as_ptr());
                match sys::errno() {
                    libc::ENOENT | libc::ENOTDIR => {}
                    libc::EACCES => result = libc::EACCES,
                    other => return other,
                }
            }
            result
        }
    }
}

impl Owner {
    /// Start a program; it stands still at its first instruction. `env` holds `NAME=value` strings. Returns its pid.
    pub fn launch(&mut self, argv: &[Vec<u8>], env: &[Vec<u8>], cwd: Option<&[u8]>) -> Result<i32> {
        let image = Image::new(argv, env, cwd, self.original_mask)?;
        let null_ended = |list: &[CString]| {
            list.iter().map(|s| s.as_ptr()).chain(std::iter::once(std::ptr::null())).collect::<Vec<_>>()
        };
        let (argv_ptrs, env_ptrs) = (null_ended(&image.argv), null_ended(&image.env));
        let (go_read, go_write) = pipe()?;
        let (error_read, error_write) = pipe()?;
        // SAFETY: a plain fork by the bare system call: glibc's would take locks that another thread of the recorder may
        // hold. The child calls `exec` and `_exit` only.
        let pid = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as i32;
        if pid < 0 {
            return Err(Error::new("failed", format!("cannot fork (errno {})", sys::errno())));
        }
        if pid == 0 {
            // SAFETY: in the child; the parent's ends must close here for `read` to end when the parent dies.
            unsafe {
                libc::close(go_write.as_raw_fd());
                let errno = image.exec(go_read.as_raw_fd(), &argv_ptrs, &env_ptrs);
                libc::write(error_write.as_raw_fd(), (&raw const errno).cast(), size_of::<i32>());
                libc::_exit(127);
            }
        }
        drop((go_read, error_write));
        self.launched.insert(pid);
        self.shared.set_halt(pid, None);
        // SAFETY: the descriptors are owned and handed over.
        let (mut errors, go) = unsafe { (File::from_raw_fd(error_read.into_raw_fd()), go_write) };
        let begun = self.begin_launched(pid, &go);
        let name = String::from_utf8_lossy(argv.first().map_or(&[][..], |a| a));
        let failed = |what: &str| Error::new("exec-failed", format!("cannot run {name}: {what}"));
        if begun.is_err() {
            drop(go);
            return Err(begun.err().unwrap_or_else(|| failed("it was not started")));
        }
        let deadline = Instant::now() + EXEC_LIMIT;
        loop {
            match self.procs.get(&pid) {
                Some(proc) if proc.held => return Ok(pid),
                Some(_) => {}
                None => {
                    self.statuses.remove(&pid);
                    self.shared.set_halt(pid, None);
                    let mut errno = [0u8; 4];
                    let told = errors.read_exact(&mut errno).is_ok();
                    let why = std::io::Error::from_raw_os_error(i32::from_ne_bytes(errno)).to_string();
                    return Err(failed(if told { &why } else { "it ended before its first instruction" }));
                }
            }
            match self.next_report(deadline) {
                Some((tid, status)) => self.dispatch(tid, status),
                None => return Err(failed("it does not start")),
            }
        }
    }

    fn begin_launched(&mut self, pid: i32, go: &OwnedFd) -> Result<()> {
        sys::seize(pid).map_err(|e| Error::os(pid, "seizing the new process", e))?;
        let mut proc = Proc::new();
        proc.complete = true;
        proc.stepping = true;
        self.procs.insert(pid, proc);
        self.add_thread(pid, pid);
        // SAFETY: one byte of a static string.
        let sent = unsafe { libc::write(go.as_raw_fd(), c"g".as_ptr().cast(), 1) };
        if sent == 1 {
            Ok(())
        } else {
            Err(Error::gone(pid))
        }
    }

    /// Let a standing process run to its next change of mappings; `wait_halt` of the handle tells when it is there.
    pub fn step(&mut self, pid: i32) -> Result<()> {
        let shared = self.shared.clone();
        if self.statuses.contains_key(&pid) {
            // Ended: the halt that says so is set.
            return Ok(());
        }
        let proc = self.proc(pid)?;
        proc.stepping = true;
        if proc.held {
            proc.held = false;
            shared.set_halt(pid, None);
            self.go(pid);
        }
        Ok(())
    }

    /// Run on without looking at system calls.
    pub fn resume(&mut self, pid: i32) -> Result<()> {
        let shared = self.shared.clone();
        let proc = self.proc(pid)?;
        proc.stepping = false;
        proc.announce = None;
        if proc.held {
            proc.held = false;
            shared.set_halt(pid, None);
        }
        self.go(pid);
        Ok(())
    }

    /// Exit code of a launched process, or the negative number of the signal that killed it; None while it runs.
    pub fn exit_status(&self, pid: i32) -> Result<Option<i32>> {
        match self.statuses.get(&pid) {
            Some(s) if libc::WIFEXITED(*s) => Ok(Some(libc::WEXITSTATUS(*s))),
            Some(s) => Ok(Some(-libc::WTERMSIG(*s))),
            None if self.launched.contains(&pid) => Ok(None),
            None => Err(Error::gone(pid)),
        }
    }

    /// Kill a launched process that has not ended.
    pub fn kill_launched(&mut self, pid: i32) -> Result<()> {
        if self.launched.contains(&pid) {
            // SAFETY: numbers only; the process is our child and not collected, so the pid is its own.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            return Ok(());
        }
        Err(Error::gone(pid))
    }

    pub(super) fn on_syscall_stop(&mut self, pid: i32, tid: i32) {
        let mapped = sys::is_syscall_exit(tid) == Ok(true)
            && sys::get_regs(tid).is_ok_and(|r| MAPPING_CALLS.contains(&(r.orig_rax as i64)) && (r.rax as i64) >= 0);
        if let Some(proc) = self.procs.get_mut(&pid).filter(|p| mapped && p.stepping && p.goal == Goal::Run) {
            proc.goal = Goal::Stop;
            proc.announce = Some(Halt::Mapped);
            for (other, thread) in &mut proc.threads {
                if *other != tid && !thread.is_stopped() && !thread.sibling {
                    thread.interrupted = sys::interrupt(*other).is_ok();
                }
            }
        }
        self.send_on(pid, tid, 0);
    }
}
