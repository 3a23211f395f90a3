"""``ptwprobe doctor``: what works on this machine, what does not, and the remedy for it.

Every check looks at the real thing (it traces a child, seals a memfd, assembles an instruction) rather than at a
version number. Folders of the kernel are parameters, so that tests can stand in for hardware.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import json
import mmap
import os
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from ptwprobe import _native
from ptwprobe.errors import PermissionDeniedError, UnsupportedError
from ptwprobe.patch import runfolder
from ptwprobe.record.channel import LATER_CHANNELS, choose

RING = "ring"
PT = "pt"
EXTRA = "extra"

_PTRACE_DETACH = 17
_PTRACE_SEIZE = 0x4206
_PTRACE_INTERRUPT = 0x4207
_CAP_SYS_PTRACE = 19


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    ``needed_for``: ``ring`` (recording as this version does it), ``pt`` (Intel PT, for which this version has the
    stubs and the decoder) or ``extra`` (peers and tools). ``remedy`` is for a check that is not ``ok``.
    """

    name: str
    ok: bool
    detail: str
    remedy: str = ""
    needed_for: str = RING


@dataclass(frozen=True)
class Machine:
    """Where the kernel shows itself."""

    sysfs: Path = Path("/sys")
    proc: Path = Path("/proc")

    def read(self, path: Path) -> str | None:
        """A small file's text, or None where it is not there or not for us."""
        try:
            return path.read_text().strip()
        except OSError:
            return None


def checks(machine: Machine | None = None) -> list[Check]:
    """Everything, in the order in which recording depends on it."""
    here = machine or Machine()
    features = _native.cpu_features()
    return [
        _architecture(),
        _kernel(),
        _ptrace(here),
        _cpu_number(features),
        _thread_pointer(features),
        _time(features),
        _memfd(),
        _journal(),
        _keystone(),
        _pt_pmu(here),
        _pt_format(here, "ptw", "PTWRITE packets"),
        _pt_format(here, "fup_on_ptw", "the address of each PTWRITE"),
        _ptwrite(features),
        _perf_event(here),
        _tracefs(here),
        _kernel_ptw(here),
        _perf_binary(),
        _bcc(),
    ]


def channel_choice(machine: Machine | None = None) -> tuple[str, str]:
    """(channel, reason) of what ``--channel auto`` takes here; ("", reason) where nothing works."""
    here = machine or Machine()
    try:
        choice = choose("auto", here.sysfs / "bus/event_source/devices")
    except UnsupportedError as error:
        return "", f"{error.message}; {error.hint}"
    return choice.name, choice.reason


def absent() -> list[str]:
    """What the design names and this version does not have."""
    return [*(f"--channel {name}" for name in LATER_CHANNELS), "--flow pt", "--flow step"]


def report(as_json: bool, machine: Machine | None = None) -> str:
    """All of it as text for a terminal, or as one JSON object."""
    found = checks(machine)
    name, reason = channel_choice(machine)
    if as_json:
        return json.dumps(
            {
                "channel": name or None,
                "channel_reason": reason,
                "checks": [asdict(check) for check in found],
                "absent_in_this_version": absent(),
            },
            indent=2,
        )
    titles = {RING: "Recording (channel ring)", PT: "Intel PT", EXTRA: "Other tools that ptwprobe can use"}
    lines = []
    for group, title in titles.items():
        lines.append(title)
        for check in (c for c in found if c.needed_for == group):
            lines.append(f"  {'ok' if check.ok else '--'}  {check.name}: {check.detail}")
            if not check.ok and check.remedy:
                lines.append(f"      remedy: {check.remedy}")
    lines.append(f"Channel that auto takes: {name or 'none'}: {reason}")
    lines.append(f"Absent in this version: {', '.join(absent())}")
    return "\n".join(lines)


# ---------------------------------------------------------------- recording


def _architecture() -> Check:
    machine = platform.machine()
    return Check("x86-64 Linux", machine == "x86_64", machine, "run on an x86-64 machine")


def _kernel() -> Check:
    release = platform.release()
    numbers = [int("".join(filter(str.isdigit, part)) or 0) for part in release.split(".")[:2]]
    # PTRACE_SEIZE with PTRACE_EVENT_STOP is older; 4.14 is where MADV_WIPEONFORK came.
    return Check("kernel", numbers >= [4, 14], release, "a kernel of 4.14 or later is needed (MADV_WIPEONFORK)")


def _ptrace(machine: Machine) -> Check:
    problem = _try_ptrace()
    if problem:
        remedy = "allow ptrace: in a container add --cap-add SYS_PTRACE and a seccomp profile that permits it"
        return Check("ptrace", False, problem, remedy)
    scope = machine.read(machine.proc / "sys/kernel/yama/ptrace_scope") or "0"
    if scope != "0" and not _capable(machine, _CAP_SYS_PTRACE):
        remedy = "run as root, or: sysctl kernel.yama.ptrace_scope=0; `record -- CMD` works as it is"
        return Check("ptrace", False, f"yama/ptrace_scope is {scope}: only own children can be traced", remedy)
    who = "any process" if _capable(machine, _CAP_SYS_PTRACE) else "processes of this user"
    return Check("ptrace", True, f"a child could be seized and stopped; permitted: {who}")


def _try_ptrace() -> str:
    """Seizes, stops and lets go of a child; "" or what went wrong."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    # A child that waits for its stdin to end, and does nothing else.
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as child:
        for request, name in ((_PTRACE_SEIZE, "PTRACE_SEIZE"), (_PTRACE_INTERRUPT, "PTRACE_INTERRUPT")):
            if libc.ptrace(request, child.pid, None, None) < 0:
                return f"{name} on a child: {os.strerror(ctypes.get_errno())}"
        os.waitpid(child.pid, 0)
        if libc.ptrace(_PTRACE_DETACH, child.pid, None, None) < 0:
            return f"PTRACE_DETACH from a child: {os.strerror(ctypes.get_errno())}"
    return ""


def _capable(machine: Machine, bit: int) -> bool:
    status = machine.read(machine.proc / "self/status") or ""
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> bit & 1)


def _cpu_number(features: dict[str, bool]) -> Check:
    has = [name for name in ("rdpid", "rdtscp") if features[name]]
    detail = f"{has[0]} tells a stub its CPU" if has else "neither rdpid nor rdtscp"
    return Check("cpu number", bool(has), detail, "a CPU (or virtual CPU model) with rdtscp is needed")


def _thread_pointer(features: dict[str, bool]) -> Check:
    remedy = "programs without a thread id in their TLS (Go, musl, static) need a kernel of 5.9 or later with fsgsbase"
    detail = "rdfsbase is enabled for programs" if features["fsgsbase"] else "rdfsbase is not enabled"
    return Check("fsgsbase", features["fsgsbase"], detail, remedy)


def _time(features: dict[str, bool]) -> Check:
    clock = _native.calibrate_tsc()
    rate = f"calibrated at {clock['tsc_hz'] / 1e6:,.3f} MHz"
    if features["invariant_tsc"]:
        return Check("time stamp counter", True, f"invariant, {rate}")
    remedy = "times may be off; in a virtual machine pass the invariant TSC through (invtsc)"
    return Check("time stamp counter", False, f"not said to be invariant, {rate}", remedy)


def _memfd() -> Check:
    try:
        file = os.memfd_create("ptwprobe-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return Check("memfd", False, f"memfd_create: {error.strerror}", "a kernel with CONFIG_MEMFD_CREATE is needed")
    try:
        os.ftruncate(file, mmap.PAGESIZE)
        wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, wanted)
        sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & wanted == wanted
    except OSError as error:
        return Check("memfd", False, f"sealing: {error.strerror}", "a kernel with CONFIG_TMPFS is needed")
    finally:
        os.close(file)
    return Check("memfd", sealed, "created and sealed" if sealed else "not sealed", "check the kernel's memfd support")


def _journal() -> Check:
    """Where it is kept what was done to processes; without it nothing is recorded."""
    try:
        folder = runfolder.writable()
    except PermissionDeniedError as error:
        return Check("journal", False, error.message, error.hint)
    return Check("journal", True, f"{folder.path} takes it: targets can be restored after any crash")


def _keystone() -> Check:
    remedy = "pip install --force-reinstall keystone-engine"
    try:
        import keystone

        code, _ = keystone.Ks(keystone.KS_ARCH_X86, keystone.KS_MODE_64).asm("nop")
    # The library is loaded at import; what goes wrong there is an ImportError or an OSError of the loader.
    except (ImportError, OSError) as error:
        return Check("keystone", False, str(error), remedy)
    return Check("keystone", code == [0x90], f"assembles (version {keystone.__version__})", remedy)


# ---------------------------------------------------------------- Intel PT


def _pt_pmu(machine: Machine) -> Check:
    pmu = machine.sysfs / "bus/event_source/devices/intel_pt"
    kind = machine.read(pmu / "type")
    if kind is not None:
        return Check("intel_pt PMU", True, f"type {kind}", needed_for=PT)
    flags = machine.read(machine.proc / "cpuinfo") or ""
    virtual = " hypervisor" in flags
    if " intel_pt" in flags:
        detail = f"the CPU has Intel PT, but {pmu} is missing"
        remedy = "use a kernel with CONFIG_PERF_EVENTS_INTEL_PT; for a KVM guest the host needs kvm_intel.pt_mode=1"
    elif virtual:
        detail = f"{pmu} is missing: this virtual machine does not show Intel PT"
        remedy = "use the host, or a guest with Intel PT passed through (kvm_intel.pt_mode=1)"
    else:
        detail, remedy = f"{pmu} is missing: the CPU has no Intel PT", "use an Intel CPU of 2015 or later"
    return Check("intel_pt PMU", False, detail, remedy, PT)


def _pt_format(machine: Machine, name: str, what: str) -> Check:
    path = machine.sysfs / "bus/event_source/devices/intel_pt/format" / name
    bits = machine.read(path)
    if bits is not None:
        return Check(f"intel_pt/{name}", True, f"{bits}: {what}", needed_for=PT)
    return Check(f"intel_pt/{name}", False, f"{path} is missing", "PTWRITE came with Goldmont and Alder Lake", PT)


def _ptwrite(features: dict[str, bool]) -> Check:
    executes = _native.ptwrite_executes()
    listed = "CPUID lists it" if features["ptwrite_cpuid"] else "CPUID does not list it"
    detail = f"the instruction {'executes' if executes else 'raises #UD'}; {listed}"
    return Check("ptwrite", executes, detail, "pt stubs cannot run on this CPU", PT)


def _perf_event(machine: Machine) -> Check:
    path = machine.proc / "sys/kernel/perf_event_paranoid"
    level = machine.read(path)
    if level is None:
        return Check("perf_event_open", False, f"{path} is missing", "a kernel with CONFIG_PERF_EVENTS is needed", PT)
    # 3 and 4 are Debian's and Ubuntu's additions: no use at all without privilege.
    ok = int(level) <= 2 or os.geteuid() == 0
    detail = f"perf_event_paranoid is {level}" + (" (root)" if os.geteuid() == 0 else "")
    return Check("perf_event_open", ok, detail, "sysctl kernel.perf_event_paranoid=2, or run as root", PT)


def _tracing_folder(machine: Machine) -> Path | None:
    folders = (machine.sysfs / "kernel/tracing", machine.sysfs / "kernel/debug/tracing")
    return next((folder for folder in folders if machine.read(folder / "README") is not None), None)


def _tracefs(machine: Machine) -> Check:
    folder = _tracing_folder(machine)
    remedy = "as root: mount -t tracefs nodev /sys/kernel/tracing"
    detail = str(folder) if folder else "not mounted, or not readable by this user"
    return Check("tracefs", folder is not None, detail, remedy, EXTRA)


def _kernel_ptw(machine: Machine) -> Check:
    folder = _tracing_folder(machine)
    readme = machine.read(folder / "README") if folder else None
    ok = readme is not None and "ptw[:" in readme
    detail = "uprobe_events takes ptw: lines" if ok else "uprobe_events does not take ptw: lines"
    remedy = "this is a proposed kernel feature; ptwprobe's own patching does not need it"
    return Check("kernel ptwrite uprobes", ok, detail, remedy, EXTRA)


# ---------------------------------------------------------------- tools


def _perf_binary() -> Check:
    path = shutil.which("perf")
    return Check("perf", path is not None, path or "not found", "apt install linux-perf (reads our sessions)", EXTRA)


def _bcc() -> Check:
    ok = importlib.util.find_spec("bcc") is not None
    detail = "importable" if ok else "no module bcc in this Python"
    return Check("bcc", ok, detail, "apt install python3-bpfcc (for a later version's channel uprobe)", EXTRA)
