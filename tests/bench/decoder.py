"""ptwprobe's decoder as a participant of the benches, and the one place here that knows how it is called.

Its speed and memory are measured in a process of its own: peak memory is a property of a process. It is given the
perf.data alone, as perf is, and only counts, as the peers do.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path

import ptwprobe
from ptwprobe import _native
from tests.bench.traces import Trace
from tests.peers.flow import Branches, Hit, Lists

NAME = "ptwprobe"


@dataclass(frozen=True)
class Ours:
    """One reading of a whole trace. ``cpu_s`` is of all threads together.

    ``hits``: PTWRITEs; without a walk, hits made of them: a header and its arguments.
    """

    branches: int
    hits: int
    errors: int
    wall_s: float
    cpu_s: float
    peak_kb: int


def ours(perf_data: Path, jobs: int, *, walk: bool = True, timeout_s: float = 600) -> Ours:
    """``jobs`` threads; ``walk``: with control flow, else the values only, which one thread reads."""
    command = [sys.executable, "-m", __name__, str(perf_data), str(jobs), str(int(walk))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    if done.returncode:
        raise RuntimeError(f"{NAME}: exit status {done.returncode}: {done.stderr}")
    return Ours(**json.loads(done.stdout))


def lists(trace: Trace) -> Lists:
    """All of it."""
    reader = _native.FlowReader(trace.perf_data)
    words, hits = array("Q"), list[Hit]()
    while (batch := reader.next_batch(0)) is not None:
        records, _, marks = batch
        before = len(words) // 3
        hits += [Hit(before + at, int(value), ip or 0, tsc) for at, tsc, _, kind, value, ip in marks if kind == "word"]
        words.frombytes(records)
    return Lists(Branches(words[0::3], words[1::3], words[2::3]), hits)


def _counts(perf_data: Path, jobs: int, walk: bool) -> tuple[int, int, int]:
    """Branches, hits, errors."""
    if walk:
        counts = _native.FlowReader(perf_data, jobs=jobs).count()
        return counts["branches"], counts["words"], counts["errors"] + counts["losses"]
    totals = ptwprobe.open(perf_data).totals()
    return 0, totals.hits, totals.stray


def _main() -> None:
    perf_data, jobs, walk = Path(sys.argv[1]), int(sys.argv[2]), bool(int(sys.argv[3]))
    before, begun = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    branches, hits, errors = _counts(perf_data, jobs, walk)
    wall_s, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    told = Ours(branches, hits, errors, wall_s, cpu_s, _peak_kb())
    print(json.dumps(asdict(told)))


def _peak_kb() -> int:
    """Of this program alone: what getrusage(2) tells includes what its parent had when it was started."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


if __name__ == "__main__":
    _main()
