//! What this CPU and kernel can do, found out at run time.

use std::arch::x86_64::{__cpuid, __cpuid_count};

/// The features that decide which stub is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Features {
    /// `rdpid` (CPUID.7.0:ECX[22]).
    pub rdpid: bool,
    /// `rdtscp` (CPUID.80000001:EDX[27]).
    pub rdtscp: bool,
    /// `rdfsbase` is enabled for user mode (AT_HWCAP2 bit 1).
    pub fsgsbase: bool,
    /// PTWRITE into Intel PT (CPUID.14.0:EBX[4]); the instruction itself may execute without it.
    pub ptwrite_cpuid: bool,
    /// The TSC runs at one rate in all states (CPUID.80000007:EDX[8]).
    pub invariant_tsc: bool,
}

impl Features {
    pub fn detect() -> Self {
        let max = __cpuid(0).eax;
        let max_ext = __cpuid(0x8000_0000).eax;
        let ext1 = if max_ext >= 0x8000_0001 { __cpuid(0x8000_0001).edx } else { 0 };
        let ext7 = if max_ext >= 0x8000_0007 { __cpuid(0x8000_0007).edx } else { 0 };
        let leaf7 = if max >= 7 { __cpuid_count(7, 0) } else { __cpuid(0) };
        let has_pt = max >= 0x14 && leaf7.ebx & (1 << 25) != 0;
        // SAFETY: getauxval only reads the process's auxiliary vector.
        let hwcap2 = unsafe { libc::getauxval(libc::AT_HWCAP2) };
        Features {
            rdpid: max >= 7 && leaf7.ecx & (1 << 22) != 0,
            rdtscp: ext1 & (1 << 27) != 0,
            fsgsbase: hwcap2 & 2 != 0,
            ptwrite_cpuid: has_pt && __cpuid_count(0x14, 0).ebx & (1 << 4) != 0,
            invariant_tsc: ext7 & (1 << 8) != 0,
        }
    }
}

/// Whether `ptwrite` executes here (as a no-op or into a trace) rather than raising #UD: a forked child tries it.
pub fn ptwrite_executes() -> bool {
    // SAFETY: between fork and _exit the child only resets one signal, executes one instruction and leaves.
    unsafe {
        let pid = libc::fork();
        if pid < 0 {
            return false;
        }
        if pid == 0 {
            libc::signal(libc::SIGILL, libc::SIG_DFL);
            let limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
            libc::setrlimit(libc::RLIMIT_CORE, &limit);
            std::arch::asm!(".byte 0xf3, 0x48, 0x0f, 0xae, 0xe0", in("rax") 0u64); // ptwrite rax
            libc::_exit(0);
        }
        let mut status = 0;
        while libc::waitpid(pid, &mut status, 0) < 0 {
            if *libc::__errno_location() != libc::EINTR {
                return false;
            }
        }
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
    }
}
