//! What the sideband tells about threads, up to a moment.

use super::quick::QuickMap;
use crate::perfdata::{Body, Comm, Mmap, Record, Runs, Task};

/// The kernel's `PID_MAX_LIMIT`: larger ids are no threads.
const MAX_TID: u32 = 1 << 22;

#[derive(Clone, Copy, Debug, Default)]
pub struct Thread {
    pub pid: Option<u32>,
    pub cpu: Option<u32>,
    pub comm: Comm,
}

#[derive(Debug, Default)]
pub struct Threads {
    by_tid: QuickMap<u32, Thread>,
    running: QuickMap<u32, u32>,
}

static UNKNOWN: Thread = Thread { pid: None, cpu: None, comm: Comm::EMPTY };

impl Threads {
    #[must_use]
    pub fn get(&self, tid: u32) -> &Thread {
        self.by_tid.get(&tid).unwrap_or(&UNKNOWN)
    }

    /// The thread that runs on `cpu`.
    #[must_use]
    pub fn running(&self, cpu: u32) -> Option<u32> {
        self.running.get(&cpu).copied()
    }

    pub fn apply(&mut self, record: &Record) {
        match record.body {
            Body::Comm { pid, tid, comm, .. } => {
                if let Some(thread) = self.thread(tid) {
                    thread.pid = Some(pid);
                    thread.comm = comm;
                }
            }
            Body::Mmap(Mmap { pid, tid, .. }) | Body::Exit(Task { pid, tid, .. }) => {
                if let Some(thread) = self.thread(tid) {
                    thread.pid = Some(pid);
                }
            }
            Body::Fork(Task { pid, tid, parent_tid, .. }) => {
                let comm = self.get(parent_tid).comm;
                if let Some(thread) = self.thread(tid) {
                    thread.pid = Some(pid);
                    thread.comm = comm;
                }
            }
            _ => {}
        }
        if let Some(runs) = record.runs() {
            self.switch(runs);
        }
    }

    fn switch(&mut self, Runs { cpu, pid, tid }: Runs) {
        let cpu = cpu.filter(|&cpu| cpu < MAX_TID);
        let Some(tid) = tid else {
            // Somebody else, or nobody.
            if let Some(cpu) = cpu {
                self.running.remove(&cpu);
            }
            return;
        };
        if let Some(thread) = self.thread(tid) {
            thread.cpu = cpu;
            thread.pid = pid.or(thread.pid);
        }
        if let Some(cpu) = cpu {
            self.running.insert(cpu, tid);
        }
    }

    fn thread(&mut self, tid: u32) -> Option<&mut Thread> {
        (tid <= MAX_TID).then(|| self.by_tid.entry(tid).or_default())
    }
}
