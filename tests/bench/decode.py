"""``decode``: how fast whole traces are decoded, by ours and by the stock decoders, on the same files in one run.

"uniform": every conditional branch either way, over all of libc. "hot": few functions, biased branches. "full": what a
real session has: compressed returns, times, PTWRITEs with their addresses, system calls. libipt's block decoder gives
blocks, not branches, and is the fastest way through code that it has; perf's branch samples are dropped at once.

All times but those of two cores are CPU time, and speed is the bytes, or the true branches, of the trace over it. With
two cores it is the time that passed, which suffers from whatever else the machine does: steal time stands beside it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench.decoder import Ours, ours
from tests.bench.table import Result, Row, Verdict
from tests.bench.traces import Trace, generate
from tests.peers.ipt import Ipt
from tests.peers.perfpt import PerfPt

WORKLOADS = ["uniform", "hot", "full"]
HITS_PER_MEGABYTE = 2400
BLOCKS, PACKETS, INSNS = "libipt/blocks", "libipt/packets", "libipt/insns"
PERF, PERF_VALUES = "perf/b", "perf/qwe"
ONE, TWO, ONE_WALL, VALUES = "ptwprobe", "ptwprobe/2 cores", "ptwprobe/1 core, wall", "ptwprobe/values"


@dataclass(frozen=True)
class Sizes:
    """Of the traces, in MB. ``quick``: too small for their times and the memory they take to say anything."""

    megabytes: int = 32
    big_megabytes: int = 1024
    quick: bool = False


QUICK = Sizes(megabytes=1, big_megabytes=2, quick=True)


class WrongCountError(RuntimeError):
    """Ours found something else than the truth, so its time means nothing."""


@dataclass
class Turns:
    """Everybody's seconds by workload: (workload, who) → one figure a run."""

    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    branches: dict[tuple[str, str], int] = field(default_factory=dict)
    """What was found: (workload, who) → taken branches."""
    notes: list[str] = field(default_factory=list)

    def add(self, workload: str, who: str, seconds: float) -> None:
        self.seconds.setdefault((workload, who), []).append(seconds)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def run(runs: int, sizes: Sizes = Sizes()) -> Result:
    result = Result("decode", by_case=True)
    turns = Turns()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        participants = present(folder, turns)
        traces = {name: made(folder / name, name, sizes.megabytes) for name in WORKLOADS}
        steal = []
        for _ in range(runs):
            before = stolen()
            for workload, trace in traces.items():
                for turn in participants:
                    turn(workload, trace)
            steal.append(round(100 * share(before, stolen()), 3))
        if not Ipt.missing():
            for workload, trace in traces.items():
                # Blocks are not branches: here is whether libipt sees the same ones.
                turns.branches[workload, INSNS] = Ipt(folder).decode("insns", trace.aux, trace.images).branches
        result.rows = [*rows(turns, traces), Row("steal time", "this machine", "% of CPU time", tuple(steal))]
        result.verdicts = agreement(turns, traces)
        compared, judged = ratios(turns)
        result.rows += compared
        if not sizes.quick:
            result.verdicts += judged
        for trace in traces.values():
            shutil.rmtree(trace.made.folder)
        peak(folder, sizes, result)
    result.notes += turns.notes
    return result


def made(folder: Path, name: str, megabytes: int) -> Trace:
    hits = {"hits": HITS_PER_MEGABYTE * megabytes} if name == "full" else {}
    return generate(folder, name, megabytes, "no-truth", **hits)


def present(folder: Path, turns: Turns) -> list[Callable[[str, Trace], None]]:
    """One turn of each participant that is here; the others are noted."""
    found: list[Callable[[str, Trace], None]] = []
    for who, why, turn in (
        ("libipt", Ipt.missing(), lambda workload, trace: libipt_turn(Ipt(folder), workload, trace, turns)),
        ("perf", PerfPt.missing(), lambda workload, trace: perf_turn(PerfPt(folder), workload, trace, turns)),
    ):
        if why:
            turns.note(f"{who}: {why}")
        else:
            found.append(turn)
    return [*found, lambda workload, trace: ours_turn(workload, trace, turns)]


def libipt_turn(ipt: Ipt, workload: str, trace: Trace, turns: Turns) -> None:
    for who, mode in ((BLOCKS, "blocks"), (PACKETS, "packets")):
        decoded = ipt.decode(mode, trace.aux, trace.images, timeout_s=600)
        if decoded.errors:
            turns.note(f"{who} on {workload}: {decoded.errors} errors, {decoded.first_errors[0]}")
        turns.add(workload, who, decoded.cpu_s)


def perf_turn(perf: PerfPt, workload: str, trace: Trace, turns: Turns) -> None:
    for who, itrace in ((PERF, "b"), (PERF_VALUES, "qwe")):
        decoded = perf.decode(trace.perf_data, itrace, timeout_s=600)
        if itrace == "b":
            turns.branches[workload, who] = decoded.branches
        elif decoded.hits != trace.hits:
            turns.note(f"{who} on {workload}: {decoded.hits:,} PTWRITEs of {trace.hits:,}")
        turns.add(workload, who, decoded.cpu_s)


def ours_turn(workload: str, trace: Trace, turns: Turns) -> None:
    one = right(workload, trace, ours(trace.perf_data, 1))
    turns.branches[workload, ONE] = one.branches
    turns.add(workload, ONE, one.cpu_s)
    turns.add(workload, ONE_WALL, one.wall_s)
    turns.add(workload, TWO, right(workload, trace, ours(trace.perf_data, 2)).wall_s)
    values = ours(trace.perf_data, 1, walk=False)
    turns.add(workload, VALUES, values.cpu_s)
    # The trace may end inside a hit.
    if (values.hits, values.errors) != (trace.hits // trace.words, 0):
        found = f"{values.hits} hits and {values.errors} stray words without a walk"
        raise WrongCountError(f"{workload}: {found}, not {trace.hits // trace.words} hits")


def right(workload: str, trace: Trace, done: Ours) -> Ours:
    if (done.branches, done.hits, done.errors) != (trace.branches, trace.hits, 0):
        found = f"{done.branches} branches, {done.hits} PTWRITEs and {done.errors} errors"
        raise WrongCountError(f"{workload}: {found}, not {trace.branches} and {trace.hits}")
    return done


def agreement(turns: Turns, traces: dict[str, Trace]) -> list[Verdict]:
    """Whether everybody found as many branches as there are."""
    found = []
    for (workload, who), branches in turns.branches.items():
        truth = traces[workload].branches
        text = f"{who} finds {branches:,} taken branches on {workload}, where there are {truth:,}"
        found.append(Verdict(branches == truth, text))
    return found


# Who reads packets only, so that branches per second say nothing.
_NO_WALK = {PACKETS, PERF_VALUES, VALUES}


def rows(turns: Turns, traces: dict[str, Trace]) -> list[Row]:
    found = []
    for (workload, who), seconds in turns.seconds.items():
        trace = traces[workload]
        megabytes = trace.aux.stat().st_size / 1e6
        found.append(Row(workload, who, "MB/s", tuple(round(megabytes / each, 3) for each in seconds)))
        if who not in _NO_WALK:
            rates = tuple(round(trace.branches / 1e6 / each, 3) for each in seconds)
            found.append(Row(f"{workload}, branches", who, "M/s", rates))
    return found


# Who, at least so many times as fast as whom, on which workload.
_BOUNDS = [
    (ONE, 5.0, BLOCKS, "full"),
    (ONE, 8.0, PERF, "full"),
    (ONE, 8.0, BLOCKS, "hot"),
    (VALUES, 6.0, PERF_VALUES, "full"),
    (TWO, 1.8, ONE_WALL, "full"),
    (TWO, 1.8, ONE_WALL, "hot"),
]


def ratios(turns: Turns) -> tuple[list[Row], list[Verdict]]:
    """How many times as fast, run by run, and whether that is enough."""
    found, judged = [], []
    for who, bound, other, workload in _BOUNDS:
        mine, theirs = turns.seconds.get((workload, who)), turns.seconds.get((workload, other))
        if mine is None or theirs is None:
            turns.note(f"{who} against {other} on {workload}: not measured")
            continue
        # Those of one run stand beside each other: the machine was the same for both.
        runs = tuple(round(there / here, 3) for here, there in zip(mine, theirs, strict=True))
        row = Row(f"{workload}, against {other}", who, "times as fast", runs)
        found.append(row)
        text = f"{who} is {row.value:.2f} times as fast as {other} on {workload}; bound {bound:g}"
        judged.append(Verdict(row.value >= bound, text))
    return found, judged


_RSS_BOUND_MB = 200


def peak(folder: Path, sizes: Sizes, result: Result) -> None:
    """The memory that a big file takes."""
    big = made(folder / "big", "full", sizes.big_megabytes)
    for who, jobs, walk in ((ONE, 1, True), (TWO, 2, True), (VALUES, 1, False)):
        peak_mb = round(ours(big.perf_data, jobs, walk=walk, timeout_s=1800).peak_kb / 1024, 1)
        result.rows.append(Row(f"peak memory, {sizes.big_megabytes} MB", who, "MB", (peak_mb,)))
        text = f"{who} takes {peak_mb:,.0f} MB of memory for a trace of {sizes.big_megabytes} MB; bound {_RSS_BOUND_MB}"
        result.verdicts.append(Verdict(peak_mb < _RSS_BOUND_MB, text))


def stolen() -> tuple[int, int]:
    """Ticks of all cores that somebody else's virtual machine had, and all ticks (proc(5))."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[7], sum(ticks)


def share(before: tuple[int, int], after: tuple[int, int]) -> float:
    return (after[0] - before[0]) / max(1, after[1] - before[1])
