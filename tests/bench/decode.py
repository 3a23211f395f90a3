"""``decode``: how fast whole traces are decoded, by ours and by the stock decoders, on the same files in one run.

"uniform": every conditional branch either way, over all of libc. "hot": few functions, biased branches. "full": what a
real session has: compressed returns, times, PTWRITEs with their addresses, system calls. libipt's block decoder gives
blocks, not branches, and is the fastest way through code that it has; perf's branch samples are dropped at once.

All times but those of two cores are CPU time, and speed is the bytes, or the true branches, of the trace over it. With
two cores it is the time that passed, which suffers from whatever else the machine does: steal time stands beside it.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.bench import decoder
from tests.bench.decoder import Ours, ours
from tests.bench.table import Result, Row, Verdict
from tests.bench.traces import Trace, generate
from tests.peers.ipt import Ipt
from tests.peers.perfpt import PerfPt

WORKLOADS = ["uniform", "hot", "full"]
MEGABYTES = 32
BIG_MEGABYTES = 1024
HITS_PER_MEGABYTE = 2400
BLOCKS, PACKETS = "libipt/blocks", "libipt/packets"
PERF, PERF_VALUES = "perf/b", "perf/qwe"
ONE, TWO, ONE_WALL, VALUES = "ptwprobe", "ptwprobe/2 cores", "ptwprobe/1 core, wall", "ptwprobe/values"


class WrongBranchesError(RuntimeError):
    """Ours found something else than the truth, so its time means nothing."""


@dataclass
class Turns:
    """Everybody's seconds by workload: (workload, who) → one figure a run."""

    seconds: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, workload: str, who: str, seconds: float) -> None:
        self.seconds.setdefault((workload, who), []).append(seconds)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def run(runs: int) -> Result:
    result = Result("decode")
    turns = Turns()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        participants = present(folder, turns)
        traces = {name: made(folder / name, name, MEGABYTES) for name in WORKLOADS}
        before = stolen()
        for _ in range(runs):
            for workload, trace in traces.items():
                for turn in participants:
                    turn(workload, trace)
        result.notes.append(f"steal time: {share(before, stolen()):.1%} of the CPU time during the measurements")
        result.rows = rows(turns, traces)
        result.verdicts = verdicts(turns)
        if decoder.COMPLETE:
            peak(folder, traces, result)
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
        (decoder.NAME, decoder.missing(), lambda workload, trace: ours_turn(workload, trace, turns)),
    ):
        if why:
            turns.note(f"{who}: {why}")
        else:
            found.append(turn)
    return found


def libipt_turn(ipt: Ipt, workload: str, trace: Trace, turns: Turns) -> None:
    for who, mode in ((BLOCKS, "blocks"), (PACKETS, "packets")):
        decoded = ipt.decode(mode, trace.aux, trace.images, timeout_s=600)
        if decoded.errors:
            turns.note(f"{who} on {workload}: {decoded.errors} errors, {decoded.first_errors[0]}")
        turns.add(workload, who, decoded.cpu_s)


def perf_turn(perf: PerfPt, workload: str, trace: Trace, turns: Turns) -> None:
    for who, itrace in ((PERF, "b"), (PERF_VALUES, "qwe")):
        decoded = perf.decode(trace.perf_data, itrace, timeout_s=600)
        if itrace == "b" and decoded.branches != trace.branches:
            turns.note(f"{who} on {workload}: {decoded.branches:,} branches of {trace.branches:,}")
        turns.add(workload, who, decoded.cpu_s)


def ours_turn(workload: str, trace: Trace, turns: Turns) -> None:
    one = right(workload, trace, ours(trace, 1))
    turns.add(workload, ONE, one.cpu_s)
    if decoder.COMPLETE:
        turns.add(workload, ONE_WALL, one.wall_s)
        turns.add(workload, TWO, right(workload, trace, ours(trace, 2)).wall_s)
        values = ours(trace, 1, walk=False)
        turns.add(workload, VALUES, values.cpu_s)
        if values.hits != trace.hits:
            raise WrongBranchesError(f"{workload}: {values.hits} hits without a walk, not {trace.hits}")


def right(workload: str, trace: Trace, done: Ours) -> Ours:
    if (done.branches, done.hits) != (trace.branches, trace.hits):
        found = f"{done.branches} branches and {done.hits} hits, not {trace.branches} and {trace.hits}"
        raise WrongBranchesError(f"{workload}: {found}")
    return done


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


def verdicts(turns: Turns) -> list[Verdict]:
    found = []
    for who, bound, other, workload in _BOUNDS:
        mine, theirs = turns.seconds.get((workload, who)), turns.seconds.get((workload, other))
        if mine is None or theirs is None:
            turns.note(f"{who} against {other} on {workload}: not measured")
            continue
        # Those of one run stand beside each other: the machine was the same for both.
        ratio = statistics.median([there / here for here, there in zip(mine, theirs, strict=True)])
        text = f"{who} is {ratio:.2f} times as fast as {other} on {workload}; bound {bound:g}"
        found.append(Verdict(ratio >= bound, text))
    return found


_RSS_BOUND_MB = 200


def peak(folder: Path, traces: dict[str, Trace], result: Result) -> None:
    """The memory that a file of a gigabyte takes."""
    for trace in traces.values():
        trace.perf_data.unlink()
    big = made(folder / "big", "full", BIG_MEGABYTES)
    for jobs in (1, 2):
        peak_mb = round(ours(big, jobs, timeout_s=1800).peak_kb / 1024, 1)
        cores = f"{jobs} core{'s' * (jobs > 1)}"
        result.rows.append(Row(f"peak memory, {BIG_MEGABYTES} MB", f"{decoder.NAME}/{cores}", "MB", (peak_mb,)))
        text = f"{peak_mb:,.0f} MB of memory for a trace of {BIG_MEGABYTES} MB, {cores}; bound {_RSS_BOUND_MB}"
        result.verdicts.append(Verdict(peak_mb < _RSS_BOUND_MB, text))


def stolen() -> tuple[int, int]:
    """Ticks of all cores that somebody else's virtual machine had, and all ticks (proc(5))."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[7], sum(ticks)


def share(before: tuple[int, int], after: tuple[int, int]) -> float:
    return (after[0] - before[0]) / max(1, after[1] - before[1])
