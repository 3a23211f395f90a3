"""Nothing is lost without being counted, nothing is counted twice, and every value is right."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli import COMMAND, Recording
from tests.targets import Target

pytestmark = pytest.mark.needs("root")

Programs = Callable[..., Path]
Start = Callable[..., Target]

PROBE = "probe_me a=$arg1:s64 b=$arg2:s64"
_HIT = re.compile(rb'"args":\{"a":(\d+),"b":(\d+)\}')


def check_values(session: Path, threads: int, calls: int) -> int:
    """Reads the session as a user would, in constant memory: each thread's second argument must grow and stay below
    ``calls``, and a tid stands for one first argument. Returns the number of hits.
    """
    process = subprocess.Popen([*COMMAND, "script", str(session), "--format", "jsonl"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    last = [-1] * threads
    hits = 0
    for line in process.stdout:
        match = _HIT.search(line)
        if match is None:
            assert b'"type":"hit"' not in line, line
            continue
        thread, number = int(match[1]), int(match[2])
        assert last[thread] < number < calls, line
        last[thread] = number
        hits += 1
    assert process.wait() == 0
    return hits


def test_hits_and_lost_make_all_calls_of_two_threads(progs: Programs, start: Start, tmp_path: Path, full: bool) -> None:
    calls = 50_000_000 if full else 10_000_000
    session = tmp_path / "all.ptw"
    target = start(progs("calls"), "2", str(calls), "0", wait_s=300)
    with Recording(
        "-p", str(target.pid), "-e", PROBE, "-o", session, "--channel", "ring", "--json", wait_s=300
    ) as recording:
        target.go()
        done = recording.finish().good()
    assert target.finish().startswith(f"ready\ncalls={2 * calls} ")
    totals = done.summary["totals"]
    assert totals["hits"] + totals["lost"] == 2 * calls
    assert totals["torn"] == 0
    assert (done.totals.hits, done.totals.lost) == (totals["hits"], totals["lost"])
    assert check_values(session, 2, calls) == totals["hits"]
    # A trace of nothing but losses would pass all of the above.
    assert totals["hits"] > calls / 10


def test_a_ring_that_is_too_small_counts_what_it_loses(progs: Programs, start: Start, tmp_path: Path) -> None:
    calls = 500_000
    session = tmp_path / "small.ptw"
    target = start(progs("calls"), "2", str(calls), "0")
    options: list[str | Path] = ["-o", session, "-m", "64K", "--json"]
    with Recording("-p", str(target.pid), "-e", PROBE, *options) as recording:
        target.go()
        totals = recording.finish().good().summary["totals"]
    assert totals["lost"] > 0
    assert totals["hits"] + totals["lost"] == 2 * calls
    assert check_values(session, 2, calls) == totals["hits"]


def test_a_million_hits_a_second_lose_nothing_in_bounded_memory(
    progs: Programs, start: Start, tmp_path: Path, full: bool
) -> None:
    seconds = 60 if full else 10
    session = tmp_path / "rate.ptw"
    target = start(progs("calls"), "2", str(500_000 * seconds), "500000", wait_s=300)
    with Recording("-p", str(target.pid), "-e", PROBE, "-o", session, "--json") as recording:
        target.go()
        time.sleep(1)
        at_start = _rss_kb(recording.process.pid)
        peak = at_start
        while target.exit_code is None and recording.process.poll() is None:
            time.sleep(0.1)
            peak = max(peak, _rss_kb(recording.process.pid))
        done = recording.finish().good()
    totals = done.summary["totals"]
    assert (totals["hits"], totals["lost"], totals["torn"]) == (1_000_000 * seconds, 0, 0)
    assert peak - at_start < 8 * 1024, f"the recorder grew from {at_start} to {peak} KiB"
    assert check_values(session, 2, 500_000 * seconds) == 1_000_000 * seconds


def _rss_kb(pid: int) -> int:
    """Resident KiB; 0 once the process is a zombie."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")), 0)
