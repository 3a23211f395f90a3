"""The recorder is killed at moments that are hard to hit: its tracing task takes all out, or ``detach`` does."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ptwprobe.process import Process
from tests import cli
from tests.recorders import layout, our_mappings
from tests.targets import Target

pytestmark = pytest.mark.needs("root")

Programs = Callable[..., Path]
Start = Callable[..., Target]

M_ARENA_MAX = -8
"""Of malloc.h."""
STUBS_WITHOUT_PAGES = """
mapped._write_all = wait
target.map_stub_space([(SPACE, 8192)])
"""
"""Stubs are mapped, and their file is still empty: nothing can be read there."""
LOCKED_ALLOCATOR = """
target.map_stub_space([(SPACE, 8192)])
target.map_ring(4, 16)
for taken in [libc.malloc(5000) for _ in range(20000)][::2]:
    libc.free(ctypes.c_void_p(taken))
threading.Thread(target=lambda: [libc.malloc_trim(0) for _ in iter(int, 1)]).start()
wait()
"""
"""The lock of the allocator is held nearly all the time, for looking through many pieces."""


@pytest.fixture
def worker(progs: Programs, start: Start) -> Target:
    return start(progs("forks_on"))


def recorder_of(worker: Target, script: str) -> Target:
    """A recorder that has come to the end of ``script``. Its tracing task is the first number that it printed."""
    space = (Process(worker.pid).entry_point() & ~0xFFF) - (1 << 24)
    begin = (
        f"import ctypes, sys, threading, time\nsys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from ptwprobe._native import Tracer\nfrom ptwprobe.patch import mapped\n"
        "from ptwprobe.patch.install import Target\n"
        f"libc = ctypes.CDLL(None)\nlibc.malloc.restype = ctypes.c_void_p\nlibc.mallopt({M_ARENA_MAX}, 1)\n"
        "def wait(*_):\n    print('ready', flush=True)\n    time.sleep(60)\n"
        f"tracer = Tracer()\nprint(tracer.pid)\ntarget = Target(tracer, {worker.pid})\n"
    )
    return Target([sys.executable, "-c", begin + script.replace("SPACE", str(space))])


def wait_for_end(pid: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while Path(f"/proc/{pid}/maps").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < end, f"the tracing task is at work for more than {seconds} s"
        time.sleep(0.005)


@pytest.mark.parametrize("script", [STUBS_WITHOUT_PAGES, LOCKED_ALLOCATOR], ids=["no-pages", "locked-allocator"])
def test_the_tracing_task_takes_all_out(worker: Target, script: str) -> None:
    before = layout(worker.pid)
    for _ in range(3):
        with recorder_of(worker, script) as recorder:
            assert our_mappings(worker.pid)
            os.kill(recorder.pid, signal.SIGKILL)
            recorder.process.wait()
            wait_for_end(int(recorder.output.split()[0]), 4)
        assert layout(worker.pid) == before
    assert worker.finish().endswith("wrong=0 bad=0\n")


def test_detach_after_both_were_killed_before_the_stubs_were_written(worker: Target) -> None:
    before = layout(worker.pid)
    with recorder_of(worker, STUBS_WITHOUT_PAGES) as recorder:
        for pid in (int(recorder.output.split()[0]), recorder.pid):
            os.kill(pid, signal.SIGKILL)
        recorder.process.wait()
    assert our_mappings(worker.pid)
    cli.run("detach", "-p", str(worker.pid)).good()
    assert layout(worker.pid) == before
    assert worker.finish().endswith("wrong=0 bad=0\n")
