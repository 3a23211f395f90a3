"""Probes that go in and out all the time, under threads that execute the patched bytes at full speed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ptwprobe
from ptwprobe import _native
from ptwprobe.errors import RefusalReason, RefusedError
from ptwprobe.model import Patch
from ptwprobe.probe.spec import parse
from ptwprobe.process import Process
from ptwprobe.record.eventtable import EventTable
from ptwprobe.record.instrument import Instrumented, plan_sites
from ptwprobe.record.targets import rings_needed
from tests import cli
from tests.targets import Target
from tests.torture import WELL_BEHAVED, Torture

pytestmark = pytest.mark.needs("root")

Programs = Callable[..., Path]
Start = Callable[..., Target]
PATIENCE = 20
"""How often a change is tried again that found the threads in the way."""


@pytest.fixture
def torture(progs: Programs, start: Start) -> Torture:
    """Eight threads and a signal every millisecond."""
    return Torture(start(progs("torture"), "8", "1000"))


@pytest.fixture
def instrumented(torture: Torture) -> Iterator[Instrumented]:
    tracer = _native.Tracer()
    yield Instrumented(tracer, Process(torture.pid))
    tracer.close()


def patches_of(instrumented: Instrumented, functions: tuple[str, ...], argument: str) -> list[Patch]:
    probes = [parse(f"{function} {argument}") for function in functions]
    plan = plan_sites(instrumented.process, probes, EventTable())
    assert not plan.refused
    return [patch for _, patch in instrumented.build(plan)]


def change(what: Callable[[list[Patch]], int], patches: list[Patch]) -> None:
    for attempt in range(PATIENCE):
        try:
            what(patches)
            return
        except RefusedError as error:
            if error.reason is not RefusalReason.BUSY or attempt == PATIENCE - 1:
                raise


@pytest.mark.parametrize("how", ["attached", "attaching"])
def test_hot_functions_toggle(torture: Torture, instrumented: Instrumented, full: bool, how: str) -> None:
    target = instrumented.target
    instrumented.map_ring(rings_needed(), 16)
    patches = patches_of(instrumented, WELL_BEHAVED, "a=$arg1 b=$arg2")
    choice = random.Random(1)
    if how == "attaching":
        target.release()
    target.open_gate()
    for turn in range(1000 if full else 40):
        some = choice.sample(patches, choice.randint(1, len(patches)))
        change(target.apply, some)
        if turn % 10 == 0:
            torture.check(f"turn {turn}, in")
        choice.shuffle(some)
        while some:
            out = [some.pop() for _ in range(choice.randint(1, len(some)))]
            change(target.undo, out)
    assert instrumented.remove(), instrumented.notes
    torture.check_untouched()
    torture.finish()


def test_whole_recordings_of_hot_functions(torture: Torture, tmp_path: Path, full: bool) -> None:
    for turn in range(60 if full else 3):
        session = tmp_path / "s.ptw"
        words = [word for function in WELL_BEHAVED for word in ("-e", f"{function} a=$arg1 b=$arg2")]
        done = cli.run("record", "-p", str(torture.pid), *words, "-o", session, "-m", "64K", "--duration", "0.05")
        assert done.exit_code == 0, done.stderr
        assert done.totals.hits + done.totals.lost > 0
        assert (done.totals.torn, done.totals.stray, done.totals.errors) == (0, 0, 0)
        torture.check_untouched(f"recording {turn}")
    torture.finish()


@pytest.mark.parametrize("function", ["second_byte", "overlapping", "first_byte", "repeats", "spins"])
def test_jumps_into_the_first_bytes_are_refused_or_right(
    torture: Torture, tmp_path: Path, full: bool, function: str
) -> None:
    """At every byte of the function's beginning, be it an instruction or not."""
    refused = set()
    for turn in range(4 if full else 1):
        for offset in range(8 if full else 5):
            session = ptwprobe.Session(pid=torture.pid, output=tmp_path / f"{turn}-{offset}.ptw", ring_bits=16)
            try:
                session.add(f"{function}+{offset:#x} di=%di si=%si")
                totals = session.run(0.05)
            except RefusedError:
                refused.add(offset)
            else:
                assert totals.hits + totals.lost > 0
                assert (totals.torn, totals.stray, totals.errors) == (0, 0, 0)
            torture.check_untouched(f"{function}+{offset} turn {turn}")
    # A byte that is the inside of an instruction in every way of reading the code.
    assert {"second_byte": 2, "overlapping": 2, "first_byte": 1, "repeats": 1, "spins": 1}[function] in refused
    torture.finish()


def test_hits_of_a_loop_to_the_first_byte_are_its_turns(progs: Programs, start: Start, tmp_path: Path) -> None:
    torture = Torture(start(progs("torture"), "1", "0"))
    for _ in range(20):
        session = ptwprobe.Session(pid=torture.pid, output=tmp_path / "s.ptw", ring_bits=28)
        session.add("first_byte n=%di:u64 sum=%si:u64")
        totals = session.run(0.002)
        assert totals.hits > 1000
        # A recorder that did not run for a tenth of a second has lost some; turns are counted where it has not.
        if totals.lost == 0:
            break
    assert totals.lost == 0
    left = 0
    for hit in cli.hits(tmp_path / "s.ptw"):
        n, total = cli.arguments(hit)
        first = total == 100
        # From the first hit of a call on it counts down to 1.
        assert first or left == 0 or n == left - 1
        left = n if first or left else 0
    torture.check_untouched()
    torture.finish()
