"""The recorder: what stubs wrote into rings stands in perf.data, and every hit is accounted for."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ptwprobe import _native
from ptwprobe.trace.open import open as open_trace
from tests.ringtools import EVENT, Rings, hits_of, perf_records, perf_words, recorder

ME = os.getpid()


def settle(made: _native.Recorder, what: str, count: int) -> None:
    """Wait until the recorder has counted ``count``."""
    deadline = time.monotonic() + 10
    while made.stats()[what] < count:
        assert time.monotonic() < deadline, made.stats()
        time.sleep(0.005)


@pytest.mark.needs("perf")
@pytest.mark.parametrize("itrace", ["qwe", "we"])
def test_perf_reads_what_was_written(tmp_path: Path, itrace: str) -> None:
    rings = Rings(rings=3)
    made = recorder(tmp_path / "perf.data", rings)
    tid = threading.get_native_id()
    sent = [[i, 1 << 63 | i] for i in range(300)]
    for i, args in enumerate(sent):
        assert rings.writer.write(i // 7 % 3, tid, EVENT, args)
        if i % 100 == 50:
            time.sleep(0.05)
    final = made.stop()
    assert (final["hits"], final["lost"], final["torn"], final["held"], final["error"]) == (300, 0, 0, 0, None)
    assert final["bytes"] <= (tmp_path / "perf.data").stat().st_size
    assert hits_of(perf_words(tmp_path / "perf.data", itrace)) == [(tid, args) for args in sent]


def test_hits_come_back_by_time_with_thread_cpu_and_losses(tmp_path: Path) -> None:
    rings = Rings(rings=3, ring_bits=12)
    made = recorder(tmp_path / "perf.data", rings)
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    tids = [ME, other.native_id or 0]
    sent = []
    for i in range(2000):
        ring, tid = i // 3 % 3, tids[i // 5 % 2]
        until = time.perf_counter_ns() + 5_000  # no thread changes its CPU faster
        while time.perf_counter_ns() < until:
            pass
        if rings.writer.write(ring, tid, EVENT, [i, 7]):
            sent.append((tid, ring, i))
        if i == 1000:
            rings.writer.abandon(ring, 1)
        if i % 60 == 0:
            time.sleep(0.02)
    final = made.stop()
    done.set()
    trace = open_trace(tmp_path / "perf.data")
    hits = list(trace.hits())
    assert [(hit.tid, hit.cpu, hit.args["arg1"]) for hit in hits] == sent
    assert [hit.ns for hit in hits] == sorted(hit.ns for hit in hits)
    assert {hit.pid for hit in hits} == {ME}
    totals = trace.totals()
    assert (totals.hits, totals.lost, totals.torn, totals.stray, totals.errors) == (
        len(sent),
        2000 - len(sent),
        1,
        0,
        0,
    )
    assert (final["hits"], final["lost"], final["torn"]) == (totals.hits, totals.lost, totals.torn)


@pytest.mark.needs("perf")
def test_sideband_names_threads_cpus_and_losses(tmp_path: Path) -> None:
    rings = Rings(rings=2, ring_bits=12)
    made = recorder(tmp_path / "perf.data", rings)
    made.add_mapping(ME, 0x400000, 0x1000, 0x2000, 8, 1, 77, 5, 2, "/usr/bin/some program", "ab" * 20)
    lost = rings.writer.write_many(0, ME, EVENT, 100_000)
    assert lost > 0
    assert rings.writer.write(1, ME, EVENT, [1, 2])
    assert not rings.writer.write(2, ME, EVENT, [1, 2])
    final = made.stop()
    assert (final["hits"], final["lost"]) == (100_001 - lost, lost + 1)
    dump = perf_records(tmp_path / "perf.data")
    comm = Path(f"/proc/{ME}/comm").read_text().strip()
    assert f"PERF_RECORD_COMM: {comm}:{ME}/{ME}" in dump
    assert "/usr/bin/some program" in dump and "ab" * 20 in dump
    assert dump.count("PERF_RECORD_SWITCH") == 2
    told = [int(line.rsplit(":", 1)[1]) for line in dump.splitlines() if "PERF_RECORD_LOST" in line]
    assert sum(told) == lost + 1


def test_hits_that_do_not_count_are_told_apart(tmp_path: Path) -> None:
    rings = Rings()
    made = recorder(tmp_path / "perf.data", rings)
    made.keep_threads([ME])
    rings.writer.write(0, ME, EVENT, [1, 2], faults=0b11)
    rings.writer.write(0, 0, EVENT, [1, 2])  # no thread has this tid: the process stands for it
    rings.writer.write(0, ME, EVENT + 1, [1, 2])
    rings.writer.write(0, ME, EVENT, [1])
    with subprocess.Popen(["sleep", "60"]) as other:
        rings.writer.write(0, other.pid, EVENT, [1, 2])  # another process's thread
        settle(made, "hits", 3)
        other.kill()
    gone = other.pid
    rings.writer.write(1, gone, EVENT, [1, 2])
    settle(made, "hits", 4)
    made.keep_threads([1])
    rings.writer.write(1, ME, EVENT, [1, 2])
    settle(made, "filtered", 1)
    final = made.stop()
    assert [final[k] for k in ("hits", "faults", "filtered", "stray", "unknown_threads")] == [4, 2, 1, 2, 3]


def test_a_thread_known_by_its_fs_base(tmp_path: Path) -> None:
    rings = Rings()
    made = recorder(tmp_path / "perf.data", rings)
    made.tap(10)
    made.set_thread(ME, 0x7F0011223344, ME)
    rings.writer.write(0, 0x7F0011223344, EVENT, [1, 2])
    rings.writer.write(0, 0x7F0055667788, EVENT, [1, 2])
    settle(made, "hits", 2)
    made.set_thread(ME, 0x7F0055667788, ME)
    rings.writer.write(0, 0x7F0055667788, EVENT, [3, 4])
    final = made.stop()
    assert (final["hits"], final["unknown_threads"]) == (3, 1)


def test_a_hole_is_passed_only_after_it_was_reported(tmp_path: Path) -> None:
    rings = Rings()
    made = recorder(tmp_path / "perf.data", rings)
    rings.writer.write(1, ME, EVENT, [1, 2])
    rings.writer.abandon(1, 2)
    rings.writer.write(1, ME, EVENT, [3, 4])
    deadline = time.monotonic() + 10
    while not (holes := made.holes()) or holes[0][2] < 30_000_000:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert [(pid, ring) for pid, ring, _ in holes] == [(ME, 1)]
    assert made.pass_hole(ME, 0) == 0
    assert made.pass_hole(ME, 1) == 1
    settle(made, "hits", 2)
    assert made.holes() == []
    final = made.stop()
    assert (final["hits"], final["lost"], final["torn"]) == (2, 0, 1)


@pytest.mark.needs("perf")
def test_a_process_killed_in_the_middle_of_records(tmp_path: Path) -> None:
    rings = Rings(rings=2)
    child = os.fork()
    if child == 0:
        for i in range(500):
            rings.writer.write(i % 2, os.getpid(), EVENT, [i, ~i & (1 << 64) - 1])
            if i in (100, 101, 300, 499):
                rings.writer.abandon(i % 2, i % 5)
        os.kill(os.getpid(), signal.SIGKILL)
    made = recorder(tmp_path / "perf.data", rings, pid=child)
    os.waitpid(child, 0)
    made.drop_target(child)
    with pytest.raises(_native.NativeError) as gone:
        made.drop_target(child)
    assert gone.value.args[0] == "unknown-target"
    final = made.stop()
    assert (final["hits"], final["lost"], final["torn"]) == (500, 0, 4)
    hits = hits_of(perf_words(tmp_path / "perf.data"))
    assert hits == [(child, [i, ~i & (1 << 64) - 1]) for i in range(500)]
    told = [line for line in perf_records(tmp_path / "perf.data").splitlines() if "PERF_RECORD_LOST_SAMPLES" in line]
    assert sum(int(line.rsplit(":", 1)[1]) for line in told) == 4


def test_the_tap_keeps_the_newest_hits(tmp_path: Path) -> None:
    rings = Rings()
    made = recorder(tmp_path / "perf.data", rings)
    assert made.take_hits(10) == []
    made.tap(4)
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    for i in range(10):
        rings.writer.write(i % 2, ME, EVENT, [i, i])
    settle(made, "hits", 10)
    after = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    hits = made.take_hits(3) + made.take_hits(3)
    assert [hit[1:] for hit in hits] == [(ME, ME, i % 2, EVENT, [i, i]) for i in (6, 7, 8, 9)]
    times = [hit[0] for hit in hits]
    assert times == sorted(times)
    assert before - 100_000 < times[0] and times[-1] < after + 100_000
    made.stop()


def test_calls_after_the_end(tmp_path: Path) -> None:
    rings = Rings()
    made = recorder(tmp_path / "perf.data", rings)
    rings.writer.write(0, ME, EVENT, [1, 2])
    final = made.stop()
    assert made.stop() == final == made.stats()
    assert made.clock()[3] > 100_000_000
    with pytest.raises(_native.NativeError) as stopped:
        made.holes()
    assert stopped.value.args[0] == "stopped"


def test_what_is_refused(tmp_path: Path) -> None:
    rings = Rings()
    made = recorder(tmp_path / "perf.data", rings)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: made.add_target(ME, rings.memory, ""), "duplicate-target"),
        (lambda: made.add_event(0x7FFF, 1), "bad-event"),
        (lambda: made.add_event(0x8001, 256), "bad-event"),
        (lambda: made.add_stub(ME, EVENT, [1]), "bad-event"),
        (lambda: made.add_stub(1, EVENT, [1, 2, 3]), "unknown-target"),
        (lambda: made.add_mapping(ME, 0, 0, 0, 0, 0, 0, 0, 0, "", "xyz"), "bad-build-id"),
        (lambda: _native.Recorder(tmp_path / "perf.data", []), "write-error"),
        (lambda: _native.RingMemory(rings.fd, 2, 16), "ring"),
        (lambda: _native.RingMemory(-1, 2, 16), "ring"),
        (lambda: _native.RingMemory(rings.fd, 0, 16), "ring"),
    ]
    for call, kind in refused:
        with pytest.raises(_native.NativeError) as error:
            call()
        assert error.value.args[0] == kind


@pytest.mark.needs("unshare", "root")
def test_threads_of_another_pid_namespace_have_our_numbers(tmp_path: Path) -> None:
    with subprocess.Popen(["unshare", "--pid", "--fork", "sleep", "60"]) as outer:
        deadline = time.monotonic() + 10
        while not (inner := Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        pid = int(inner[0])
        rings = Rings()
        made = recorder(tmp_path / "perf.data", rings, pid=pid)
        made.tap(10)
        rings.writer.write(0, 1, EVENT, [1, 2])  # its first process calls itself 1
        rings.writer.write(0, 999_999, EVENT, [1, 2])
        settle(made, "hits", 2)
        assert [hit[2] for hit in made.take_hits(10)] == [pid, pid]
        assert made.stop()["unknown_threads"] == 1
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", mount], check=True)
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


@pytest.mark.needs("root", "perf")
def test_a_full_disk_ends_the_recording_and_nothing_else(small_disk: Path) -> None:
    rings = Rings(ring_bits=20)
    made = recorder(small_disk / "perf.data", rings)
    lost = rings.writer.write_many(0, ME, EVENT, 300_000, per_second=500_000)
    assert made.stats()["error"][0] == "disk-full"
    # Goes on to drain: the target does not even notice.
    before = made.stats()["lost"]
    late = rings.writer.write_many(1, ME, EVENT, 1000)
    settle(made, "lost", before + 1000)
    final = made.stop()
    assert final["hits"] + final["lost"] == 301_000 and final["held"] == 0
    assert final["lost"] > lost + late
    totals = open_trace(small_disk / "perf.data").totals()
    assert (totals.hits, totals.lost, totals.torn, totals.errors) == (final["hits"], final["lost"], 0, 0)
    hits = hits_of(perf_words(small_disk / "perf.data"))
    assert len(hits) == final["hits"] > 10_000
    assert [args[0] for _, args in hits] == list(range(len(hits)))


def resident_kb() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    raise AssertionError


def test_memory_stays_flat_at_a_million_hits_a_second(tmp_path: Path) -> None:
    rings = Rings(ring_bits=24)
    made = recorder(tmp_path / "perf.data", rings)
    lost, sizes = [], []
    writer = threading.Thread(
        target=lambda: lost.append(rings.writer.write_many(0, ME, EVENT, 3_000_000, per_second=1_000_000))
    )
    writer.start()
    while writer.is_alive():
        time.sleep(0.25)
        sizes.append(resident_kb())
    final = made.stop()
    assert lost == [0]
    assert (final["hits"], final["lost"], final["late"]) == (3_000_000, 0, 0)
    assert max(sizes[2:]) - sizes[1] < 16 << 10, sizes
