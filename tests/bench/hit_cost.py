"""``hit-cost``: what one hit of a probe with two arguments adds to a call, for ours and for every peer that is here.

Each participant probes a fresh process of one program on three kinds of sites: a function that starts with a ``mov``
(which the kernel must single-step for a uprobe), with a ``push`` (which it emulates) and with a 5-byte NOP (which it
optimizes). LTTng's static tracepoint is compiled into a program of its own. The figure of a run is the median burst
with the probe less the median burst of an unprobed twin in the same process; everybody takes a turn in each run.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.bench import ours
from tests.bench.table import Result, Row, Verdict
from tests.peers import Peer
from tests.peers.bpftrace import Bpftrace
from tests.peers.frida import Frida
from tests.peers.lttng import PROGRAM as LTTNG_PROGRAM
from tests.peers.lttng import Lttng
from tests.peers.uprobe import ClassicUprobe
from tests.progs.build import build
from tests.targets import Target

SITES = ["mov", "push", "nop5"]
TRACEPOINT = "tracepoint"


@dataclass(frozen=True)
class Load:
    """``rounds`` bursts of ``calls`` calls per site, with ``pause_ms`` before each."""

    calls: int
    rounds: int
    pause_ms: int = 4

    @property
    def hits(self) -> int:
        """Of all sites of a process: each has one burst to warm up."""
        return self.calls * (self.rounds + 1)

    def words(self) -> list[str]:
        return [str(self.calls), str(self.rounds), str(self.pause_ms)]


FAST = Load(20_000, 60)
# Traps cost microseconds: fewer of them say as much.
SLOW = Load(5_000, 8)


class WrongCountError(RuntimeError):
    """A participant saw other hits than there were, so its time means nothing."""


def measure(binary: Path, peer: Peer, load: Load) -> dict[str, float]:
    """One turn of one participant: ns per hit over the bare call, by site."""
    with Target([str(binary), *load.words()], wait_s=20) as target:
        with peer.attached(target, binary, [f"{site}_site" for site in SITES]) as hits:
            target.go()
            times = target.wait_for("{")
            seen = hits()
        target.finish()
        if target.exit_code:
            raise WrongCountError(f"the program's results are wrong: exit code {target.exit_code}")
    if seen is not None and seen != load.hits * len(SITES):
        raise WrongCountError(f"{seen} hits, not {load.hits * len(SITES)}")
    return _over_bare(times)


def measure_tracepoint(binary: Path, peer: Lttng, load: Load) -> dict[str, float]:
    with (
        peer.recording() as (environment, discarded),
        Target([str(binary), *load.words()], wait_s=120, env=environment) as target,
    ):
        target.go()
        times = target.wait_for("{")
        target.finish()
        if discarded():
            raise WrongCountError(f"{discarded()} events discarded")
    return _over_bare(times)


def _over_bare(line: str) -> dict[str, float]:
    """The program's JSON line → per case, ns of the probed function over the bare one."""
    return {
        case: statistics.median(times["probed"]) - statistics.median(times["bare"])
        for case, times in json.loads(line).items()
    }


def run(runs: int) -> Result:
    result = Result("hit-cost")
    with tempfile.TemporaryDirectory() as folder:
        binary = build("hitcost", Path(folder))
        turns: dict[str, Callable[[], dict[str, float]]] = {}
        participants: list[tuple[Peer, Load]] = [
            *((variant, FAST) for variant in ours.variants()),
            (ClassicUprobe(), SLOW),
            (Bpftrace(), SLOW),
            (Frida(), FAST),
        ]
        for peer, load in participants:
            if why := peer.missing():
                result.notes.append(f"{peer.name}: {why}")
            else:
                turns[peer.name] = lambda peer=peer, load=load: measure(binary, peer, load)  # type: ignore[misc]
        lttng = Lttng()
        if why := lttng.missing():
            result.notes.append(f"{lttng.name}: {why}")
        else:
            traced = build(LTTNG_PROGRAM, Path(folder))
            turns[lttng.name] = lambda: measure_tracepoint(traced, lttng, FAST)
        result.rows = take_turns(turns, runs, result.notes)
    result.verdicts = verdicts(result)
    return result


# What a participant that does not work ends in.
_FAILURES = (RuntimeError, EOFError, TimeoutError)


def take_turns(turns: dict[str, Callable[[], dict[str, float]]], runs: int, notes: list[str]) -> list[Row]:
    """Everybody in turn, ``runs`` times. A peer that fails drops out with a note; ours may not fail."""
    values: dict[tuple[str, str], list[float]] = {}
    for _ in range(runs):
        for who in list(turns):
            try:
                times = again_if_spoiled(who, turns[who], notes)
            except _FAILURES as error:
                if _is_ours(who):
                    raise
                notes.append(f"{who}: {error}")
                del turns[who]
                continue
            for case, ns in times.items():
                values.setdefault((who, case), []).append(round(ns, 3))
    return [Row(case, who, "ns", tuple(times)) for (who, case), times in values.items()]


def again_if_spoiled(who: str, turn: Callable[[], dict[str, float]], notes: list[str]) -> dict[str, float]:
    """A turn in which hits were lost, as on a busy machine, is no measurement and is taken again, twice at most.

    Peers fail now and then in other ways, too (Frida leaves a program hanging at its end, say) and get the same
    chances; ours may not.
    """
    spoiled = (WrongCountError,) if _is_ours(who) else _FAILURES
    for _ in range(2):
        try:
            return turn()
        except spoiled as error:
            notes.append(f"taken again: {who}: {error}")
    return turn()


def _is_ours(who: str) -> bool:
    return who.startswith("ptwprobe/")


# Who, at most this share of whom, in which case of theirs.
_BOUNDS = [
    ("ptwprobe/ring", 100, "uprobe", "mov"),
    ("ptwprobe/pt-paced", 200, "uprobe", "mov"),
    ("ptwprobe/pt-unpaced", 1000, "uprobe", "mov"),
    ("ptwprobe/ring", 2, "lttng-ust", TRACEPOINT),
]


def verdicts(result: Result) -> list[Verdict]:
    found = []
    for who, divisor, peer, case in _BOUNDS:
        value, other = result.value("mov", who), result.value(case, peer)
        if value is None or other is None:
            result.notes.append(f"{who} against {peer}: not measured")
            continue
        ratio = other / value if value > 0 else float("inf")
        figures = f"{value:,.1f} of {other:,.1f} ns"
        text = f"{who} on mov costs 1/{ratio:,.1f} of {peer} on {case} ({figures}); bound 1/{divisor}"
        found.append(Verdict(ratio >= divisor, text))
    return found
