"""ptwprobe's decoder as a participant of the benches, and the one place here that knows how it is called.

Its speed and memory are measured in a process of its own: peak memory is a property of a process.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from array import array
from dataclasses import dataclass
from pathlib import Path

from ptwprobe import _native
from tests.bench.traces import Trace
from tests.peers.flow import Branches, Hit, Lists

NAME = "ptwprobe"

COMPLETE = False
"""Whether it takes a number of threads, reads perf.data by itself, and reads values without a walk."""


@dataclass(frozen=True)
class Ours:
    """One reading of a whole trace. ``cpu_s`` is of all threads together."""

    branches: int
    hits: int
    wall_s: float
    cpu_s: float
    peak_kb: int


def missing() -> str:
    return ""


def ours(trace: Trace, jobs: int, *, walk: bool = True, timeout_s: float = 600) -> Ours:
    """``jobs`` threads; ``walk``: with control flow, else the values only."""
    command = [sys.executable, "-m", __name__, str(trace.made.folder), str(jobs), str(int(walk))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    if done.returncode:
        raise RuntimeError(f"{NAME}: exit status {done.returncode}: {done.stderr}")
    return Ours(**json.loads(done.stdout))


def lists(trace: Trace) -> Lists:
    """All of it."""
    records, marks = _walk(trace)
    words = array("Q", records)
    hits = [Hit(mark[0], int(mark[4]), mark[5] or 0, mark[1]) for mark in marks if mark[3] == "word"]
    return Lists(Branches(words[0::3], words[1::3], words[2::3]), hits)


_Marks = list[tuple[int, int, int, str, str, "int | None"]]


def _walk(trace: Trace) -> tuple[bytes, _Marks]:
    regions = []
    for image in trace.images:
        with image.path.open("rb") as file:
            file.seek(image.file_offset)
            regions.append((image.addr, file.read(image.size)))
    return _native.walk(trace.aux.read_bytes(), regions, trace.stubs)


def _counts(trace: Trace, jobs: int, walk: bool) -> tuple[int, int]:
    """Branches and hits."""
    if jobs != 1 or not walk:
        raise NotImplementedError
    # All branches come into Python for it, which the peers, who only count, need not do.
    records, marks = _walk(trace)
    return len(records) // 24, sum(mark[3] == "word" for mark in marks)


def _main() -> None:
    trace, jobs, walk = Trace.read(Path(sys.argv[1])), int(sys.argv[2]), bool(int(sys.argv[3]))
    before, begun = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    branches, hits = _counts(trace, jobs, walk)
    wall_s, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    counts = {"branches": branches, "hits": hits}
    print(json.dumps({**counts, "wall_s": wall_s, "cpu_s": cpu_s, "peak_kb": _peak_kb()}))


def _peak_kb() -> int:
    """Of this program alone: what getrusage(2) tells includes what its parent had when it was started."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


if __name__ == "__main__":
    _main()
