"""``ptwprobe demo``: the main job on a real program that it starts.

A Python interpreter that handles texts of many sizes is started, probed by its PID while it runs, recorded, and read
back; nothing here is special to the demo but the target.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ptwprobe.errors import TargetGoneError
from ptwprobe.model import Totals
from ptwprobe.record.session import Session
from ptwprobe.trace.open import open as open_trace

PROBE = "libc:malloc size=$arg1:u64"

TARGET = """
import random, time, zlib
print("ready", flush=True)
rng = random.Random(1)
checked = 0
while True:
    text = bytes(rng.randrange(256) for _ in range(int(2 ** rng.uniform(4, 12)))) * 4
    assert zlib.decompress(zlib.compress(text)) == text
    checked += 1
    time.sleep(0.002)
"""

SHOWN_AT_ONCE = 20
"""Hits printed of each batch; the rest is in the histogram."""


def histogram(values: Counter[int], width: int = 40) -> list[str]:
    """Lines of a power-of-two histogram; ``values`` counts hits by the bit length of the value."""
    if not values:
        return ["(no hits)"]
    most = max(values.values())
    lines = []
    for bits in range(min(values), max(values) + 1):
        low, high = (0, 1) if bits == 0 else (1 << (bits - 1), 1 << bits)
        bar = "@" * round(width * values[bits] / most)
        lines.append(f"  [{low:>9,}, {high:>9,})  {values[bits]:>9,} |{bar:<{width}}|")
    return lines


def run(seconds: float, output: Path | None, echo: Callable[[str], None]) -> Totals:
    """Run the demo for ``seconds``; the session goes to ``output``, or to a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="ptwprobe-demo-") as scratch:
        path = output or Path(scratch) / "demo.ptw"
        target = subprocess.Popen([sys.executable, "-c", TARGET], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            assert target.stdout is not None
            if target.stdout.readline() != b"ready\n":
                raise TargetGoneError("the demo's program did not start", f"try: {sys.executable} -c 'print(1)'")
            return _record(target, path, seconds, echo)
        finally:
            target.kill()
            target.wait()


def _record(target: subprocess.Popen[bytes], path: Path, seconds: float, echo: Callable[[str], None]) -> Totals:
    sizes: Counter[int] = Counter()
    with Session(pid=target.pid, output=path, on_note=echo) as session:
        session.add(PROBE)
        session.start()
        echo(f"probing {PROBE!r} in process {target.pid} ({Path(sys.executable).name}), which was already running")
        echo(f"channel: {session.choice.name} ({session.choice.reason})")
        trace = open_trace(path)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and session.poll(min(0.5, seconds)) is None:
            batch = trace.new_hits()
            for hit in batch[:SHOWN_AT_ONCE]:
                args = " ".join(f"{name}={value}" for name, value in hit.args.items())
                echo(f"{hit.comm} {hit.tid} [{hit.cpu:03d}] {hit.ns / 1e9:.9f}: {hit.event}: ({hit.ip:x}) {args}")
            if len(batch) > SHOWN_AT_ONCE:
                echo(f"... and {len(batch) - SHOWN_AT_ONCE:,} more hits")
        totals = session.stop()
    for hit in open_trace(path).hits():
        sizes[hit.args["size"].bit_length()] += 1
    if target.poll() is not None:
        raise TargetGoneError(f"the demo's program ended with status {target.returncode}", "please report this")
    echo(f"\nsizes that were asked of malloc in {seconds:g} s, in bytes:")
    for line in histogram(sizes):
        echo(line)
    echo(f"\nthe program still runs, unpatched: {totals.hits:,} hits, {totals.lost:,} lost, {totals.torn:,} torn")
    return totals
