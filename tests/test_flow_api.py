"""Control flow through the public API, against the truth of made-up traces: iterators, and Arrow tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest

import ptwprobe
from ptwprobe.errors import InputError
from ptwprobe.trace.events import BRANCH_KINDS, Branch
from tests.ptgen import KINDS, Made, make
from tests.synth import Session, small_session

LIBC = Path("/lib/x86_64-linux-gnu/libc.so.6")
MAGIC = 0x5054525731


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Three threads at the same time, with hits."""
    options = {"with_": "retc,tsc,mtc,interrupts", "threads": 3, "hits": 60, "words": 2}
    return make(tmp_path_factory.mktemp("flow") / "made", LIBC, seed=5, bytes=60_000, **options)


def true_hits(made: Made, stream: int) -> Iterator[tuple[int, list[int]]]:
    """(branches before its last word, values) of each."""
    words = iter(made.hits(stream))
    for header in words:
        assert header.value & 0xFF_FFFF_FFFF == MAGIC
        values = [next(words) for _ in range(header.value >> 40 & 0xFF)]
        yield [header, *values][-1].branches, [word.value for word in values]


def as_truth(branch: Branch) -> tuple[int, int, int]:
    return branch.from_addr or 0, branch.to_addr or 0, KINDS.index(branch.kind)


def test_kinds_of_branches_have_the_same_names_everywhere() -> None:
    assert BRANCH_KINDS == KINDS


def test_branches_of_all_threads_come_by_time_and_are_the_true_ones(made: Made) -> None:
    branches = list(ptwprobe.open(made.perf_data).branches())
    times = [branch.ns for branch in branches if branch.ns is not None]
    assert times == sorted(times)
    threads = [stream["tid"] for stream in made.truth["streams"]]
    assert len(threads) == 3
    for stream, tid in enumerate(threads):
        own = [as_truth(branch) for branch in branches if branch.tid == tid]
        assert own == made.branches(stream)
    assert sum(len(made.branches(stream)) for stream in range(3)) == len(branches)
    # They ran side by side, so their branches are mixed.
    changes = sum(a.tid != b.tid for a, b in itertools.pairwise(branches))
    assert changes > 10
    assert {branch.pid for branch in branches} == {made.truth["pid"]}


def test_hits_are_the_true_ones_and_nothing_is_lost(made: Made) -> None:
    trace = ptwprobe.open(made.perf_data, jobs=2)
    hits = list(trace.hits())
    for stream, described in enumerate(made.truth["streams"]):
        own = [list(hit.args.values()) for hit in hits if hit.tid == described["tid"]]
        assert own == [values for _, values in true_hits(made, stream)]
    assert list(trace.losses()) == []


def test_the_table_of_branches_is_what_the_iterator_gives(made: Made) -> None:
    trace = ptwprobe.open(made.perf_data)
    table = pyarrow.table(trace.branches_arrow())
    table.validate(full=True)
    assert table.column_names == ["ns", "pid", "tid", "cpu", "from_addr", "to_addr", "kind"]
    branches = list(trace.branches())
    rows = zip(*(table[name].to_pylist() for name in table.column_names), strict=True)
    wanted = ((b.ns, b.pid, b.tid, None if b.cpu < 0 else b.cpu, b.from_addr, b.to_addr, b.kind) for b in branches)
    assert list(rows) == list(wanted)


def test_the_table_is_read_once_batch_by_batch_or_not_at_all(made: Made) -> None:
    trace = ptwprobe.open(made.perf_data)
    stream = trace.branches_arrow()
    batches = pyarrow.RecordBatchReader.from_stream(stream)
    first = batches.read_next_batch()
    assert 0 < first.num_rows <= 1 << 16
    del batches
    assert first.column("from_addr")[0].is_valid
    with pytest.raises(Exception, match="read already"):
        pyarrow.table(stream)
    capsule = trace.branches_arrow().__arrow_c_stream__()
    assert "arrow_array_stream" in repr(capsule)


def test_the_table_of_hits_has_a_typed_column_for_each_argument(tmp_path: Path) -> None:
    folder = small_session(tmp_path / "small.ptw")
    table = pyarrow.table(ptwprobe.open(folder).hits_arrow())
    table.validate(full=True)
    types = {field.name: str(field.type) for field in table.schema}
    assert types == {
        **{"ns": "uint64", "pid": "uint32", "tid": "uint32", "cpu": "uint32"},
        **{"comm": "string", "event": "string", "ip": "uint64"},
        **{"size": "uint64", "flags": "uint32", "delta": "int8", "words": "list<item: uint64 not null>"},
    }
    rows = table.to_pylist()
    hits = list(ptwprobe.open(folder).hits())
    assert len(rows) == len(hits)
    for row, hit in zip(rows, hits, strict=True):
        assert {name: row[name] for name in ("size", "flags", "delta") if row[name] is not None} == hit.args
        assert (row["ns"], row["tid"], row["comm"], row["event"], row["ip"]) == (
            *(hit.ns, hit.tid, hit.comm, hit.event, hit.ip),
        )
        assert row["words"] == []


def test_arguments_that_no_session_names_are_in_words(made: Made) -> None:
    trace = ptwprobe.open(made.perf_data)
    words = pyarrow.table(trace.hits_arrow())["words"].to_pylist()
    assert words == [list(hit.args.values()) for hit in trace.hits()]


def test_a_session_without_control_flow_says_so(tmp_path: Path) -> None:
    trace = ptwprobe.open(small_session(tmp_path / "small.ptw"))
    for ask in (lambda: next(trace.branches()), trace.branches_arrow):
        with pytest.raises(InputError, match="no control flow in it, it was recorded through channel ring"):
            ask()


def test_losses_are_told_with_their_place(tmp_path: Path) -> None:
    losses = list(ptwprobe.open(small_session(tmp_path / "small.ptw")).losses())
    words = [loss.what for loss in losses]
    assert words == ["lost", "torn", "incomplete", "overflow", "bad-packet"]
    assert losses[0].message == "5 hits found no room"
    assert all(loss.file_offset for loss in losses[2:])


def test_files_that_are_not_there_leave_holes_that_are_told(made: Made, tmp_path: Path) -> None:
    trace = ptwprobe.open(made.perf_data, root=tmp_path)
    kinds = {loss.what for loss in trace.losses()}
    assert kinds == {"no-code"}
    assert len(list(trace.hits())) == sum(len(list(true_hits(made, stream))) for stream in range(3))


def test_an_empty_session_has_empty_tables(tmp_path: Path) -> None:
    session = Session(tmp_path / "s.ptw")
    session.raw(100, b"", 0)
    table = pyarrow.table(ptwprobe.open(session.finish()).hits_arrow())
    assert table.num_rows == 0
    assert "event" in table.column_names
