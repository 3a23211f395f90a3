"""Recorders that die: how tests kill one together with its tracing task, and what is in a process afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from ptwprobe.patch import recover
from ptwprobe.report import status

OWNER = "ptwprobe-owner"


def owner_of(recorder: int) -> int:
    """The tracing task of a recorder."""
    for item in Path("/proc").iterdir():
        if item.name.isdecimal():
            try:
                status = (item / "status").read_text()
            except OSError:
                continue
            if f"\nPPid:\t{recorder}\n" in status and status.startswith(f"Name:\t{OWNER}\n"):
                return int(item.name)
    raise AssertionError(f"process {recorder} has no tracing task")


def kill_both(recorder: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the tracing task, which would restore the targets, and to the recorder."""
    os.kill(owner_of(recorder.pid), signal.SIGKILL)
    recorder.kill()
    recorder.wait()


def status_of(pid: int) -> dict[str, Any] | None:
    """What ``ptwprobe status --json`` says of a process, None if it has nothing of ours; without a start of Python."""
    found = json.loads(json.dumps(status.as_json(recover.status(pid))))["processes"]
    assert [one["pid"] for one in found] in ([], [pid])
    return found[0] if found else None


def our_mappings(pid: int) -> list[str]:
    """The mappings of a process with a name of ours."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if "memfd:ptwprobe" in line or "memfd:[uprobes" in line]


def layout(pid: int) -> list[str]:
    """All mappings of a process but those that grow by themselves."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [" ".join(line.split()) for line in lines if not line.endswith(("[heap]", "[stack]"))]


def wait_until_gone(pid: int, seconds: float = 10.0) -> None:
    """Until a process that was killed is collected by whoever is its parent."""
    end = time.monotonic() + seconds
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)


def open_files(pid: int) -> list[str]:
    """What the descriptors of a process lead to."""
    return sorted(str(item.readlink()) for item in Path(f"/proc/{pid}/fd").iterdir())
