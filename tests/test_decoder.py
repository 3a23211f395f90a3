"""The decoder against the truth: made-up traces over real programs, with everything in them by chance; and against
perf and libipt, with everything that they can decode.

``python -m tests.full decoder`` runs 200 seeds of 1 MB.
"""

from __future__ import annotations

import shutil
import struct
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ptwprobe._native import FlowReader
from ptwprobe.trace.session import NativeStub
from tests.peers.auxdata import AuxData
from tests.peers.flow import Branches, Decoded
from tests.peers.ipt import Ipt
from tests.peers.perfpt import PerfPt
from tests.ptgen import KINDS, Made, generator, make

RECORD = 24
LIBC = Path("/lib/x86_64-linux-gnu/libc.so.6")


def programs() -> list[Path]:
    """C, C++, a big interpreter, Rust."""
    return [
        LIBC,
        Path("/usr/lib/x86_64-linux-gnu/libstdc++.so.6"),
        Path("/usr/bin/python3").resolve(),
        generator(),
    ]


@dataclass
class Flow:
    """One stream as it was decoded."""

    branches: bytes = b""
    words: list[tuple[int, int, int]] = field(default_factory=list)
    """(branches before it, value, address or 0)"""
    errors: list[str] = field(default_factory=list)
    overflows: int = 0

    @property
    def count(self) -> int:
        return len(self.branches) // RECORD


def decode(perf_data: Path, jobs: int = 1, stubs: Sequence[NativeStub] = ()) -> list[Flow]:
    reader = FlowReader(str(perf_data), jobs=jobs, stubs=list(stubs))
    flows = []
    for stream in range(len(reader.streams())):
        flow = Flow()
        chunks = []
        before = 0
        while (batch := reader.next_batch(stream)) is not None:
            data, _, marks = batch
            for at, _, offset, kind, value, ip in marks:
                if kind == "word":
                    flow.words.append((before + at, int(value), ip or 0))
                elif kind == "overflow":
                    flow.overflows += 1
                elif kind in ("error", "missing"):
                    flow.errors.append(f"{value} (byte {offset})")
            chunks.append(data)
            before += len(data) // RECORD
        flow.branches = b"".join(chunks)
        flows.append(flow)
    assert not reader.notes()
    return flows


@dataclass(frozen=True)
class Unknown:
    """A part of the truth that no decoder can know: branches ``first`` up to ``until``."""

    first: int
    until: int
    hits: range


def unknown(made: Made, stream: int) -> list[Unknown]:
    """Behind an overflow the CPU says where it is. Behind cut bytes a decoder may be astray up to the next PSB that
    tells an address in code that it can read."""
    truth = made.branches(stream)
    hidden = [] if made.truth["visible"] else [range(stub["start"], stub["end"]) for stub in made.truth["stubs"]]
    parts = []
    for loss in made.losses(stream):
        first, until, hits = loss["first"], loss["end"], loss["hits"]
        # Nothing tells of direct branches without a packet behind them.
        while first and KINDS[truth[first - 1].kind] in ("jump", "call"):
            first -= 1
        if loss["what"] == "cut":
            psbs = (psb for psb in made.psbs(stream) if psb.branches >= loss["until"])
            last = next((psb for psb in psbs if not any(psb.ip in stub for stub in hidden)), None)
            until = last.branches if last else len(truth)
            hits = [hits[0], max(hits[1], last.hits if last else len(made.hits(stream)))]
        parts.append(Unknown(first, until, range(*hits)))
    return parts


def assert_true(flow: Flow, made: Made, stream: int = 0) -> None:
    """Outside what nobody can know, every branch and every word is there, and nothing else."""
    truth = made.branch_bytes(stream)
    total = len(truth) // RECORD
    parts = unknown(made, stream)
    begin, at = 0, 0
    for part in [*parts, Unknown(total, total, range(0))]:
        # What is sure runs up to here ...
        sure = truth[begin * RECORD : part.first * RECORD]
        found = flow.branches.find(sure, at * RECORD)
        while found > 0 and found % RECORD:
            found = flow.branches.find(sure, found + 1)
        assert found >= 0, f"branches {begin} to {part.first} are not there from {at} on: {flow.errors[:3]}"
        assert begin or found == 0
        at = (found + len(sure)) // RECORD
        # ... and goes on behind what is not.
        begin = max(begin, part.until)
    assert at == flow.count or (parts and parts[-1].until == total)
    hits = made.hits(stream)
    words = [(value, ip) for _, value, ip in flow.words]
    if parts:
        lost = {number for part in parts for number in part.hits}
        remaining = iter(words)
        for number, hit in enumerate(hits):
            assert number in lost or (hit.value, hit.ip) in remaining, f"hit {number} is not there"
    else:
        assert not flow.errors
        assert words == [(hit.value, hit.ip) for hit in hits]
        places = [(before, value) for before, value, ip in flow.words if ip]
        assert places == [(hit.branches, hit.value) for hit in hits if hit.ip]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(200 if metafunc.config.getoption("--full") else 4))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """What goes in here is too much to be kept."""
    yield tmp_path / "trace"
    shutil.rmtree(tmp_path / "trace", ignore_errors=True)


def test_all_that_happens_is_decoded(folder: Path, seed: int) -> None:
    elf = programs()[seed % 4]
    made = make(folder, elf, "--all", seed=seed, bytes=1_000_000, hits=200)
    print(f"{elf.name}: {made.truth['features']}")
    flows = decode(made.perf_data)
    assert len(flows) == len(made.truth["streams"])
    for stream, flow in enumerate(flows):
        assert_true(flow, made, stream)
    assert decode(made.perf_data, jobs=3) == flows


LOSSES = "ovf,cut"
PERF_CANNOT = f"{LOSSES},deferret,mwait,filter,stop"
LIBIPT_CANNOT = f"{LOSSES},deferret,mwait,blocks,events,retpoline,longjmp,coroutines"
"""What they do not know, or take for something else: the generator tells the details."""


@pytest.mark.skipif(bool(PerfPt.missing()), reason=f"perf: {PerfPt.missing()}")
def test_perf_agrees(folder: Path, tmp_path: Path, seed: int, full: bool) -> None:
    made = make_for_peers(folder, seed, PERF_CANNOT, full)
    agree(made, PerfPt(tmp_path).decode(made.perf_data, "bwe", lists=True), kinds=False)


@pytest.mark.skipif(bool(Ipt.missing()), reason=f"libipt: {Ipt.missing()}")
def test_libipt_agrees(folder: Path, tmp_path: Path, seed: int, full: bool) -> None:
    made = make_for_peers(folder, seed, LIBIPT_CANNOT, full)
    aux = AuxData.read(made.perf_data)
    agree(made, Ipt(tmp_path).decode("insns", folder / "aux.bin", aux.images, lists=True), kinds=True)


def make_for_peers(folder: Path, seed: int, without: str, full: bool) -> Made:
    elf = programs()[seed % 4]
    size = 1_000_000 if full else 200_000
    made = make(folder, elf, "--all", "--without", without, seed=seed, bytes=size, hits=200, stubs="visible")
    print(f"{elf.name}: {made.truth['features']}")
    return made


def agree(made: Made, peer: Decoded, *, kinds: bool) -> None:
    """Ours, the peer's and the truth are the same, branch for branch and word for word; ``kinds``: it tells them."""
    (flow,) = decode(made.perf_data)
    assert_true(flow, made)
    assert (peer.errors, peer.first_errors) == (0, [])
    assert peer.lists
    ends = array("Q", flow.branches)
    ours = Branches(ends[0::3], ends[1::3], ends[2::3])
    assert ours.pairs() == peer.lists.branches.pairs()
    if kinds:
        assert ours.third == peer.lists.branches.third
    assert [value for _, value, _ in flow.words] == [hit.value for hit in peer.lists.hits]
    # Nothing tells where a word without an address belongs.
    both = zip(flow.words, peer.lists.hits, strict=True)
    assert all(word == (hit.branches, hit.value, hit.ip) for word, hit in both if word[2])


@pytest.mark.parametrize("stubs", ["visible", "invisible"])
@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("psb", [4096, 16384])
@pytest.mark.parametrize("interrupted", [False, True])
def test_hits_cost_nothing(tmp_path: Path, stubs: str, words: int, psb: int, interrupted: bool) -> None:
    """Whether the stub can be read or not."""
    options = ["--stub-break"] if interrupted else []
    made = make(tmp_path, LIBC, *options, preset="tolerance", stubs=stubs, words=words, psb=psb, bytes=1_000_000)
    (flow,) = decode(made.perf_data)
    assert len(flow.words) > 10 * words
    assert_true(flow, made)


@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("interrupted", [False, True])
def test_hits_cost_nothing_where_a_session_tells_of_stubs_that_cannot_be_read(
    tmp_path: Path, words: int, interrupted: bool
) -> None:
    options = ["--stub-break"] if interrupted else []
    made = make(tmp_path, LIBC, *options, preset="tolerance", stubs="invisible", words=words, bytes=1_000_000)
    pid = made.truth["streams"][0]["tid"]
    stubs = [(pid, stub["start"], stub["end"], stub["site"], stub["continue"]) for stub in made.truth["stubs"]]
    (flow,) = decode(made.perf_data, stubs=stubs)
    assert not flow.errors
    # Direct jumps up to the site now come before what happens in the stub: each is there, once.
    assert Counter(records(flow.branches)) == Counter(records(made.branch_bytes()))
    assert [(value, ip) for _, value, ip in flow.words] == [(hit.value, hit.ip) for hit in made.hits()]
    assert decode(made.perf_data, jobs=3, stubs=stubs) == [flow]


def records(branches: bytes) -> list[tuple[int, int, int]]:
    return list(struct.iter_unpack("<QQQ", branches))
