"""Stock perf and we read the same words from sessions of real programs, with and without its `q`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli import run
from tests.perfscript import perf_words
from tests.synth import MAGIC

pytestmark = pytest.mark.needs("root", "perf")

SQL = "create table t(a); insert into t values(1),(2),(3); select sum(a) from t;"

COMMANDS = {
    "sqlite3": (["libc:malloc size=$arg1 from=+0(%sp)", "libc:free ptr=$arg1"], ["sqlite3", ":memory:", SQL], b""),
    "threads": (["probe_me a=$arg1 b=$arg2"], ["calls", "4", "20000", "0"], b"g"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_same_words_in_the_same_order(progs: Callable[..., Path], tmp_path: Path, name: str) -> None:
    probes, command, stdin = COMMANDS[name]
    if command[0] == "calls":
        command = [str(progs("calls")), *command[1:]]
    words = [word for probe in probes for word in ("-e", probe)]
    run("record", "-o", tmp_path / "s.ptw", *words, "--", *command, stdin=stdin).good()

    session = json.loads((tmp_path / "s.ptw/session.json").read_text())
    ids = {event["event"]: event["id"] for event in session["events"]}
    ours: dict[int, list[int]] = defaultdict(list)
    for line in run("script", tmp_path / "s.ptw", "--format", "jsonl").good().stdout.splitlines():
        hit = json.loads(line)
        header = ids[hit["event"]] << 48 | len(hit["args"]) << 40 | MAGIC
        ours[hit["tid"]] += [header, *(int(value) for value in hit["args"].values())]
    assert sum(len(values) for values in ours.values()) > 300

    for itrace in ("we", "qwe"):
        theirs: dict[int, list[int]] = defaultdict(list)
        for _comm, tid, _ns, payload, _ip in perf_words(tmp_path / "s.ptw/perf.data", itrace):
            theirs[tid].append(payload)
        assert theirs == ours
