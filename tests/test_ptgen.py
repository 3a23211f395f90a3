"""The generator's traces as stock decoders see them: what they can decode at all has to equal the truth."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.auxdata import Image
from tests.peers.flow import Lists
from tests.peers.ipt import Ipt
from tests.peers.perfpt import PerfPt
from tests.ptgen import Branch, Made, make

LIBC = Path("/lib/x86_64-linux-gnu/libc.so.6")
BYTES = 60_000

pytestmark = [
    pytest.mark.needs("cargo"),
    pytest.mark.skipif(not LIBC.exists(), reason=f"needs {LIBC}"),
]

BOTH = [
    "",
    "retc",
    "retc,defer,longtnt,ipforms",
    "tsc,mtc,cyc,cbr",
    "interrupts,signals,uintr,retc",
    "tsx,interrupts",
    "power,misc,vm",
]
"""Features that perf and libipt decode as the CPU means them."""

PERF_ALONE = ["interrupts,events", "blocks"]
"""libipt 2.0 does not know these packets."""


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drivers")


def perf_lists(made: Made, drivers: Path, errors: int = 0) -> Lists:
    if PerfPt.missing():
        pytest.skip(PerfPt.missing())
    done = PerfPt(drivers).decode(made.perf_data, "bwe", lists=True)
    assert (done.errors, done.first_errors[:3]) == (errors, done.first_errors[:3])
    assert done.lists
    return done.lists


def ipt_lists(made: Made, drivers: Path, errors: int = 0) -> Lists:
    if Ipt.missing():
        pytest.skip(Ipt.missing())
    mappings = [m for m in made.truth["mappings"] if not m["path"].startswith("[")]
    images = [Image(Path(m["path"]), m["offset"], m["len"], m["addr"]) for m in mappings]
    done = Ipt(drivers).decode("insns", made.folder / "aux.bin", images, lists=True)
    assert (done.errors, done.first_errors[:3]) == (errors, done.first_errors[:3])
    assert done.lists
    return done.lists


def pairs(branches: list[Branch]) -> list[tuple[int, int]]:
    return [(b.from_addr, b.to_addr) for b in branches]


def listed(lists: Lists) -> list[tuple[int, int]]:
    return list(zip(lists.branches.source, lists.branches.target, strict=True))


@pytest.mark.parametrize("features", [*BOTH, *PERF_ALONE])
def test_perf_agrees_with_the_truth(features: str, tmp_path: Path, drivers: Path) -> None:
    made = make(tmp_path, LIBC, seed=5, bytes=BYTES, with_=features)
    assert listed(perf_lists(made, drivers)) == pairs(made.branches())


@pytest.mark.parametrize("features", BOTH)
def test_libipt_agrees_with_the_truth(features: str, tmp_path: Path, drivers: Path) -> None:
    made = make(tmp_path, LIBC, seed=5, bytes=BYTES, with_=features)
    assert listed(ipt_lists(made, drivers)) == pairs(made.branches())


def test_hits_in_visible_stubs_are_found_where_they_were(tmp_path: Path, drivers: Path) -> None:
    made = make(
        tmp_path, LIBC, "--stub-break", bytes=BYTES, with_="tsc,retc,interrupts", hits=100, words=3, stubs="visible"
    )
    lists = perf_lists(made, drivers)
    assert listed(lists) == pairs(made.branches())
    truth = made.hits()
    assert len(truth) > 50
    assert [(h.branches, h.value, h.ip) for h in lists.hits] == [(h.branches, h.value, h.ip) for h in truth]


def test_branches_that_an_overflow_loses_are_told(tmp_path: Path, drivers: Path) -> None:
    made = make(tmp_path, LIBC, bytes=4 * BYTES, with_="ovf,tsc")
    losses = made.losses()
    assert losses
    known = pairs(made.branches())
    for loss in reversed(losses):
        # Of what may be known they make no use.
        del known[loss["first"] : loss["end"]]
    found = [b for b in listed(perf_lists(made, drivers, len(losses))) if b[0] != 0]
    assert found == [b for b in known if b[0] != 0]


def test_the_wanted_number_of_hits_is_made(tmp_path: Path) -> None:
    made = make(tmp_path, LIBC, preset="tolerance", words=2, bytes=1 << 20)
    assert len(made.hits()) == 2 * 69
    slots = [slot for stub in made.truth["stubs"] for slot in stub["slots"]]
    assert {hit.ip for hit in made.hits()} <= set(slots)


def test_the_same_seed_gives_the_same_trace(tmp_path: Path) -> None:
    first = make(tmp_path / "a", LIBC, "--all", seed=9, bytes=BYTES)
    again = make(tmp_path / "b", LIBC, "--all", seed=9, bytes=BYTES)
    other = make(tmp_path / "c", LIBC, "--all", seed=10, bytes=BYTES)
    assert first.aux() == again.aux() != other.aux()
    assert first.branches() == again.branches()
