"""A recorder that is killed between any two steps of going in or coming out: nothing stays, nobody is harmed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import cli
from tests.cli import Recording
from tests.live.test_recover import PROBE, check_whole, files_of, fork, leave_behind
from tests.recorders import layout, our_mappings, owner_of, status_of
from tests.targets import Target

pytestmark = pytest.mark.needs("root")

Programs = Callable[..., Path]
Start = Callable[..., Target]
PROBES = (PROBE, "libc:clock_nanosleep a=+0(%dx)")
MOST_STEPS = 200
WHO = pytest.mark.parametrize("who", ["recorder", "both"])


def dies_at(step: int, who: str, *words: str | Path) -> bool:
    """Run a command that is killed at a step; False where it came to its end before."""
    command = [sys.executable, "-m", "tests.steps", str(step), who, *(str(word) for word in words)]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode in (0, -9), done.stderr.decode()
    return done.returncode != 0


def check_restored(worker: Target, before: list[str], binary: Path, what: str) -> None:
    """``detach`` takes out whatever is left, and the target has come to the right results all the time."""
    assert worker.is_alive(), what
    done = cli.run("detach", "-p", str(worker.pid))
    assert done.exit_code == 0, f"{what}: {done.stdout.decode()}{done.stderr}"
    assert worker.is_alive() and layout(worker.pid) == before, f"{what}: {done.stdout.decode()}"
    assert not our_mappings(worker.pid) and status_of(worker.pid) is None and not files_of(worker.pid), what
    check_whole(worker, binary)


@WHO
def test_killed_at_any_step_of_a_recording(progs: Programs, start: Start, tmp_path: Path, full: bool, who: str) -> None:
    words = [word for probe in PROBES for word in ("-e", probe)]
    # The fifth is the last at which nothing tells that the gate's page is one.
    for step in range(MOST_STEPS) if full else range(5, MOST_STEPS, 12):
        worker = start(progs("forks_on"))
        before = layout(worker.pid)
        died = dies_at(
            step, who, "record", "-p", str(worker.pid), *words, "-o", tmp_path / f"{step}.ptw", "--duration", "0.02"
        )
        check_restored(worker, before, progs("forks_on"), f"step {step}")
        if not died:
            break
    else:
        raise AssertionError("it never came to its end")


@WHO
def test_killed_at_any_step_of_a_detach(progs: Programs, start: Start, tmp_path: Path, full: bool, who: str) -> None:
    # Where the tracing task lives on, what it was told counts, so that each step is another case.
    for step in range(MOST_STEPS) if full or who == "recorder" else range(2, MOST_STEPS, 4):
        worker = start(progs("forks_on"))
        before = layout(worker.pid)
        leave_behind(worker, tmp_path / f"{step}.ptw", *PROBES)
        died = dies_at(step, who, "detach", "-p", str(worker.pid))
        check_restored(worker, before, progs("forks_on"), f"step {step}")
        if not died:
            break
    else:
        raise AssertionError("it never came to its end")


def test_a_child_forked_at_any_step_is_found(progs: Programs, start: Start, tmp_path: Path, full: bool) -> None:
    """A ring, or a part of it, before there are stubs that use it; stubs before there are patches."""
    for step in range(4, 30, 1 if full else 7):
        worker = start(progs("forks_on"))
        before = layout(worker.pid)
        assert dies_at(step, "both", "record", "-p", str(worker.pid), "-e", PROBE, "-o", tmp_path / f"{step}.ptw")
        child = fork(worker)
        found = status_of(child)
        assert found is not None and (found["state"], found["recorder"]) == ("inherited", None), step
        cli.run("detach", "-p", str(worker.pid), "--all").good()
        for pid in (child, worker.pid):
            assert layout(pid) == before, f"step {step}"
            assert not our_mappings(pid) and status_of(pid) is None
        check_whole(worker, progs("forks_on"))


def test_status_is_told_when_the_tracing_task_of_a_killed_recorder_has_ended(
    progs: Programs, start: Start, tmp_path: Path
) -> None:
    worker = start(progs("forks_on"))
    with Recording("-p", str(worker.pid), "-e", PROBE, "-o", tmp_path / "s.ptw") as recording:
        owner = owner_of(recording.process.pid)
        # So that it neither restores the target nor ends.
        os.kill(owner, signal.SIGSTOP)
        recording.process.kill()
        recording.process.wait()
        threading.Timer(0.5, os.kill, (owner, signal.SIGKILL)).start()
        found = status_of(worker.pid)
    assert found is not None
    assert (found["state"], found["recorder"]) == ("left-over", None)
    cli.run("detach", "-p", str(worker.pid)).good()
