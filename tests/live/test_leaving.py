"""After a recording the target has nothing of ours in its memory, whatever happened meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import cli
from tests.cli import Recording
from tests.targets import Target

pytestmark = pytest.mark.needs("root")

Programs = Callable[..., Path]
Start = Callable[..., Target]
PROBE = "probe_me a=$arg1:s64 b=$arg2:s64"
RESULT = "ready\ncalls=60000000 checksum="


def ours(pid: int) -> list[str]:
    """The mappings of a process that ptwprobe made, but for the anonymous one."""
    return [line for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "memfd:" in line]


def areas(pid: int) -> int:
    return len(Path(f"/proc/{pid}/maps").read_text().splitlines())


def state(pid: int) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split("\t")[1] for line in lines if line.startswith("State"))


def wait_until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def hot(progs: Programs, start: Start) -> Target:
    """Two threads that spend most of their time in the stub while they are recorded."""
    return start(progs("calls"), "2", "30000000", "0")


@pytest.mark.parametrize("turn", range(3))
def test_a_target_stopped_by_job_control_is_left_stopped_and_unmapped(hot: Target, tmp_path: Path, turn: int) -> None:
    before = areas(hot.pid)
    with Recording("-p", str(hot.pid), "-e", PROBE, "-o", tmp_path / "s.ptw") as recording:
        hot.go()
        time.sleep(0.2 + 0.01 * turn)
        os.kill(hot.pid, signal.SIGSTOP)
        wait_until(lambda: state(hot.pid).startswith("T"))
        done = recording.stop().good()
    assert done.totals.torn == 0
    assert "stay" not in done.stderr
    assert not ours(hot.pid)
    # Threads that had started since have stacks of their own, which may have come in between.
    assert areas(hot.pid) <= before + 8
    time.sleep(0.05)
    assert state(hot.pid) == "T (stopped)"
    os.kill(hot.pid, signal.SIGCONT)
    assert hot.finish().startswith(RESULT)
    assert hot.exit_code == 0


def test_a_probe_in_a_library_that_is_unloaded_ends_there_and_the_others_come_out(
    progs: Programs, start: Start, tmp_path: Path
) -> None:
    target = start(progs("reloads"), progs("libctors"))
    before = areas(target.pid)
    probes = ["-e", "libctors:ctor_called who=$arg1 i=$arg2", "-e", "libc:usleep us=$arg1:u32"]
    done = cli.run("record", "-p", str(target.pid), *probes, "-o", tmp_path / "s.ptw", "--duration", "3").good()
    names = {hit["event"].split("/")[1] for hit in cli.hits(tmp_path / "s.ptw")}
    assert names == {"ctor_called", "usleep"}
    assert "libctors.so" in done.stderr and "ended when its object was unloaded" in done.stderr
    assert not ours(target.pid)
    assert abs(areas(target.pid) - before) <= 6  # with or without the library, at this moment
    assert target.finish() == "ready\nwrong=0 again=1\n"


def test_a_killed_recorder_leaves_nothing_mapped(hot: Target, tmp_path: Path) -> None:
    with Recording("-p", str(hot.pid), "-e", PROBE, "-o", tmp_path / "s.ptw") as recording:
        hot.go()
        time.sleep(0.2)
        assert ours(hot.pid)
        recording.process.kill()
        recording.process.wait()
        wait_until(lambda: not ours(hot.pid))
    assert hot.finish().startswith(RESULT)


@pytest.mark.parametrize(
    ("how", "reason"),
    [("tsc", "tsc-disabled"), ("strict", "seccomp")],
)
def test_refusal_tsc_disabled_or_strict_seccomp_before_anything_is_mapped(
    progs: Programs, start: Start, tmp_path: Path, how: str, reason: str
) -> None:
    target = start(progs("tracee_notsc"), how)
    before = Path(f"/proc/{target.pid}/maps").read_text()
    done = cli.run("record", "-p", str(target.pid), "-e", PROBE, "-o", tmp_path / "s.ptw", "--duration", "0.2")
    assert done.exit_code == 4
    assert reason in done.stderr and "time stamp counter" in done.stderr
    assert Path(f"/proc/{target.pid}/maps").read_text() == before
    target.go()
    assert target.finish() == "ready\ndone\n"
    assert target.exit_code == 9
