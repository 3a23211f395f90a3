"""Both tasks of a recorder are killed at any moment, while every hit reads through a null pointer: no fault is seen."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ptwprobe
from ptwprobe.errors import RefusalReason, RefusedError
from tests import cli
from tests.targets import Target

pytestmark = pytest.mark.needs("root")

Start = Callable[..., Target]
Programs = Callable[..., Path]
PROBE = "probe_me value=+8(%di)"
"""The first argument of the only thread is 0."""


def start_session(pid: int, output: Path) -> ptwprobe.Session:
    """Recording; a target that does not stop in time on a busy machine is tried again."""
    for attempt in range(50):
        session = ptwprobe.Session(pid=pid, output=output)
        try:
            session.add(PROBE)
            session.start()
        except RefusedError as error:
            if error.reason is not RefusalReason.BUSY or attempt == 49:
                raise
        else:
            return session
    raise AssertionError("the last attempt returns or raises")


def recorder(pid: int, output: Path) -> int:
    """A process of its own that records until it is killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            session = start_session(pid, output)
            os.write(write, b"!")
            while True:
                session.poll(0.01)
        except BaseException as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(1)
    os.close(write)
    begun = os.read(read, 1000).decode()
    os.close(read)
    assert begun == "!", begun
    return child


def tracer_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("TracerPid:")[2].split()[0])


def test_no_kill_of_recorder_and_tracing_task_lets_a_fault_through(
    start: Start, progs: Programs, tmp_path: Path, full: bool
) -> None:
    chance = random.Random(5)
    target = start(progs("calls"), "1", str(10**15), "0")
    target.go()
    for i in range(200 if full else 5):
        child = recorder(target.pid, tmp_path / f"{i}.ptw")
        owner = tracer_of(target.pid)
        assert owner, "a program whose memory is read stays traced"
        time.sleep(chance.uniform(0, 0.01))
        first, second = chance.choice([(child, owner), (owner, child)])
        os.kill(first, signal.SIGKILL)
        time.sleep(chance.choice([0, 0, 0.001]))
        try:
            os.kill(second, signal.SIGKILL)
        except ProcessLookupError:
            assert second == owner, "only the tracing task ends by itself"
        os.waitpid(child, 0)
        end = time.monotonic() + 5
        while tracer_of(target.pid) == owner:
            assert time.monotonic() < end
            time.sleep(0.001)
        time.sleep(0.01)
        assert target.exit_code is None
    cli.run("detach", "-p", str(target.pid)).good()
    assert target.exit_code is None
