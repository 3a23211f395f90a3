"""Threads in system calls of every kind do not notice that their process is stopped, changed and let go."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ptwprobe
from ptwprobe._native import NativeError, Tracer
from ptwprobe.errors import TargetError
from tests.targets import Target

pytestmark = pytest.mark.needs("root")

Programs = Callable[..., Path]
Start = Callable[..., Target]
SYS_GETPID = 39
THREADS = "8"
HOT = "2"
LATE_MS = "800"
"""What a call may take longer than its timeout. Machines that test are busy."""


def changed_text(pid: int) -> list[str]:
    """Mappings of code that are not what their file has."""
    found = []
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, access, offset, _, _, *path = line.split()
            if "x" in access and path and path[0].startswith("/"):
                start, end = (int(word, 16) for word in span.split("-"))
                with Path(path[0]).open("rb") as file:
                    wanted = os.pread(file.fileno(), end - start, int(offset, 16))
                if os.pread(memory.fileno(), len(wanted), start) != wanted:
                    found.append(line)
    return found


def finished(target: Target) -> str:
    target.go()
    return target.finish().removeprefix("ready\n")


AT_THE_CALL = "the handler ran, and the call was made again"
"""A signal was taken at the ``syscall`` instruction through which the kernel starts a call again. So it does without a
tracer, too (after SIGSTOP and SIGCONT), and nobody can close that gap for a thread that is traced no longer."""


def assert_right(output: str, at_the_call: int = 0) -> None:
    """``at_the_call``: so often the end of a tracer may have met that gap, and nothing else may be wrong."""
    *found, summary = output.splitlines()
    assert [line for line in found if AT_THE_CALL not in line] == []
    assert len(found) <= at_the_call, output
    assert f" wrong={len(found)} " in summary
    assert "hot=ok" in summary


@pytest.mark.parametrize("how", ["stop", "remote call", "attach and detach", "while attached", "end"])
def test_calls_are_as_without_stops(progs: Programs, start: Start, how: str, full: bool) -> None:
    rng = random.Random(how)
    seconds = 60 if full else 4
    target = start(progs("blocked"), THREADS, HOT, "600", LATE_MS)
    tracer = Tracer()
    stops = 0
    if how == "while attached":
        tracer.attach(target.pid)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if how == "remote call":
                assert tracer.remote(target.pid, [(SYS_GETPID, [])]) == [target.pid]
            elif how == "attach and detach":
                tracer.attach(target.pid)
                time.sleep(rng.uniform(0, 0.005))
                tracer.detach(target.pid)
            elif how == "end":
                # All threads that were left to their calls are let go at once.
                tracer.attach(target.pid)
                tracer.detach(target.pid)
                tracer.close()
                tracer = Tracer()
            else:
                tracer.threads(target.pid)
            stops += 1
        except NativeError as error:
            assert error.args[0] == "busy"
        time.sleep(rng.uniform(0, 0.02))
    tracer.close()
    assert_right(finished(target), at_the_call=2 if how == "end" and full else 0)
    assert stops > 20 * seconds / 2


def test_a_probe_that_comes_and_goes(progs: Programs, start: Start, tmp_path: Path, full: bool) -> None:
    cycles = 1000 if full else 10
    target = start(progs("blocked"), THREADS, HOT, "3600", LATE_MS)
    done = 0
    output = tmp_path / "session.ptw"
    for _ in range(cycles):
        try:
            with ptwprobe.Session(pid=target.pid, output=output) as session:
                session.add("probe_me a=$arg1:s64 b=$arg2:s64")
                totals = session.run(seconds=0.05)
            assert totals.hits > 0
            done += 1
        except TargetError as error:
            assert "busy" in str(error)
        assert not changed_text(target.pid)
        # Hot loops write gigabytes in so many sessions.
        shutil.rmtree(output, ignore_errors=True)
    assert done > cycles / 2
    assert_right(finished(target), at_the_call=2 if full else 0)
