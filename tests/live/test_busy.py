"""A target that is too busy to come to a stand, at any step of a recording: it is recorded a little later, or refused
by name with nothing of ours left in it.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ptwprobe
from ptwprobe import _native
from ptwprobe._native import NativeError
from ptwprobe.errors import RefusalReason, RefusedError
from ptwprobe.record import instrument
from tests.live.test_recover import PROBE, check_whole, files_of
from tests.recorders import layout, open_files, our_mappings, status_of
from tests.targets import Target

pytestmark = pytest.mark.needs("root")

Programs = Callable[..., Path]
Start = Callable[..., Target]
STOPPING = ("apply", "ask", "unmap")
"""What brings a target to a stand, or one of its threads. Each of these calls is a step, and so is each remote call."""
PATIENCE = 0.1


class Busy:
    """A tracer whose target is busy at a step, and for ``seconds`` from then on."""

    def __init__(self, step: int, seconds: float) -> None:
        self._tracer = _real()
        self._left = step
        self._seconds = seconds
        self._until = 0.0

    @property
    def came(self) -> bool:
        """Whether there was such a step."""
        return self._until > 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._tracer, name)
        if name == "remote":
            return self._remote
        return self._stopping(value) if name in STOPPING else value

    def _is_busy(self) -> bool:
        self._left -= 1
        if self._left == -1:
            self._until = time.monotonic() + self._seconds
            return True
        return time.monotonic() < self._until

    def _stopping(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if self._is_busy():
                raise NativeError("busy", "it does not come to a stand", None)
            return method(*args, **named)

        return call

    def _remote(self, pid: int, calls: list[Any], scratch: Any = None, keep: Any = ()) -> list[int]:
        made = next((i for i in range(len(calls)) if self._is_busy()), len(calls))
        if made == len(calls):
            return self._tracer.remote(pid, calls, scratch, keep)
        if made == 0:
            raise NativeError("busy", "no thread stops", None)
        # As the native one: what was made stays made. There is nothing to keep yet.
        return [*self._tracer.remote(pid, calls[:made], scratch), -errno.EBUSY]


_real = _native.Tracer


@pytest.fixture
def tracers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, float], list[Busy]]]:
    """``tracers(step, seconds)``: sessions have such a tracer from now on; the list of those that were made."""

    def of(step: int, seconds: float) -> list[Busy]:
        made: list[Busy] = []

        def make() -> Busy:
            made.append(Busy(step, seconds))
            return made[-1]

        monkeypatch.setattr(_native, "Tracer", make)
        return made

    monkeypatch.setattr(instrument, "BUSY_SECONDS", PATIENCE)
    yield of


def record(pid: int, output: Path) -> list[str]:
    """A recording of a moment; its notes."""
    session = ptwprobe.Session(pid=pid, output=output, ring_bits=16)
    session.add(PROBE)
    session.add("libc:clock_nanosleep a=$arg1:s32")
    assert session.run(0.02).hits > 0
    return session.notes


@pytest.mark.parametrize("seconds", [0.0, 3 * PATIENCE], ids=["for-a-moment", "for-longer-than-it-is-tried"])
def test_busy_at_any_step(
    progs: Programs,
    start: Start,
    tmp_path: Path,
    full: bool,
    tracers: Callable[[int, float], list[Busy]],
    seconds: float,
) -> None:
    worker = start(progs("forks_on"))
    before, files = layout(worker.pid), open_files(worker.pid)
    outcomes = set()
    for step in range(0, 200, 1 if full or not seconds else 3):
        made = tracers(step, seconds)
        what = f"step {step}"
        try:
            notes = record(worker.pid, tmp_path / f"{step}.ptw")
        except RefusedError as error:
            assert error.reason is RefusalReason.BUSY, what
            outcomes.add("refused")
        else:
            # In place would be a worse way than that of a target that is not busy.
            assert not any("in place" in note for note in notes), what
            outcomes.add("recorded")
        assert layout(worker.pid) == before and open_files(worker.pid) == files, what
        assert not our_mappings(worker.pid) and status_of(worker.pid) is None and not files_of(worker.pid), what
        if not any(tracer.came for tracer in made):
            break
    else:
        raise AssertionError("it never came to its end")
    assert outcomes == ({"recorded", "refused"} if seconds else {"recorded"})
    check_whole(worker, progs("forks_on"))
