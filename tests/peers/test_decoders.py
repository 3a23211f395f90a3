"""Stock decoders as a second opinion: what perf and libipt make of traces whose control flow is known."""

from __future__ import annotations

import os
import random
from array import array
from pathlib import Path

import pytest

from tests import ptgen
from tests.peers import handmade
from tests.peers.auxdata import AuxData
from tests.peers.flow import Branches, Decoded, Lists, common
from tests.peers.ipt import Ipt
from tests.peers.perfpt import PerfPt, PerfTimeoutError

perf_here = pytest.mark.skipif(bool(PerfPt.missing()), reason=f"perf: {PerfPt.missing()}")
ipt_here = pytest.mark.skipif(bool(Ipt.missing()), reason=f"libipt: {Ipt.missing()}")


def triples(decoded: Decoded) -> list[tuple[int, int, int]]:
    assert decoded.lists
    branches = decoded.lists.branches
    return list(zip(branches.source, branches.target, branches.third, strict=True))


def words(decoded: Decoded) -> list[tuple[int, int, int]]:
    assert decoded.lists
    return [(hit.branches, hit.value, hit.ip) for hit in decoded.lists.hits]


def of(pairs: list[tuple[int, int]]) -> bytes:
    return array("Q", [end for pair in pairs for end in pair]).tobytes()


@ipt_here
def test_libipt_finds_what_the_handmade_run_did(tmp_path: Path) -> None:
    perf_data, aux = handmade.write(tmp_path)
    truth, found = handmade.handmade(), AuxData.read(perf_data)
    assert list(found.streams.values()) == [aux.read_bytes()]
    decoded = Ipt(tmp_path).decode("insns", aux, found.images, lists=True)
    assert triples(decoded) == truth.branches
    assert words(decoded) == truth.hits
    assert decoded.errors == 0


@perf_here
def test_perf_finds_what_the_handmade_run_did(tmp_path: Path) -> None:
    perf_data, _ = handmade.write(tmp_path)
    truth = handmade.handmade()
    decoded = PerfPt(tmp_path).decode(perf_data, "bwe", lists=True)
    assert [branch[:2] for branch in triples(decoded)] == [branch[:2] for branch in truth.branches]
    assert words(decoded) == truth.hits
    assert decoded.errors == 0


@ipt_here
@pytest.mark.parametrize("mode", ["blocks", "packets"])
def test_libipt_finds_every_word_in_every_mode(tmp_path: Path, mode: str) -> None:
    perf_data, aux = handmade.write(tmp_path)
    decoded = Ipt(tmp_path).decode(mode, aux, AuxData.read(perf_data).images, lists=True)
    assert [hit[1:] for hit in words(decoded)] == [hit[1:] for hit in handmade.handmade().hits]


@perf_here
def test_perf_finds_every_word_without_a_walk(tmp_path: Path) -> None:
    perf_data, _ = handmade.write(tmp_path)
    decoded = PerfPt(tmp_path).decode(perf_data, "qwe", lists=True)
    assert [hit[1:] for hit in words(decoded)] == [hit[1:] for hit in handmade.handmade().hits]


@perf_here
@ipt_here
def test_code_that_is_not_there_is_an_error_and_not_the_end(tmp_path: Path) -> None:
    perf_data, aux = handmade.write(tmp_path)
    (tmp_path / "code").unlink()
    assert PerfPt(tmp_path).decode(perf_data, "bwe").errors > 0
    decoded = Ipt(tmp_path).decode("insns", aux)
    assert [error.split(": ")[1] for error in decoded.first_errors] == ["no memory mapped at this address"] * 2
    assert decoded.first_errors[1] > decoded.first_errors[0]


@perf_here
def test_a_perf_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file that was cut off."""
    perf_data, _ = handmade.write(tmp_path)
    (tmp_path / "perf").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "perf").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(PerfTimeoutError):
        PerfPt(tmp_path).decode(perf_data, "b", timeout_s=0.2)


@ipt_here
@pytest.mark.parametrize("mode", ["insns", "blocks", "packets"])
def test_the_libipt_driver_ends_on_damage(tmp_path: Path, mode: str) -> None:
    perf_data, _ = handmade.write(tmp_path)
    images, trace = AuxData.read(perf_data).images, handmade.handmade().trace * 20
    dice = random.Random(1)
    for _ in range(20):
        damaged = bytearray(trace)
        for _ in range(dice.randrange(1, 40)):
            damaged[dice.randrange(len(damaged))] = dice.randrange(256)
        (tmp_path / "damaged").write_bytes(damaged[: dice.randrange(len(damaged))])
        Ipt(tmp_path).decode(mode, tmp_path / "damaged", images, timeout_s=20)


@ipt_here
def test_the_libipt_driver_ends_in_code_that_loops(tmp_path: Path) -> None:
    """Walked by instructions: libipt's block decoder itself overflows its stack on a jump to itself."""
    perf_data, _ = handmade.write(tmp_path)
    (tmp_path / "code").write_bytes(b"\xeb\xfe" * 2048)
    taken = handmade.tnt("T")
    trace = handmade.psb(1000, handmade.BASE) + taken + handmade.psb(2000, handmade.BASE) + taken
    (tmp_path / "aux").write_bytes(trace)
    decoded = Ipt(tmp_path).decode("insns", tmp_path / "aux", AuxData.read(perf_data).images, timeout_s=20)
    assert decoded.errors == 2


def code(name: str) -> Path:
    """A file that the named compiler or language is known for; of Rust it is the generator itself."""
    if name == "rust":
        return ptgen.generator()
    return Path({"c++": "/usr/lib/x86_64-linux-gnu/libstdc++.so.6", "python": "/usr/bin/python3"}[name]).resolve()


@perf_here
@ipt_here
@pytest.mark.needs("cargo")
@pytest.mark.parametrize("name", ["c++", "python", "rust"])
def test_perf_and_libipt_agree_with_the_truth_on_code_of_many_compilers(tmp_path: Path, name: str) -> None:
    elf, features = code(name), "retc,tsc,interrupts,longtnt"
    if not elf.exists():
        pytest.skip(f"needs {elf}")
    made = ptgen.make(
        tmp_path / "trace", elf, "--stub-break", bytes=200_000, with_=features, hits=200, words=2, stubs="visible"
    )
    truth = Lists.read(made.folder / "branches.bin", made.folder / "hits.bin")
    found = AuxData.read(made.perf_data)
    by_libipt = Ipt(tmp_path).decode("insns", made.folder / "aux.bin", found.images, lists=True)
    by_perf = PerfPt(tmp_path).decode(made.perf_data, "bwe", lists=True)
    assert len(truth.branches) > 50_000
    # In Rust's code the walk may stay for long in a function that drops a tree by calling itself.
    assert len(truth.hits) > 5 or name == "rust"
    for decoded in (by_libipt, by_perf):
        assert decoded.lists
        assert (decoded.errors, decoded.first_errors) == (0, [])
        assert decoded.lists.branches.pairs() == truth.branches.pairs()
        assert words(decoded) == [(hit.branches, hit.value, hit.ip) for hit in truth.hits]
    assert by_libipt.lists
    assert by_libipt.lists.branches.third == truth.branches.third


@perf_here
@ipt_here
@pytest.mark.needs("cargo")
def test_a_stub_that_cannot_be_read_costs_them_its_words_and_branches(tmp_path: Path) -> None:
    elf = "/lib/x86_64-linux-gnu/libc.so.6"
    made = ptgen.make(tmp_path / "trace", elf, bytes=400_000, with_="retc,tsc", hits=40, stubs="invisible")
    truth = Lists.read(made.folder / "branches.bin", made.folder / "hits.bin")
    found = AuxData.read(made.perf_data)
    by_libipt = Ipt(tmp_path).decode("insns", made.folder / "aux.bin", found.images, lists=True)
    by_perf = PerfPt(tmp_path).decode(made.perf_data, "bwe", lists=True)
    for decoded in (by_libipt, by_perf):
        assert decoded.lists
        assert decoded.errors > 0
        assert decoded.hits < len(truth.hits)
        assert common(truth.branches.pairs(), decoded.lists.branches.pairs()) < len(truth.branches)
    without_a_walk = PerfPt(tmp_path).decode(made.perf_data, "qwe")
    assert without_a_walk.hits == len(truth.hits) > 0


def test_what_two_lists_have_in_common() -> None:
    truth = [(n, n + 1) for n in range(1, 200)]
    assert common(of(truth), of(truth)) == len(truth)
    assert common(of(truth), of(truth[:50] + truth[120:])) == len(truth) - 70
    assert common(of(truth), of([*truth[:50], (0, 9), *truth[50:]])) == len(truth)
    assert common(of(truth), of([(7, 7)] * 20)) == 0
    assert common(of(truth), of(truth[:50] + [(7, 7)] * 300 + truth[100:])) == len(truth) - 50
    assert common(of(truth), b"") == common(b"", of(truth)) == 0


def test_branches_into_and_out_of_a_range_are_left_out() -> None:
    listed = Branches(array("Q", [0, 5, 20, 7]), array("Q", [5, 20, 6, 8]), array("Q", [0, 0, 0, 0]))
    assert listed.pairs([(20, 21)]) == of([(0, 5), (7, 8)])
    assert listed.pairs([(30, 40)]) == listed.pairs() == of([(0, 5), (5, 20), (20, 6), (7, 8)])
