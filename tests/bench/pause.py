"""``pause``: for how long a program is kept from running while probes go in and come out, as the program sees it.

A thread of the target reads the clock all the time; the figure is the longest gap between two readings. Each
participant acts on a fresh process, everybody in turn in each run. "nothing" is what the machine does to the program
by itself in the same time; "stop-all" is one stop of all threads, in which nothing is done.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ptwprobe import _native
from ptwprobe.model import StubForm
from ptwprobe.probe.spec import parse
from ptwprobe.process import Process
from ptwprobe.record.eventtable import EventTable
from ptwprobe.record.instrument import Instrumented, plan_sites
from tests import tracefs
from tests.bench.table import Result, Row, Verdict
from tests.progs.build import build
from tests.symbols import function
from tests.targets import Target

PROBES = [1, 100, 2000]
BLOCKED = {"1 thread": 0, "200 threads": 199}
QUIET_S = 0.05
SETTLE_S = 0.01
MOST_UPROBES_OFTEN = 100
"""More uprobes than these take minutes to come and go, so that one run has to do."""

Gaps = dict[str, float]
"""Who → the longest gap in µs."""


def run(runs: int) -> Result:
    result = Result("pause")
    values: dict[tuple[str, str], list[float]] = {}
    uprobes = tracefs.available()
    if not uprobes:
        result.notes.append("uprobe: tracefs is not mounted or not writable")
    with tempfile.TemporaryDirectory() as folder:
        binary = build("gaps", Path(folder))
        for turn in range(runs):
            for threads, blocked in BLOCKED.items():
                for case, act in turns(binary, turn, uprobes):
                    with Target([str(binary), "1", str(blocked)]) as target:
                        for who, gap in act(Watched(target)).items():
                            values.setdefault((who, f"{threads}, {case}"), []).append(round(gap, 1))
    result.rows = [Row(case, who, "us", tuple(gaps)) for (who, case), gaps in values.items()]
    result.verdicts = verdicts(result)
    return result


class Watched:
    """A running ``tests/progs/gaps.c``."""

    def __init__(self, target: Target) -> None:
        self.pid = target.pid
        self._target = target

    def longest_gap(self, act: Callable[[], object]) -> float:
        """The longest gap in µs while ``act`` runs."""
        self._target.ask()
        act()
        # A gap is told when it is over.
        time.sleep(SETTLE_S)
        return int(self._target.ask().split()[1]) / 1000


def turns(binary: Path, turn: int, uprobes: bool) -> list[tuple[str, Callable[[Watched], Gaps]]]:
    """What is measured in one turn, as (case, how)."""
    out: list[tuple[str, Callable[[Watched], Gaps]]] = [("no probe", without_probe)]
    for count in PROBES:
        out.append((_probes(count), lambda watched, count=count: ours(watched, count)))  # type: ignore[misc]
        if uprobes and (count <= MOST_UPROBES_OFTEN or not turn):
            out.append((_probes(count), lambda watched, count=count: kernels(watched, binary, count)))  # type: ignore[misc]
    return out


def _probes(count: int) -> str:
    return "1 probe" if count == 1 else f"{count:,} probes"


def without_probe(watched: Watched) -> Gaps:
    tracer = _native.Tracer()
    try:
        return {
            "nothing": watched.longest_gap(lambda: time.sleep(QUIET_S)),
            "stop-all": watched.longest_gap(lambda: tracer.threads(watched.pid)),
        }
    finally:
        tracer.close()


def ours(watched: Watched, count: int) -> Gaps:
    """All that a recording does to its target on the way in, and on the way out."""
    process = Process(watched.pid)
    tracer = _native.Tracer()
    instrumented = Instrumented(tracer, process)
    plan = plan_sites(process, [parse(f"fn_{i} a=$arg1 b=$arg2") for i in range(count)], EventTable())

    def go_in() -> None:
        instrumented.map_ring(rings=1, ring_bits=16)
        instrumented.install([patch for _, patch in instrumented.build(plan, StubForm.RING)])
        instrumented.release()

    try:
        gap_in = watched.longest_gap(go_in)
        gap_out = watched.longest_gap(instrumented.remove)
    finally:
        tracer.close()
    return {"ptwprobe in": gap_in, "ptwprobe out": gap_out}


def kernels(watched: Watched, binary: Path, count: int) -> Gaps:
    """The same functions, by the kernel's uprobes."""
    names = [f"fn_{i}" for i in range(count)]
    events = [tracefs.Uprobe(name, binary, function(binary, name)[1], "a=%di:s64 b=%si:s64") for name in names]
    uprobes = tracefs.Uprobes(events, buffer_kb=64)
    try:
        gap_in = watched.longest_gap(uprobes.__enter__)
    finally:
        gap_out = watched.longest_gap(lambda: uprobes.__exit__(None, None, None))
    return {"uprobe in": gap_in, "uprobe out": gap_out}


# In which case, and how many µs at most.
_BOUNDS = [("1 thread, 1 probe", 1000), ("200 threads, 1 probe", 8000)]


def verdicts(result: Result) -> list[Verdict]:
    found = []
    for case, bound in _BOUNDS:
        for who in ("ptwprobe in", "ptwprobe out"):
            value = result.value(case, who)
            if value is not None:
                text = f"{who}, {case}: longest gap {value:,.0f} us (median); bound {bound:,} us"
                found.append(Verdict(value < bound, text))
    return found
