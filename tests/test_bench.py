"""The benches themselves: what a result looks like, and that each peer that is here can be measured at all."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from tests.bench import decode, hit_cost, ours
from tests.bench.hit_cost import Load, WrongCountError
from tests.bench.table import Result, Row, Verdict
from tests.peers import Peer
from tests.peers.bpftrace import Bpftrace
from tests.peers.frida import Frida
from tests.peers.ipt import Ipt
from tests.peers.lttng import PROGRAM as LTTNG_PROGRAM
from tests.peers.lttng import Lttng
from tests.peers.perfpt import PerfPt
from tests.peers.uprobe import ClassicUprobe
from tests.progs.build import build

OURS = ours.variants()
TINY = Load(calls=200, rounds=3, pause_ms=0)


def test_json_has_the_promised_shape() -> None:
    result = Result("hit-cost", [Row("mov", "uprobe", "ns", (3.0, 1.0, 2.0))], [Verdict(True, "fine")], ["a note"])
    told = json.loads(result.as_json())
    assert told["bench"] == "hit-cost"
    assert told["rows"] == [{"case": "mov", "who": "uprobe", "value": 2.0, "unit": "ns", "runs": [3.0, 1.0, 2.0]}]
    assert {"cpu", "cores", "kernel", "load"} <= set(told["machine"])


def test_the_table_shows_everybody_and_every_verdict() -> None:
    rows = [Row("mov", "uprobe", "ns", (5000.0,)), Row("tracepoint", "lttng-ust", "ns", (105.5,))]
    out = io.StringIO()
    Result("hit-cost", rows, [Verdict(False, "too slow")], ["x: not installed"]).show(Console(file=out, width=120))
    for text in ("uprobe", "5,000.0", "lttng-ust", "105.5", "FAIL  too slow", "note: x: not installed"):
        assert text in out.getvalue()


def test_a_table_by_case_has_a_column_for_everybody() -> None:
    rows = [Row("kept", "perf", "%", (7.5,)), Row("kept", "libipt", "%", (9.5,)), Row("lost", "libipt", "n", (1.5,))]
    out = io.StringIO()
    Result("tolerance", rows, by_case=True).show(Console(file=out, width=120))
    lines = out.getvalue().splitlines()
    assert any("perf" in line and "libipt" in line for line in lines)
    assert any("kept" in line and "7.5" in line and "9.5" in line for line in lines)


def test_a_bound_is_kept_or_missed_by_ratio_and_a_missing_participant_is_noted() -> None:
    rows = [
        Row("mov", "uprobe", "ns", (6000.0,)),
        Row("mov", "ptwprobe/ring", "ns", (50.0,)),
        Row("mov", "ptwprobe/pt-unpaced", "ns", (8.0,)),
    ]
    result = Result("hit-cost", rows)
    verdicts = hit_cost.verdicts(result)
    assert [verdict.ok for verdict in verdicts] == [True, False]
    assert "1/120.0 of uprobe" in verdicts[0].text
    assert len(result.notes) == 2


@pytest.mark.needs("root")
@pytest.mark.parametrize("peer", [*OURS, ClassicUprobe(), Bpftrace(), Frida()], ids=lambda peer: peer.name)
def test_every_participant_sees_every_hit(progs: Callable[..., Path], peer: Peer) -> None:
    if why := peer.missing():
        pytest.skip(f"{peer.name}: {why}")
    try:
        times = hit_cost.again_if_spoiled(peer.name, lambda: hit_cost.measure(progs("hitcost"), peer, TINY), [])
    except (RuntimeError, EOFError, TimeoutError) as error:
        if peer in OURS:
            raise
        pytest.skip(f"{peer.name} does not work here: {error}")
    assert set(times) == {"mov", "push", "nop5"}


@pytest.mark.needs("root")
def test_lttng_records_its_tracepoint(tmp_path: Path) -> None:
    lttng = Lttng()
    if why := lttng.missing():
        pytest.skip(f"{lttng.name}: {why}")
    assert set(hit_cost.measure_tracepoint(build(LTTNG_PROGRAM, tmp_path), lttng, TINY)) == {"tracepoint"}


@pytest.mark.needs("root", "uprobes")
def test_a_peer_that_misses_hits_is_not_measured(progs: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.tracefs.Uprobes.count", lambda self: 1)
    with pytest.raises(WrongCountError, match="1 hits, not"):
        hit_cost.measure(progs("hitcost"), ClassicUprobe(), TINY)


def test_a_turn_is_taken_again_when_a_peer_hangs_but_not_when_ours_does() -> None:
    answers: list[Exception | dict[str, float]] = [TimeoutError("did not end"), {"mov": 1.0}]

    def turn() -> dict[str, float]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    notes: list[str] = []
    rows = hit_cost.take_turns({"frida": turn}, 1, notes)
    assert [row.value for row in rows] == [1.0]
    assert notes == ["taken again: frida: did not end"]
    answers = [TimeoutError("did not end")]
    with pytest.raises(TimeoutError):
        hit_cost.take_turns({"ptwprobe/ring": turn}, 1, notes)


def test_speeds_are_compared_run_by_run() -> None:
    turns = decode.Turns()
    for who, seconds in ((decode.ONE, (1.0, 2.0, 1.0)), (decode.BLOCKS, (6.0, 12.0, 5.5)), (decode.PERF, (7.0,) * 3)):
        for each in seconds:
            turns.add("full", who, each)
    rows, verdicts = decode.ratios(turns)
    assert [row.runs for row in rows] == [(6.0, 6.0, 5.5), (7.0, 3.5, 7.0)]
    told = {verdict.text: verdict.ok for verdict in verdicts}
    assert told == {
        "ptwprobe is 6.00 times as fast as libipt/blocks on full; bound 5": True,
        "ptwprobe is 7.00 times as fast as perf/b on full; bound 8": False,
    }
    assert "ptwprobe against libipt/blocks on hot: not measured" in turns.notes


def test_steal_time_is_a_share_of_all_time() -> None:
    assert decode.share((10, 1000), (60, 2000)) == 0.05
    assert decode.share((10, 1000), (10, 1000)) == 0


@pytest.mark.needs("cargo")
def test_decoders_that_are_compared_find_the_same_branches() -> None:
    result = decode.run(1, decode.QUICK)
    assert all(verdict.ok for verdict in result.verdicts), result.verdicts
    here = {decode.ONE}
    here |= set() if Ipt.missing() else {decode.INSNS}
    here |= set() if PerfPt.missing() else {decode.PERF}
    agreed = [verdict.text for verdict in result.verdicts if "taken branches" in verdict.text]
    assert len(agreed) == len(here) * len(decode.WORKLOADS)
    assert {"steal time", "peak memory, 2 MB"} <= {row.case for row in result.rows}
