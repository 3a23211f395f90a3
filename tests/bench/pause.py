"""``pause``: for how long a program is kept from running while probes go in and come out.

Two figures. What the program sees: a thread of it reads the clock all the time, and the figure is the longest gap
between two readings while the change is made ("gap"). And what we know: the time between the last thread's stop and the
first one's going on ("stood still"). The gap holds whatever else the machine did to the thread in that time, so that
"nothing" stands beside it: the longest gap in as many ms in which nobody does anything. "stop-all" is one stop of all
threads in which nothing is done. Everybody in turn, many times; the medians count. All of it runs at the highest
priority that is not real-time (which would be throttled), so that what else the machine does weighs little.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar, cast

from ptwprobe import _native
from ptwprobe.model import StubForm
from ptwprobe.probe.spec import parse
from ptwprobe.process import Process
from ptwprobe.record.eventtable import EventTable
from ptwprobe.record.instrument import Instrumented, Plan, plan_sites
from tests import tracefs
from tests.bench.table import Result, Row, Verdict
from tests.progs.build import build
from tests.symbols import function
from tests.targets import Target

OURS = {1: 8, 100: 4, 2000: 1}
"""Probes → how often they go in and out in a run."""
UPROBES = {1: 4, 100: 1, 2000: 4}
MOST_EVENTS = 100
"""More uprobes than that are one event with as many places: 2,000 events take minutes to be removed, one by one."""
BLOCKED = {"1 thread": 0, "200 threads": 199}
FUNCTION_SIZE = 64
"""Of the program, from the start of fn_0 to that of fn_1."""

Add = Callable[[str, float], None]
"""Takes a figure: who, µs."""
_T = TypeVar("_T")


def run(runs: int) -> Result:
    result = Result("pause")
    values: dict[tuple[str, str], list[float]] = {}
    uprobes = tracefs.available()
    if not uprobes:
        result.notes.append("uprobe: tracefs is not mounted or not writable")
    with preferred(result.notes), tempfile.TemporaryDirectory() as folder:
        binary = build("gaps", Path(folder))
        plans: dict[int, list[str]] = {count: [f"fn_{i} a=$arg1 b=$arg2" for i in range(count)] for count in OURS}
        for _ in range(runs):
            for threads, blocked in BLOCKED.items():
                for count, probes in plans.items():
                    case = f"{threads}, {'1 probe' if count == 1 else f'{count:,} probes'}"

                    def add(who: str, us: float, case: str = case) -> None:
                        values.setdefault((who, case), []).append(round(us, 1))

                    with Target([str(binary), "1", str(blocked)]) as target:
                        ours(Watched(target), probes, OURS[count], add)
                        if uprobes:
                            for _ in range(UPROBES.get(count, 0)):
                                kernels(Watched(target), binary, count, add)
    result.rows = [Row(case, who, "us", tuple(found)) for (who, case), found in values.items()]
    result.verdicts = verdicts(result)
    return result


@contextmanager
def preferred(notes: list[str]) -> Iterator[None]:
    """At the highest priority that is not real-time; the scheduler's group of this session (sched(7)), too."""
    group, before = Path("/proc/self/autogroup"), os.getpriority(os.PRIO_PROCESS, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        group_before = group.read_text().split()[-1] if group.exists() else ""
        if group_before:
            group.write_text("-20")
    except PermissionError:
        notes.append("at usual priority: whatever else the machine does is in the figures")
        yield
        return
    try:
        yield
    finally:
        os.setpriority(os.PRIO_PROCESS, 0, before)
        if group_before:
            group.write_text(group_before)


class Watched:
    """A running ``tests/progs/gaps.c``."""

    def __init__(self, target: Target) -> None:
        self.pid = target.pid
        self._target = target
        self.gap = 0.0
        """The longest in µs in the last :meth:`during`."""
        self.took = 0.0
        """The s that the last :meth:`during` took."""

    def during(self, act: Callable[[], _T]) -> _T:
        self._target.ask()
        begun = time.monotonic()
        done = act()
        self.took = time.monotonic() - begun
        self.gap = int(self._target.ask().split()[1]) / 1000
        return done


class Timed:
    """A tracer that keeps how long, in µs, the target stood still for its last change."""

    def __init__(self, tracer: _native.Tracer) -> None:
        self._tracer = tracer
        self.stood_us = 0.0

    def apply(self, *arguments: object, **named: object) -> int:
        stood: int = self._tracer.apply(*arguments, **named)  # type: ignore[arg-type]
        self.stood_us = stood / 1000
        return stood

    def __getattr__(self, name: str) -> object:
        return getattr(self._tracer, name)


def ours(watched: Watched, probes: list[str], times: int, add: Add) -> None:
    """All that a recording does to its target on the way in, and on the way out."""
    process = Process(watched.pid)
    plan = plan_sites(process, [parse(probe) for probe in probes], EventTable())
    for _ in range(times):
        tracer = _native.Tracer()
        timed = Timed(tracer)
        try:
            once(watched, timed, Instrumented(cast(_native.Tracer, timed), process), plan, add)
            stop_all(watched, tracer)
            add("stop-all: gap", watched.gap)
        finally:
            tracer.close()


def stop_all(watched: Watched, tracer: _native.Tracer) -> None:
    """As often as a recording tries it on a busy machine."""
    for last in (False,) * 9 + (True,):
        try:
            watched.during(lambda: tracer.threads(watched.pid))
        except _native.NativeError as error:
            if error.args[0] != "busy" or last:
                raise
        else:
            return


def once(watched: Watched, tracer: Timed, instrumented: Instrumented, plan: Plan, add: Add) -> None:
    watched.during(lambda: instrumented.map_ring(rings=1, ring_bits=16))
    gap = watched.gap
    # Assembling is ours alone; what it writes goes into the new mappings, through /proc/PID/mem.
    patches = [patch for _, patch in instrumented.build(plan, StubForm.RING)]

    def go_in() -> None:
        instrumented.install(patches)
        instrumented.release()

    watched.during(go_in)
    add("ptwprobe in: gap", max(gap, watched.gap))
    add("ptwprobe in: stood still", tracer.stood_us)
    clean = watched.during(instrumented.remove)
    took = watched.took
    add("ptwprobe out: gap", watched.gap)
    add("ptwprobe out: stood still", tracer.stood_us)
    if not clean:
        raise RuntimeError(f"not everything came out: {instrumented.target.notes}")
    watched.during(lambda: time.sleep(took))
    add("nothing: gap", watched.gap)


def kernels(watched: Watched, binary: Path, count: int, add: Add) -> None:
    """The same functions, by the kernel's uprobes."""
    first = function(binary, "fn_0")[1]
    names = [f"fn_{i}" if count <= MOST_EVENTS else "fn" for i in range(count)]
    places = [first + FUNCTION_SIZE * i for i in range(count)]
    uprobes = tracefs.Uprobes(
        [tracefs.Uprobe(name, binary, at, "a=%di:s64 b=%si:s64") for name, at in zip(names, places, strict=True)],
        buffer_kb=64,
    )
    watched.during(uprobes.__enter__)
    add("uprobe in: gap", watched.gap)
    watched.during(lambda: uprobes.__exit__(None, None, None))
    add("uprobe out: gap", watched.gap)


# In which case, and how many µs at most.
_BOUNDS = [("1 thread, 1 probe", 1000), ("200 threads, 1 probe", 8000)]


def verdicts(result: Result) -> list[Verdict]:
    found = []
    for case, bound in _BOUNDS:
        for who in ("ptwprobe in: gap", "ptwprobe out: gap"):
            value = result.value(case, who)
            if value is not None:
                text = f"{who}, {case}: {value:,.0f} us (median); bound {bound:,} us"
                found.append(Verdict(value < bound, text))
    return found
