//! Numbers of the format, in one place for the writer and the reader.

/// "PERFILE2", little-endian.
pub const MAGIC: u64 = u64::from_le_bytes(*b"PERFILE2");
pub const HEADER_LEN: u64 = 104;
/// Of a file that was written to a pipe.
pub const PIPE_HEADER_LEN: u64 = 16;
/// Offsets in the file header.
pub const HEADER_DATA_SIZE: u64 = 48;
pub const HEADER_FEATURES: u64 = 72;

/// `PERF_ATTR_SIZE_VER7`, which perf 6.1 writes itself.
pub const ATTR_LEN: usize = 128;

/// `type`, `misc`, `size` in front of each record.
pub const RECORD_HEADER_LEN: usize = 8;

pub mod record {
    pub const MMAP: u32 = 1;
    pub const LOST: u32 = 2;
    pub const COMM: u32 = 3;
    pub const EXIT: u32 = 4;
    pub const FORK: u32 = 7;
    pub const SAMPLE: u32 = 9;
    pub const MMAP2: u32 = 10;
    pub const AUX: u32 = 11;
    pub const ITRACE_START: u32 = 12;
    pub const LOST_SAMPLES: u32 = 13;
    pub const SWITCH: u32 = 14;
    pub const SWITCH_CPU_WIDE: u32 = 15;
    pub const KSYMBOL: u32 = 17;
    pub const TEXT_POKE: u32 = 20;
    pub const AUX_OUTPUT_HW_ID: u32 = 21;
    /// Records below are the kernel's and may end in a sample id.
    pub const USER_TYPE_START: u32 = 64;
    pub const HEADER_ATTR: u32 = 64;
    /// Its `size` does not count the data behind it.
    pub const TRACING_DATA: u32 = 66;
    pub const FINISHED_ROUND: u32 = 68;
    pub const AUXTRACE_INFO: u32 = 70;
    pub const AUXTRACE: u32 = 71;
    pub const AUXTRACE_ERROR: u32 = 72;
    pub const TIME_CONV: u32 = 79;
    pub const HEADER_BUILD_ID: u32 = 67;
    pub const HEADER_FEATURE: u32 = 80;
    pub const COMPRESSED: u32 = 81;
    pub const COMPRESSED2: u32 = 83;
    /// Beyond all that perf writes, with room for what it may yet.
    pub const MAX_TYPE: u32 = 255;
}

pub mod misc {
    pub const CPUMODE_MASK: u16 = 7;
    pub const USER: u16 = 2;
    pub const MMAP_DATA: u16 = 1 << 13;
    pub const COMM_EXEC: u16 = 1 << 13;
    pub const SWITCH_OUT: u16 = 1 << 13;
    pub const MMAP_BUILD_ID: u16 = 1 << 14;
    pub const FORK_EXEC: u16 = 1 << 13;
    pub const BUILD_ID_SIZE: u16 = 1 << 15;
    /// Of the flags in a KSYMBOL.
    pub const KSYMBOL_UNREGISTER: u16 = 1;
}

/// `PERF_TYPE_*`.
pub mod event_type {
    pub const TRACEPOINT: u32 = 2;
}

/// Where the raw data of the tracepoint `sched:sched_switch` hold the threads.
pub mod sched_switch {
    pub const PREV_PID: usize = 24;
    pub const NEXT_PID: usize = 56;
}

/// `sample_type` bits. A sample id holds TID, TIME, ID, STREAM_ID, CPU and IDENTIFIER, in this order.
pub mod sample {
    pub const IP: u64 = 1;
    pub const TID: u64 = 1 << 1;
    pub const TIME: u64 = 1 << 2;
    pub const ADDR: u64 = 1 << 3;
    pub const READ: u64 = 1 << 4;
    pub const CALLCHAIN: u64 = 1 << 5;
    pub const ID: u64 = 1 << 6;
    pub const CPU: u64 = 1 << 7;
    pub const PERIOD: u64 = 1 << 8;
    pub const STREAM_ID: u64 = 1 << 9;
    pub const RAW: u64 = 1 << 10;
    pub const BRANCH_STACK: u64 = 1 << 11;
    pub const REGS_USER: u64 = 1 << 12;
    pub const STACK_USER: u64 = 1 << 13;
    pub const WEIGHT: u64 = 1 << 14;
    pub const DATA_SRC: u64 = 1 << 15;
    pub const IDENTIFIER: u64 = 1 << 16;
    pub const TRANSACTION: u64 = 1 << 17;
    pub const REGS_INTR: u64 = 1 << 18;
    pub const PHYS_ADDR: u64 = 1 << 19;
    pub const AUX: u64 = 1 << 20;
    pub const CGROUP: u64 = 1 << 21;
    pub const DATA_PAGE_SIZE: u64 = 1 << 22;
    pub const CODE_PAGE_SIZE: u64 = 1 << 23;
    pub const WEIGHT_STRUCT: u64 = 1 << 24;
}

/// `read_format` bits.
pub mod read_format {
    pub const TOTAL_TIME_ENABLED: u64 = 1;
    pub const TOTAL_TIME_RUNNING: u64 = 1 << 1;
    pub const ID: u64 = 1 << 2;
    pub const GROUP: u64 = 1 << 3;
    pub const LOST: u64 = 1 << 4;
}

/// `branch_sample_type` bits that add to a branch stack.
pub const BRANCH_HW_INDEX: u64 = 1 << 17;
pub const BRANCH_COUNTERS: u64 = 1 << 19;

/// Flags of `perf_event_attr`.
pub mod attr_flag {
    pub const DISABLED: u64 = 1;
    pub const EXCLUDE_USER: u64 = 1 << 4;
    pub const EXCLUDE_KERNEL: u64 = 1 << 5;
    pub const EXCLUDE_HV: u64 = 1 << 6;
    pub const MMAP: u64 = 1 << 8;
    pub const COMM: u64 = 1 << 9;
    pub const TASK: u64 = 1 << 13;
    pub const SAMPLE_ID_ALL: u64 = 1 << 18;
    pub const MMAP2: u64 = 1 << 23;
    pub const COMM_EXEC: u64 = 1 << 24;
    pub const CONTEXT_SWITCH: u64 = 1 << 26;
    pub const BUILD_ID: u64 = 1 << 34;
}

/// `config` bits of the Intel PT PMU, as its `format/` folder tells them.
pub mod pt_config {
    pub const PT: u64 = 1;
    pub const CYC: u64 = 1 << 1;
    pub const PWR_EVT: u64 = 1 << 4;
    pub const FUP_ON_PTW: u64 = 1 << 5;
    pub const MTC: u64 = 1 << 9;
    pub const TSC: u64 = 1 << 10;
    pub const NORETCOMP: u64 = 1 << 11;
    pub const PTW: u64 = 1 << 12;
    pub const BRANCH: u64 = 1 << 13;
    pub const MTC_PERIOD: u64 = 0xf << 14;
    pub const CYC_THRESH_SHIFT: u32 = 19;
    pub const EVENT: u64 = 1 << 31;
    pub const NOTNT: u64 = 1 << 55;
}

/// `type` of an AUXTRACE_INFO record.
pub const AUXTRACE_INTEL_PT: u32 = 1;
/// Words of an AUXTRACE_INFO record of Intel PT that we write, and where the time factors are among them.
pub const INFO_WORDS: usize = 18;
pub const INFO_TIME_SHIFT: usize = 1;

/// The record itself; the trace that follows is not in its `size`.
pub const AUXTRACE_LEN: usize = 48;

/// `PERF_RECORD_LOST` and the others are the dummy event's.
pub const PT_EVENT_ID: u64 = 1;
pub const DUMMY_EVENT_ID: u64 = 2;
