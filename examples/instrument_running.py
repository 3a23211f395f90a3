"""Instrument a program that is already running: which sizes does it ask of malloc, and from which thread?

    python examples/instrument_running.py PID [SECONDS]

The program is stopped briefly to put the probe in and to take it out; every hit costs it some tens of nanoseconds.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

import ptwprobe


def main(pid: int, seconds: float) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "malloc.ptw"
        with ptwprobe.Session(pid=pid, output=path) as session:
            session.add("libc:malloc size=$arg1:u64")
            totals = session.run(seconds=seconds)
        per_thread: Counter[int] = Counter()
        asked: Counter[int] = Counter()
        for hit in ptwprobe.open(path).hits():
            per_thread[hit.tid] += 1
            asked[hit.tid] += hit.args["size"]
    for tid, calls in per_thread.most_common():
        print(f"thread {tid}: {calls} calls, {asked[tid]} bytes")
    print(totals)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    main(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) == 3 else 5.0)
