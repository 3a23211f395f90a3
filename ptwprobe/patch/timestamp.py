"""May a process read the time stamp counter? Every record of the ring has it, and ``rdtsc`` kills who may not.

Responsible for asking before anything is mapped. The right is each thread's own, handed on to the threads it creates;
it is asked for the one that executes our calls, and seccomp's strict mode, which takes it away, is looked up for all.
"""

from __future__ import annotations

from pathlib import Path

from ptwprobe.errors import RefusalReason, RefusedError, TargetGoneError

SECCOMP_STRICT = "Seccomp:\t1\n"
"""In /proc/PID/status, proc(5)."""


def require(pid: int, may_read: bool) -> None:
    """Raise RefusedError where a stub of the ``ring`` form would kill process ``pid``.

    ``may_read``: what the thread that was asked says.
    """
    try:
        statuses = [(task.name, _status(task)) for task in Path(f"/proc/{pid}/task").iterdir()]
    except FileNotFoundError as error:
        raise TargetGoneError(f"process {pid} is gone") from error
    for tid, status in statuses:
        if SECCOMP_STRICT in status:
            raise RefusedError(
                RefusalReason.SECCOMP,
                f"thread {tid} of process {pid} is in seccomp's strict mode, which kills it when it reads the"
                " time stamp counter, as every stub does",
                "a tool that probes by breakpoints (perf probe) works on it",
            )
    if not may_read:
        raise RefusedError(
            RefusalReason.TSC_DISABLED,
            f"process {pid} may not read the time stamp counter, as every stub does: it said so (prctl PR_SET_TSC)",
            "a tool that probes by breakpoints (perf probe) works on it",
        )


def _status(task: Path) -> str:
    """Empty for a thread that has ended."""
    try:
        return (task / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
