"""SIGKILL of the recorder, or of all that is ours, at random moments: the target never notices."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import shutil
import signal
import statistics
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

import ptwprobe
from ptwprobe.errors import PtwprobeError, RefusalReason, RefusedError
from tests import cli
from tests.targets import Target
from tests.torture import WELL_BEHAVED, Torture, changed_code, ours

pytestmark = pytest.mark.needs("root")

Programs = Callable[..., Path]
Start = Callable[..., Target]

PHASES = ("planning", "attaching", "recording", "leaving", "ended")
RECORD_SECONDS = 0.02
BUSY = 4
"""Exit code of a recorder that was refused."""
READ_SHARE = 0.1
"""Of the sessions, are read afterwards: a million hits take longer to read than to record."""
_MARKS = struct.Struct(f"<{len(PHASES)}Q")


class Marks:
    """When a recorder began each of its phases (ns of CLOCK_MONOTONIC, 0: not yet), in a file that both sides open."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.clear()

    def clear(self) -> None:
        os.pwrite(self._fd, bytes(_MARKS.size), 0)

    def begin(self, phase: str) -> None:
        os.pwrite(self._fd, struct.pack("<Q", time.monotonic_ns()), 8 * PHASES.index(phase))

    def read(self) -> dict[str, int]:
        return dict(zip(PHASES, _MARKS.unpack(os.pread(self._fd, _MARKS.size, 0)), strict=True))

    def close(self) -> None:
        os.close(self._fd)


def record(pid: int, probes: list[str], output: Path, marks_path: Path) -> None:
    """What is killed: a whole session."""
    marks = Marks(marks_path)
    marks.begin("planning")
    session = ptwprobe.Session(pid=pid, output=output, ring_bits=16)
    for probe in probes:
        session.add(probe)
    marks.begin("attaching")
    try:
        session.start()
    except RefusedError as error:
        # Where the machine is so busy that a thread of the target does not even come to its stop.
        if error.reason is not RefusalReason.BUSY:
            raise
        sys.exit(BUSY)
    marks.begin("recording")
    session.wait(RECORD_SECONDS)
    marks.begin("leaving")
    session.stop()
    marks.begin("ended")


def read(output: Path, whole: bool) -> None:
    """Whatever there is can be read, or is told to be no session yet."""
    try:
        assert list(itertools.islice(ptwprobe.open(output).hits(), 100)) or not whole
    except PtwprobeError:
        assert not whole


class Killer:
    """Starts recorders of one target, kills them, and knows by now how long each phase takes."""

    def __init__(self, torture: Torture, folder: Path, seed: int) -> None:
        self.torture = torture
        self.where: Counter[str] = Counter()
        self.random = random.Random(seed)
        self._folder = folder
        self._marks = Marks(folder / "marks")
        self._took: dict[str, list[float]] = {phase: [] for phase in PHASES[:-1]}
        # Each recorder is a fork of a process that has imported everything: most of a round is what it is about.
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(["ptwprobe", __name__])
        self._turn = 0

    def close(self) -> None:
        self._marks.close()

    def round(self, probes: list[str], *, owner_too: bool = False, let_live: bool = False) -> None:
        """One recording, which is killed somewhere (or not, with ``let_live``)."""
        self._marks.clear()
        self._turn += 1
        output = self._folder / f"{self._turn}.ptw"
        arguments = (self.torture.pid, probes, output, self._folder / "marks")
        recorder = self._context.Process(target=record, args=arguments)
        recorder.start()
        assert recorder.pid is not None
        try:
            if not let_live:
                self._wait_for_the_moment(recorder)
                self._kill(recorder.pid, owner_too)
            recorder.join(60)
            assert recorder.exitcode in (0, BUSY, -signal.SIGKILL), f"the recorder ended with {recorder.exitcode}"
            if recorder.exitcode == BUSY:
                self.where["refused as busy"] += 1
        finally:
            recorder.kill()
            recorder.join()
            self._learn()
        if output.exists() and self.random.random() < READ_SHARE:
            read(output, whole=recorder.exitcode == 0)

        shutil.rmtree(output, ignore_errors=True)

    def _wait_for_the_moment(self, recorder: BaseProcess) -> None:
        phase = self.random.choices(PHASES[:-1], (1, 4, 2, 4))[0]
        delay = self.random.uniform(0, 1.1) * statistics.median(self._took[phase] or [0.05])
        end = time.monotonic() + 60
        while not self._marks.read()[phase] and recorder.exitcode is None:
            assert time.monotonic() < end, f"{recorder} does not come to {phase}"
            time.sleep(0.0002)
        time.sleep(delay)

    def _kill(self, pid: int, owner_too: bool) -> None:
        everybody = [pid, *children(pid)] if owner_too else [pid]
        self.random.shuffle(everybody)
        self.where[self._place()] += 1
        for one in everybody:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
            if self.random.random() < 0.5:
                time.sleep(self.random.uniform(0, 0.002))

    def _place(self) -> str:
        began = self._marks.read()
        phase = max((p for p in PHASES if began[p]), key=lambda p: began[p], default="planning")
        if phase not in ("attaching", "leaving"):
            return phase
        if changed_code(self.torture.pid):
            return f"{phase}, patched"
        return f"{phase}, mapped" if ours(self.torture.pid) else phase

    def summary(self) -> str:
        """Where the kills fell, and the median ms of each phase."""
        took = ", ".join(
            f"{phase} {1e3 * statistics.median(times or [0]):.0f} ms" for phase, times in self._took.items()
        )
        return f"\n{self.where.total()} kills: {dict(sorted(self.where.items()))}; {took}"

    def _learn(self) -> None:
        began = self._marks.read()
        for phase, after in itertools.pairwise(PHASES):
            if began[phase] and began[after]:
                self._took[phase].append((began[after] - began[phase]) / 1e9)


def children(pid: int) -> list[int]:
    """Processes that the threads of ``pid`` have started."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(word) for word in (task / "children").read_text().split()]
    return found


GOOD = [f"{function} a=$arg1 b=$arg2" for function in WELL_BEHAVED]
BAD = [
    *(probe for probe in GOOD if not probe.startswith("wild")),
    "wild m=+0($arg1):u64 n=+8(+0($arg1)):u64 o=+0($arg2):u8",
]


@pytest.fixture
def killer(progs: Programs, start: Start, tmp_path: Path, full: bool) -> Killer:
    killer = Killer(Torture(start("nice", "-n", "5", progs("torture"), "8", "1000")), tmp_path, seed=time.time_ns())
    for probes in (GOOD, BAD) * (2 if full else 1):
        killer.round(probes, let_live=True)
        killer.torture.check_untouched("a recording that nobody kills")
    return killer


each_kind = pytest.mark.parametrize("probes", [GOOD, BAD], ids=["good-pointers", "bad-pointers"])


@each_kind
def test_the_recorder_killed_at_random_moments(killer: Killer, probes: list[str], full: bool) -> None:
    """Its tracing task lives on, and cleans up."""
    for turn in range(250 if full else 9):
        killer.round(probes)
        killer.torture.check_untouched(f"kill {turn} ({dict(killer.where)})")
    killer.torture.finish()
    print(killer.summary())


def test_the_recorder_and_its_tracing_task_killed_at_random_moments(killer: Killer, full: bool) -> None:
    """Nobody is left to clean up: the target runs on, and ``detach`` or the next recording restores its code."""
    pid = killer.torture.pid
    for turn in range(500 if full else 4):
        killer.round(GOOD, owner_too=True)
        killer.torture.check(f"kill of both {turn}")
        if turn % 4 == 3:
            killer.round(GOOD, let_live=True)
        else:
            cli.run("detach", "-p", str(pid)).good()
        killer.torture.check(f"restored after kill {turn} of both")
        assert not changed_code(pid)
        assert not ours(pid)
        assert not list(Path("/run/ptwprobe").glob(f"{pid}-*.json"))
    killer.torture.finish()
    print(killer.summary())
