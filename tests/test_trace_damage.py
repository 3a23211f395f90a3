"""Damaged and hostile files: always a result or a named error, in bounded time and memory."""

from __future__ import annotations

import random
import resource
import shutil
from pathlib import Path

import pytest

import ptwprobe
from ptwprobe.errors import InputError
from ptwprobe.report import dump, script
from tests.synth import small_session

ROUNDS = 3000


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_session(tmp_path_factory.mktemp("damage") / "small.ptw")


def read_all(folder: Path, fd: int) -> None:
    try:
        trace = ptwprobe.open(folder)
        events = list(trace.events())
        assert len(events) < 10_000
        script.write(trace, fd, "jsonl")
        dump.write(trace, fd)
    except InputError as error:
        assert str(folder) in str(error)


def test_flipped_bytes_and_cuts_end_in_a_result_or_an_error(sample: Path, tmp_path: Path) -> None:
    shutil.copytree(sample, tmp_path / "s.ptw")
    path = tmp_path / "s.ptw/perf.data"
    whole = path.read_bytes()
    chance = random.Random(1)
    with Path("/dev/null").open("wb") as null:
        for _ in range(ROUNDS):
            data = bytearray(whole)
            for _ in range(chance.choice((1, 1, 2, 8))):
                data[chance.randrange(len(data))] = chance.choice((0, 0xFF, chance.randrange(256)))
            if chance.random() < 0.3:
                del data[chance.randrange(len(data)) :]
            if chance.random() < 0.1:
                at = chance.randrange(len(data) + 1)
                data[at:at] = chance.randbytes(chance.randrange(64))
            path.write_bytes(data)
            read_all(tmp_path / "s.ptw", null.fileno())


def test_every_cut_reads_what_is_whole(sample: Path, tmp_path: Path) -> None:
    shutil.copytree(sample, tmp_path / "s.ptw")
    path = tmp_path / "s.ptw/perf.data"
    whole = path.read_bytes()
    hits_before = 0
    with Path("/dev/null").open("wb") as null:
        for length in range(0, len(whole), 3):
            path.write_bytes(whole[:length])
            try:
                hits = ptwprobe.open(tmp_path / "s.ptw").totals().hits
            except InputError:
                continue
            assert hits >= hits_before
            hits_before = hits
            read_all(tmp_path / "s.ptw", null.fileno())
    assert hits_before == 5


def test_a_damaged_session_description_ends_in_a_result_or_an_error(sample: Path, tmp_path: Path) -> None:
    shutil.copytree(sample, tmp_path / "s.ptw")
    path = tmp_path / "s.ptw/session.json"
    whole = path.read_bytes()
    chance = random.Random(2)
    with Path("/dev/null").open("wb") as null:
        for _ in range(500):
            data = bytearray(whole)
            data[chance.randrange(len(data))] = chance.choice(b'0123456789-.e"{}[],:\\ntu\x00\xff')
            path.write_bytes(data)
            read_all(tmp_path / "s.ptw", null.fileno())


def test_a_file_that_claims_huge_sizes_is_read_in_little_memory(sample: Path, tmp_path: Path) -> None:
    shutil.copytree(sample, tmp_path / "s.ptw")
    path = tmp_path / "s.ptw/perf.data"
    whole = bytearray(path.read_bytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for at in range(8, 104, 8):
        data = bytearray(whole)
        data[at : at + 8] = b"\xff" * 8
        path.write_bytes(data)
        with Path("/dev/null").open("wb") as null:
            read_all(tmp_path / "s.ptw", null.fileno())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024
