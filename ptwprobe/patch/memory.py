"""The memory of a target, by /proc/PID/mem, and what an error of the operating system there means."""

from __future__ import annotations

import os
from pathlib import Path

from ptwprobe.errors import TargetError, TargetGoneError


def read(pid: int, addr: int, size: int) -> bytes:
    """``size`` bytes at ``addr``, fewer where the mapping ends. Raises TargetError, TargetGoneError."""
    try:
        with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
            return os.pread(memory.fileno(), size, addr)
    except OSError as error:
        raise os_error(pid, f"reading {addr:#x}", error) from error


def os_error(pid: int, what: str, error: OSError) -> TargetError:
    """The exception for a user that stands for ``error``, which came up in ``what``."""
    if isinstance(error, (FileNotFoundError, ProcessLookupError)) or not Path(f"/proc/{pid}").exists():
        return TargetGoneError(f"process {pid} is gone")
    return TargetError(f"process {pid}: {what}: {error.strerror}")
