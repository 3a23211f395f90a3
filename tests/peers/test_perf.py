"""Stock perf reads what we write: the same words, threads, times and order."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import ptwprobe
from tests.perfscript import Word, perf_words
from tests.synth import MAGIC, Session, SynthEvent, ns_of

pytestmark = pytest.mark.needs("perf")

EVENTS = [
    SynthEvent(
        0x8000 + n, f"g/e{n}", tuple((f"a{index}", "x64") for index in range(n)), stub=0x7F0000001000 + 0x1000 * n
    )
    for n in range(9)
]


def session(folder: Path, rounds: int = 5) -> list[Word]:
    """A session of three threads, and its words in the order of time."""
    built = Session(folder, EVENTS)
    words: list[Word] = []
    for tid in (100, 101, 102):
        built.writer.comm(100, tid, b"thread%d" % tid, ns_of(100 + tid))
    now = 10**15
    for _ in range(rounds):
        for step in range(40):
            now += 1000 + step
            tid, event = 100 + step % 3, EVENTS[step % len(EVENTS)]
            args = [now + index << (8 * index) & (2**64 - 1) for index in range(len(event.fields))]
            built.hit(tid, event, now, *args)
            header = event.event_id << 48 | len(args) << 40 | MAGIC
            for value, ip in zip([header, *args], event.slots, strict=True):
                words.append((f"thread{tid}", tid, ns_of(now), value, ip))
        built.writer.switch_in(100, 100, 1, ns_of(now))
        built.writer.lost(3, 0, ns_of(now))
        built.round()
        now += 100_000
    built.finish()
    return words


@pytest.mark.parametrize("itrace", ["we", "qwe"])
def test_perf_prints_every_word_with_thread_time_and_order(tmp_path: Path, itrace: str) -> None:
    words = session(tmp_path / "s.ptw")
    assert perf_words(tmp_path / "s.ptw/perf.data", itrace) == words


def test_our_hits_are_the_words_that_perf_prints(tmp_path: Path) -> None:
    session(tmp_path / "s.ptw")
    from_hits: list[tuple[int, int, list[int]]] = [
        (hit.tid, hit.ns, list(hit.args.values())) for hit in ptwprobe.open(tmp_path / "s.ptw").hits()
    ]
    from_perf: list[tuple[int, int, list[int]]] = []
    for _, tid, ns, payload, ip in perf_words(tmp_path / "s.ptw/perf.data", "qwe"):
        if ip & 0xFFF == 0:
            from_perf.append((tid, ns, []))
        else:
            from_perf[-1][2].append(payload)
    assert from_hits == from_perf


def test_perf_reads_a_session_whose_recorder_was_killed(tmp_path: Path) -> None:
    built = Session(tmp_path / "s.ptw", EVENTS)
    built.writer.comm(100, 100, b"prog", ns_of(1))
    built.hit(100, EVENTS[1], 1000, 5)
    built.round()
    assert [word[3] for word in perf_words(built.perf_data, "we")] == [0x8001 << 48 | 1 << 40 | MAGIC, 5]


def test_perf_tells_who_recorded(tmp_path: Path) -> None:
    session(tmp_path / "s.ptw")
    command = ["perf", "script", "--header-only", "-i", str(tmp_path / "s.ptw/perf.data")]
    head = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "# cmdline : ptwprobe record" in head
    assert "# arch : x86_64" in head
