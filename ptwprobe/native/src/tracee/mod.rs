//! Live processes under our hand: stopping them, calls inside them, changes of their code, faults of our stubs.
//!
//! One *owner* does all tracing; everybody else hands it commands and waits. The owner is a task of its own that shares
//! our memory and files but is not a thread of ours (`clone` with CLONE_VM, without CLONE_THREAD): it has its own
//! SIGCHLD, so that waiting with a limit needs no tricks, and it outlives us: when the recorder is killed at any moment,
//! the owner closes the gates, takes the patches out, lets the targets go and ends.
//! A target never sees a stop of ours: no SIGSTOP, no SIGTRAP, no interrupted system call.

mod attach;
mod borrow;
mod calls;
mod collect;
mod copies;
mod dispositions;
mod faults;
mod frame;
mod gadgets;
mod gate;
mod launch;
mod lazy;
mod leaving;
mod orphan;
mod owner;
mod pages;
mod plan;
mod procfs;
mod remote;
mod reports;
mod scan;
mod siblings;
mod spawn;
mod standing;
mod stop;
mod sys;
mod timeouts;

use std::fmt;

pub use faults::Load;
pub use leaving::Mapped;
pub use owner::Owner;
pub use pages::{Exchange, Switch};
pub use plan::{Change, Site};
pub use remote::{Arg, Asked, Call, OPEN_HERE};
pub use scan::ThreadState;
pub use spawn::{Event, EventKind, Halt, Handle};
pub use standing::Terms;
pub use sys::shares_memory as share_memory;

/// What went wrong: a stable word, a sentence, and the address that it is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    pub kind: &'static str,
    pub message: String,
    pub addr: Option<u64>,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub fn new(kind: &'static str, message: impl Into<String>) -> Self {
        Error { kind, message: message.into(), addr: None }
    }

    pub fn at(mut self, addr: u64) -> Self {
        self.addr = Some(addr);
        self
    }

    pub fn gone(pid: i32) -> Self {
        Error::new("gone", format!("process {pid} is gone"))
    }

    /// An errno of a call on `pid`; "no such process" is "gone".
    fn os(pid: i32, what: &str, errno: sys::Errno) -> Self {
        if errno == libc::ESRCH {
            return Error::gone(pid);
        }
        Error::new("failed", format!("{what} of process {pid}: {}", std::io::Error::from_raw_os_error(errno)))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.message)
    }
}

impl std::error::Error for Error {}
