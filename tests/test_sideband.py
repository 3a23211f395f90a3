"""What stands beside the trace in a perf.data of stock perf: all of it is read, in whatever form the file is."""

from __future__ import annotations

import functools
import json
import re
import shutil
import struct
import subprocess
from collections import Counter
from pathlib import Path

import pytest

import ptwprobe
from ptwprobe.errors import InputError
from ptwprobe.trace.events import Stray, TraceError
from tests.perfbuild import (
    COMPRESSED,
    ITRACE_START,
    MMAP2,
    SAMPLE_AUX,
    SAMPLE_ID,
    SAMPLE_RAW,
    TRACEPOINT_TYPE,
    PerfBuild,
    attr,
    record,
)
from tests.perfscript import perf_words
from tests.synth import chunk, ns_of, ptw, tsc

MANIFEST = Path(__file__).parents[1] / "ptwprobe/native/Cargo.toml"
LOOP = ["sh", "-c", "for i in 1 2 3 4 5 6 7 8; do /bin/true; done"]

needs_perf = pytest.mark.skipif(shutil.which("perf") is None, reason="no perf here")


@functools.cache
def printer() -> Path:
    command = ["cargo", "build", "--release", "--example", "sideband", "--message-format", "json"]
    done = subprocess.run([*command, "--manifest-path", str(MANIFEST)], stdout=subprocess.PIPE, text=True, check=True)
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] == "sideband":
            return Path(message["executable"])
    raise FileNotFoundError("cargo built no example sideband")


def our_lines(path: Path) -> Counter[str]:
    done = subprocess.run([printer(), path], stdout=subprocess.PIPE, text=True, check=True)
    return Counter(line for line in done.stdout.splitlines() if line.startswith("PERF_RECORD"))


def perf_lines(path: Path) -> Counter[str]:
    shown = ["--show-mmap-events", "--show-task-events", "--show-switch-events"]
    done = subprocess.run(["perf", "script", "-i", path, *shown], capture_output=True, text=True, check=True)
    found = (re.search(r"PERF_RECORD_(MMAP|COMM|FORK|EXIT|SWITCH).*", line) for line in done.stdout.splitlines())
    return Counter(" ".join(line.group().replace(" preempt", "").split()) for line in found if line is not None)


def perf_record(path: Path, *options: str, command: list[str] = LOOP) -> Path:
    with path.open("wb") as out:
        where = ["-o", "-"] if "pipe" in options else ["-o", str(path)]
        options = tuple(option for option in options if option != "pipe")
        run = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "2000", *options, *where, "--", *command]
        subprocess.run(run, stdout=out, stderr=subprocess.DEVNULL, check=True)
    return path


FORMS = {
    "plain": (),
    "compressed": ("-z",),
    "switches": ("--switch-events",),
    "build-ids": ("--buildid-mmap",),
    "data": ("--data",),
    "pipe": ("pipe",),
    "compressed-pipe": ("-z", "pipe", "--switch-events"),
}


@needs_perf
@pytest.mark.needs("root")
@pytest.mark.parametrize("form", FORMS)
def test_records_of_stock_perf_are_read_as_perf_reads_them(tmp_path: Path, form: str) -> None:
    path = perf_record(tmp_path / "perf.data", *FORMS[form])
    ours = our_lines(path)
    assert sum(ours.values()) > 20
    assert ours == perf_lines(path)
    with pytest.raises(InputError, match="no Intel PT data in it"):
        ptwprobe.open(path).totals()


@needs_perf
@pytest.mark.needs("root")
@pytest.mark.parametrize("pipe", [False, True])
def test_the_tracepoint_of_switches_tells_both_threads(tmp_path: Path, pipe: bool) -> None:
    path = tmp_path / "perf.data"
    with path.open("wb") as out:
        run = ["perf", "record", "-q", "-e", "sched:sched_switch", "-a", "-o", "-" if pipe else str(path)]
        subprocess.run([*run, "--", *LOOP], stdout=out, stderr=subprocess.DEVNULL, check=True)
    done = subprocess.run([printer(), path], stdout=subprocess.PIPE, text=True, check=True)
    ours = Counter(line for line in done.stdout.splitlines() if line.startswith("sched_switch"))
    shown = subprocess.run(["perf", "script", "-i", path], capture_output=True, text=True, check=True).stdout
    theirs = re.findall(r"prev_pid=(\d+) .* next_pid=(\d+) ", shown)
    assert len(theirs) > 5
    assert ours == Counter(f"sched_switch {prev} ==> {next_}" for prev, next_ in theirs)


@needs_perf
@pytest.mark.needs("root")
def test_a_cut_file_ends_and_says_where(tmp_path: Path) -> None:
    path = perf_record(tmp_path / "perf.data", "-z")
    whole = path.read_bytes()
    for size in range(200, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:size])
        subprocess.run([printer(), path], stdout=subprocess.PIPE, check=False, timeout=20)


def strays(path: Path) -> list[tuple[int | None, int | None, int]]:
    """(ns, tid, value) of each word."""
    return [(e.ns, e.tid, e.value) for e in ptwprobe.open(path).events() if isinstance(e, Stray)]


def messages(path: Path) -> list[str]:
    return [e.message for e in ptwprobe.open(path).events() if isinstance(e, TraceError)]


@pytest.mark.parametrize("pipe", [False, True])
def test_words_of_a_cpu_are_those_of_the_thread_that_runs(tmp_path: Path, pipe: bool) -> None:
    build = PerfBuild(per_cpu=True, switches=3)
    build.comm(100, 101, b"one", 500)
    build.comm(200, 201, b"two", 500)
    build.switch_cpu_wide(1, 1_000, (0, 0), (100, 101))
    build.switch_cpu_wide(1, 3_000, (100, 101), (200, 201))
    build.aux(chunk(2_000, ptw(7)) + chunk(4_000, ptw(8)), 5_000, cpu=1)
    build.round()
    path = (build.write_pipe if pipe else build.write)(tmp_path / "perf.data")
    assert strays(path) == [(ns_of(2_000), 101, 7), (ns_of(4_000), 201, 8)]
    assert messages(path) == []


def test_words_of_a_cpu_are_those_of_the_thread_that_the_tracepoint_tells(tmp_path: Path) -> None:
    build = PerfBuild(per_cpu=True, switches=1, extra=attr(TRACEPOINT_TYPE, 316, SAMPLE_ID | SAMPLE_RAW, 1 << 18))
    for time, prev, next_ in [(1_000, 0, 101), (3_000, 101, 201)]:
        raw = bytes(24) + struct.pack("<iiq", prev, 120, 0) + bytes(16) + struct.pack("<ii", next_, 120)
        build.sample(struct.pack("<I", 68) + raw.ljust(68, b"\0"), 100, prev, time, 1)
    build.aux(chunk(2_000, ptw(7)) + chunk(4_000, ptw(8)), 5_000, cpu=1)
    build.round()
    assert strays(build.write(tmp_path / "perf.data")) == [(ns_of(2_000), 101, 7), (ns_of(4_000), 201, 8)]


def test_trace_in_samples_is_read_once(tmp_path: Path) -> None:
    build = PerfBuild(per_cpu=True, extra=attr(1, 0, SAMPLE_ID | SAMPLE_AUX, 1 << 18))
    one, two = chunk(2_000, ptw(7)), chunk(3_000, ptw(8))
    for time, data in [(2_500, one), (3_500, one + two)]:
        data = data + bytes(-len(data) % 8)
        build.sample(struct.pack("<Q", len(data)) + data, 100, 101, time, 1)
    build.round()
    path = build.write(tmp_path / "perf.data")
    assert [(ns, value) for ns, _, value in strays(path)] == [(ns_of(2_000), 7), (ns_of(3_000), 8)]
    assert messages(path) == []


def test_what_two_snapshots_both_hold_is_read_once(tmp_path: Path) -> None:
    build = PerfBuild(snapshot=True)
    parts = [chunk(time, *(ptw(time + n) for n in range(50)), tsc(time + 900)) for time in range(1_000, 9_000, 1_000)]
    stream = b"".join(parts)
    cut = len(b"".join(parts[:4])) + 133
    build.aux(stream[33:cut], 6_000, tid=100)
    build.aux(stream[len(parts[0]) + 5 :], 9_500, tid=100)
    build.round()
    path = build.write(tmp_path / "perf.data")
    assert [value for _, _, value in strays(path)] == [t + n for t in range(2_000, 9_000, 1_000) for n in range(50)]
    # The first one begins within a packet, as rings do.
    assert messages(path) == [f"{len(parts[0]) - 33} bytes skipped up to a PSB"]


def test_snapshots_with_a_hole_between_them_say_so(tmp_path: Path) -> None:
    build = PerfBuild(snapshot=True)
    build.aux(chunk(1_000, ptw(1)), 1_500, tid=100)
    build.aux(chunk(5_000, ptw(2)), 5_500, tid=100)
    build.round()
    path = build.write(tmp_path / "perf.data")
    assert [value for _, _, value in strays(path)] == [1, 2]
    assert messages(path) == ["a chunk of the trace is missing before this one"]


def test_compressed_records_that_are_none_are_told_once(tmp_path: Path) -> None:
    build = PerfBuild()
    build.parts += [record(COMPRESSED, b"no zstd at all"), record(COMPRESSED, b"no more")]
    build.aux(chunk(1_000, ptw(1)), 1_500, tid=100)
    build.round()
    path = build.write(tmp_path / "perf.data")
    assert [value for _, _, value in strays(path)] == [1]
    [message] = messages(path)
    assert "cannot be unpacked" in message


@needs_perf
def test_stock_perf_reads_the_same_in_a_file_with_trace(tmp_path: Path) -> None:
    build = PerfBuild(per_cpu=True, switches=3)
    build.comm(100, 101, b"one", 500)
    path = b"/" + b"d" * 3000
    mapping = struct.pack("<IIQQQIIQQII", 100, 101, 0x401000, 0x2000, 0x1000, 8, 1, 77, 5, 5, 2)
    build.kernel(MMAP2, mapping + path.ljust(3008, b"\0"), 100, 101, 600)
    build.kernel(ITRACE_START, struct.pack("<II", 100, 101), 100, 101, 700, cpu=1)
    build.switch_cpu_wide(1, 1_000, (0, 0), (100, 101))
    build.switch_cpu_wide(1, 3_000, (100, 101), (200, 201))
    build.aux(chunk(2_000, ptw(7, 0x501000), ptw(9, 0x501010)), 5_000, cpu=1)
    build.round()
    path_ = build.write(tmp_path / "perf.data")
    ours = our_lines(path_)
    # perf script has no words for this one.
    assert ours.pop("PERF_RECORD_ITRACE_START pid: 100 tid: 101") == 1
    assert sum(ours.values()) == 6
    assert ours == perf_lines(path_)
    theirs = [(tid, word) for _, tid, _, word, _ in perf_words(path_, "qwe")]
    assert theirs == [(tid, word) for _, tid, word in strays(path_)] == [(101, 7), (101, 9)]
