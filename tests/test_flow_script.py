"""``script --flow``: branches among the hits, in every format."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import ptwprobe
from tests.cli import Totals, run
from tests.peers.perfpt import PerfPt
from tests.ptgen import KINDS, Branch, Made, make
from tests.synth import small_session
from tests.test_flow_api import LIBC, true_hits


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    options = {"with_": "retc,tsc,mtc,interrupts", "threads": 2, "hits": 40, "words": 2}
    return make(tmp_path_factory.mktemp("flow") / "made", LIBC, seed=6, bytes=40_000, **options)


def objects(made: Made, *words: str) -> list[dict[str, Any]]:
    done = run("script", made.perf_data, "--format", "jsonl", *words).good()
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "packets", ["tsc", "tsc,mtc", "tsc,mtc,cyc,cbr", "tsc,mtc,cyc,cbr,ovf,interrupts,noptwip,misc"]
)
def test_hits_have_the_same_times_with_and_without_the_flow(tmp_path: Path, packets: str) -> None:
    made = make(tmp_path, LIBC, seed=3, bytes=100_000, hits=300, words=1, with_=f"retc,{packets}")
    times = []
    for words in (("--flow",), ()):
        # Overflows are errors of the trace.
        lines = map(json.loads, run("script", made.perf_data, "--format", "jsonl", *words).stdout.splitlines())
        times.append([(line["time"], line["args"]) for line in lines if line["type"] == "hit"])
    with_flow, without = times
    assert with_flow == without
    assert len(with_flow) > 100
    assert len({time for time, _ in with_flow}) > (90 if "mtc" in packets else 10)


def branch_of(line: dict[str, Any]) -> Branch:
    start, to = (int(line[end] or "0", 16) for end in ("from", "to"))
    return Branch(start, to, KINDS.index(line["kind"]))


def test_branches_and_hits_stand_in_program_order(made: Made) -> None:
    lines = objects(made, "--flow")
    for stream, described in enumerate(made.truth["streams"]):
        own = [line for line in lines if line["tid"] == described["tid"]]
        assert [branch_of(line) for line in own if line["type"] == "branch"] == made.branches(stream)
        places, before = [], 0
        for line in own:
            if line["type"] == "branch":
                before += 1
            elif line["type"] == "hit":
                values = [int(value) for value in line["args"].values()]
                places.append((before, values))
        assert places == list(true_hits(made, stream))
    assert {line["comm"] for line in lines} == {"ptgen"}


def test_text_names_functions(made: Made) -> None:
    done = run("script", made.perf_data, "--flow", "--only", "calls").good()
    lines = done.stdout.decode().splitlines()
    calls = [b for stream in range(2) for b in made.branches(stream) if KINDS[b.kind] in ("call", "indirect-call")]
    assert len(lines) == len(calls)
    line = re.compile(r" +ptgen +\d+ \[---\] +\d+\.\d{9}: branch: (?:indirect-)?call [0-9a-f]+.* => [0-9a-f]+.*")
    assert all(line.fullmatch(text) for text in lines)
    assert any(re.search(r"=> [0-9a-f]+ \w+\+0x0$", text) for text in lines)
    assert done.totals == Totals(0, 0, 0, 0, 0)


def test_csv_has_the_columns_of_a_branch_behind_the_others(made: Made) -> None:
    done = run("script", made.perf_data, "--format", "csv", "--flow").good()
    rows = list(csv.DictReader(io.StringIO(done.stdout.decode())))
    own = [row for row in rows if row["type"] == "branch" and row["tid"] == str(made.truth["streams"][0]["tid"])]
    found = [Branch(int(r["from"] or "0", 16), int(r["to"] or "0", 16), KINDS.index(r["kind"])) for r in own]
    assert found == made.branches(0)
    assert all(None not in row and None not in row.values() for row in rows)


def test_what_is_shown_can_be_chosen_by_words_and_by_letters_of_perf(made: Made) -> None:
    def kinds(only: str) -> Counter[str]:
        return Counter(line.get("kind", line["type"]) for line in objects(made, "--only", only))

    truth = Counter(KINDS[branch.kind] for stream in range(2) for branch in made.branches(stream))
    hits = sum(len(list(true_hits(made, stream))) for stream in range(2))
    assert kinds("branches") == kinds("b") == truth
    assert kinds("hits") == kinds("w") == {"hit": hits}
    assert kinds("returns,hits") == {"return": truth["return"], "hit": hits}
    assert kinds("interrupts") == {"interrupt": truth["interrupt"]}
    assert kinds("cr").keys() <= {*("call", "indirect-call", "syscall", "interrupt", "trace-end")} | {
        *("return", "far-return", "trace-start"),
    }
    assert kinds("e") == {}
    done = run("script", made.perf_data, "--only", "everything")
    assert done.exit_code == 2
    assert "--only everything: not known" in done.stderr


def test_filters_are_for_branches_too(made: Made) -> None:
    tid = made.truth["streams"][1]["tid"]
    lines = objects(made, "--flow", "--tid", str(tid))
    assert [branch_of(line) for line in lines if line["type"] == "branch"] == made.branches(1)
    times = sorted({int(line["time"]) for line in lines})
    middle = times[len(times) // 2]
    early = objects(made, "--flow", "--tid", str(tid), "--time", f",{middle}")
    assert early == [line for line in lines if int(line["time"]) <= middle]
    none = objects(made, "--flow", "--event", "no/such")
    assert {"branch"} <= {line["type"] for line in none} <= {"branch", "event"}


def test_indentation_follows_calls(made: Made) -> None:
    tid = made.truth["streams"][0]["tid"]
    done = run("script", made.perf_data, "--indent", "--tid", str(tid), "--only", "calls,returns").good()
    found = [
        (len(match[1]) // 2, match[2])
        for line in done.stdout.decode().splitlines()
        if (match := re.search(r"branch: ( *)((?:indirect-)?call|return) ", line))
    ]
    stack: list[int] = []
    wanted = []
    for branch in made.branches(0):
        kind = KINDS[branch.kind]
        if kind in ("call", "indirect-call"):
            wanted.append((len(stack), kind))
            stack.append(branch.from_addr)
        elif kind == "return":
            fits = [at for at, call in enumerate(stack) if 0 <= branch.to_addr - call <= 15]
            del stack[fits[-1] if fits else len(stack) :]
            wanted.append((len(stack), kind))
    assert found == wanted
    assert max(depth for depth, _ in found) > 3


def test_each_hit_has_the_calls_that_led_to_it(made: Made) -> None:
    lines = objects(made, "--stack", "--only", "hits,branches")
    calls: dict[int, list[int]] = {}
    checked = 0
    for line in lines:
        stack = calls.setdefault(line["tid"], [])
        if line["type"] == "hit":
            assert [int(frame["ip"], 16) for frame in line["stack"]][1:] == stack[::-1]
            assert line["stack"][0]["ip"] == line["ip"]
            checked += bool(stack)
        elif line["kind"] in ("call", "indirect-call"):
            stack.append(int(line["from"], 16))
        elif line["kind"] == "return":
            fits = [at for at, call in enumerate(stack) if 0 <= int(line["to"], 16) - call <= 15]
            del stack[fits[-1] if fits else len(stack) :]
    assert checked > 5
    text = run("script", made.perf_data, "--stack", "--only", "hits").good().stdout.decode()
    assert re.search(r"id/\d+: \([0-9a-f]+\) arg1=0x[0-9a-f]+\n\t +[0-9a-f]+ ", text)


def test_a_session_without_control_flow_is_shown_as_ever_and_says_so(tmp_path: Path) -> None:
    folder = small_session(tmp_path / "small.ptw")
    plain, flow = (run("script", folder, "--format", "jsonl", *words) for words in ([], ["--flow"]))
    # What stands behind bytes that are no packet is not counted again.
    assert flow.stdout.splitlines() == [line for line in plain.stdout.splitlines() if b"skipped" not in line]
    assert flow.exit_code == plain.exit_code == 1
    assert (flow.totals.hits, flow.totals.lost, flow.totals.stray) == (5, 5, 1)
    assert "no control flow in it: it was recorded through channel ring" in flow.stderr
    assert "no control flow" not in plain.stderr


def test_missing_code_is_told_and_hits_are_all_there(made: Made, tmp_path: Path) -> None:
    done = run("script", made.perf_data, "--flow", "--root", tmp_path, "--only", "w")
    assert done.exit_code == 1
    assert done.totals.errors > 0
    assert done.totals.hits == run("script", made.perf_data).good().totals.hits
    assert "its code is unknown" in done.stderr


@pytest.mark.skipif(bool(PerfPt.missing()), reason=f"perf: {PerfPt.missing()}")
def test_perf_finds_the_same_branches(made: Made, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    one = make(tmp_path / "one" / "made", LIBC, seed=7, bytes=40_000, with_="retc,tsc", hits=0)
    decoded = PerfPt(tmp_path).decode(one.perf_data, "be", lists=True)
    assert decoded.lists
    theirs = list(zip(decoded.lists.branches.source, decoded.lists.branches.target, strict=True))
    ours = [(b.from_addr or 0, b.to_addr or 0) for b in ptwprobe.open(one.perf_data).branches()]
    assert theirs == ours
