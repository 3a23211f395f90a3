"""From a session folder or a perf.data to typed events."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ptwprobe
from ptwprobe.errors import InputError
from ptwprobe.model import Hit, Totals
from ptwprobe.report import dump, script
from ptwprobe.trace.events import Lost, Stray, Torn, TraceError
from tests.synth import BARE, SHIFT, SIZES, Session, SynthEvent, chunk, header_word, ns_of, ptw, small_session, tsc


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return small_session(tmp_path / "small.ptw")


def test_hits_have_names_values_places_and_times(small: Path) -> None:
    hits = list(ptwprobe.open(small).hits())
    comm = 'wo"rk,\\x1b[1m\\xff'
    assert hits == [
        Hit(ns_of(2000), 100, 100, 0, "prog", "libc/malloc", 0x401000, {"size": 64, "flags": 255, "delta": -1}),
        Hit(ns_of(2500), 100, 101, 1, comm, "libc/malloc", 0x401000, {"size": 2**53 + 1, "flags": 0, "delta": 127}),
        Hit(ns_of(3000), 100, 100, 0, "prog", "prog/tick", 0x402000, {}),
        Hit(ns_of(4000), 100, 100, 1, "prog", "libc/malloc", 0x401000, {"size": 2**53, "flags": 1, "delta": -128}),
        Hit(ns_of(5400), 100, 101, 1, comm, "prog/tick", 0x402000, {}),
    ]


def test_what_is_lost_stray_or_wrong_stands_in_its_place(small: Path) -> None:
    trace = ptwprobe.open(small)
    rest = [event for event in trace.events() if not isinstance(event, Hit)]
    assert rest[:2] == [Lost(ns_of(2800), 1, 5), Torn(ns_of(2900), 0, 1)]
    stray = Stray(ns_of(5200), 100, 101, 1, 'wo"rk,\\x1b[1m\\xff', 0x405000, 0xDEAD)
    assert rest[3] == stray
    errors = [event.message for event in rest if isinstance(event, TraceError)]
    assert errors == [
        "a hit of libc/malloc is not whole: 1 of 3 words",
        "the CPU dropped packets here (OVF)",
        "bytes that are no packet; decoding goes on at the next PSB",
        "1 bytes skipped up to a PSB",
    ]
    assert trace.totals() == Totals(hits=5, lost=5, torn=1, stray=1, errors=4)


def test_a_perf_data_alone_names_events_by_id_and_still_tells_losses(small: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copy(small / "perf.data", tmp_path / "alone.data"))
    trace = ptwprobe.open(alone)
    assert trace.session is None
    first, *_ = trace.hits()
    assert (first.event, first.ip) == ("id/32768", SIZES.slots[0])
    assert first.args == {"arg1": 64, "arg2": 0x1_0000_00FF, "arg3": 0xFF}
    assert (trace.totals().lost, trace.totals().torn) == (5, 1)


def test_the_perf_data_in_a_session_opens_with_its_session(small: Path) -> None:
    trace = ptwprobe.open(small / "perf.data")
    assert trace.session is not None
    assert [event.event for event in trace.session.events] == ["libc/malloc", "prog/tick"]
    assert trace.session.processes[0].cmdline == ("prog", "-x")


def test_threads_are_merged_by_time_within_a_round(tmp_path: Path) -> None:
    session = Session(tmp_path / "s.ptw", [BARE])
    for time in range(1000, 1100):
        session.hit(100 + time % 7, BARE, time)
    times = [hit.ns for hit in ptwprobe.open(session.finish()).hits()]
    assert len(times) == 100
    assert times == sorted(times)


def test_the_cpu_of_a_hit_is_the_last_switch_before_it(tmp_path: Path) -> None:
    session = Session(tmp_path / "s.ptw", [BARE])
    for time, cpu in ((1000, 3), (3000, 1), (5000, 2)):
        session.writer.switch_in(100, 100, cpu, ns_of(time))
    for time in (500, 1000, 2998, 3000, 9000):
        session.hit(100, BARE, time)
    cpus = [hit.cpu for hit in ptwprobe.open(session.finish()).hits()]
    assert cpus == [-1, 3, 3, 1, 2]


def test_a_fork_child_has_its_parents_name_until_it_takes_its_own(tmp_path: Path) -> None:
    session = Session(tmp_path / "s.ptw", [BARE])
    session.writer.comm(100, 100, b"parent", ns_of(10))
    session.writer.fork(200, 200, 100, 100, ns_of(20))
    session.writer.comm(200, 200, b"child", ns_of(40), exec=True)
    for time in (30, 50):
        session.hit(200, BARE, time)
    hits = list(ptwprobe.open(session.finish()).hits())
    assert [(hit.pid, hit.comm) for hit in hits] == [(200, "parent"), (200, "child")]
    assert {hit.ip for hit in hits} == {BARE.addr}


def test_equal_stub_addresses_of_two_processes_are_told_apart(tmp_path: Path) -> None:
    session = Session(tmp_path / "s.ptw", [SynthEvent(0x8000, "g/e", pid=100, addr=0x1000)], describe=False)
    description = session.description()
    events = description["events"]
    assert isinstance(events, list)
    events[0]["sites"].append({**events[0]["sites"][0], "pid": 200, "addr": 0x2000})
    (tmp_path / "s.ptw/session.json").write_text(json.dumps(description))
    for pid in (100, 200):
        session.writer.comm(pid, pid, b"x", 0)
        session.hit(pid, SynthEvent(0x8000, "g/e", pid=pid), 1000 + pid)
    assert [hit.ip for hit in ptwprobe.open(session.finish()).hits()] == [0x1000, 0x2000]


def test_a_live_session_is_read_as_it_grows(tmp_path: Path) -> None:
    session = Session(tmp_path / "s.ptw", [BARE])
    trace = ptwprobe.open(tmp_path / "s.ptw")
    assert trace.new_hits() == []
    for start in (1000, 2000, 3000):
        for time in range(start, start + 10):
            session.hit(100, BARE, time)
        assert trace.new_hits() == []
        session.round()
        first = trace.new_hits(4)
        rest = trace.new_hits()
        assert [hit.ns for hit in first + rest] == [ns_of(time) for time in range(start, start + 10)]
        assert trace.new_events() == []
    session.finish()
    assert trace.new_hits() == []
    assert trace.totals().hits == 30


def test_a_file_whose_recorder_was_killed_reads_up_to_its_last_flush(tmp_path: Path) -> None:
    session = Session(tmp_path / "s.ptw", [BARE])
    session.hit(100, BARE, 1000)
    session.round()
    session.hit(100, BARE, 2000)
    # Neither flushed nor finished.
    assert ptwprobe.open(tmp_path / "s.ptw").totals() == Totals(hits=1)


def test_a_record_may_go_on_in_the_next_chunk_and_after_a_psb(tmp_path: Path) -> None:
    session = Session(tmp_path / "s.ptw", [SIZES])
    slots = SIZES.slots
    start = chunk(1000, ptw(header_word(SIZES.event_id, 3), slots[0]), ptw(1, slots[1]))
    rest = chunk(1100, ptw(2, slots[2]), ptw(3, slots[3]))
    session.raw(100, start, 1000)
    session.round()
    session.raw(100, rest, 1100)
    trace = ptwprobe.open(session.finish())
    assert [(hit.ns, hit.args) for hit in trace.hits()] == [(ns_of(1000), {"size": 1, "flags": 2, "delta": 3})]
    assert trace.totals().errors == 0


def test_a_packet_may_be_cut_by_the_end_of_a_chunk(tmp_path: Path) -> None:
    session = Session(tmp_path / "s.ptw", [SIZES])
    words = (header_word(SIZES.event_id, 3), 1, 2, 3)
    packets = chunk(1000, *(ptw(word, slot) for word, slot in zip(words, SIZES.slots, strict=True)))
    for at in range(0, len(packets), 7):
        session.raw(100, packets[at : at + 7], 1000)
        session.round()
    trace = ptwprobe.open(session.finish())
    assert trace.totals() == Totals(hits=1)


CHUNK_HEAD = (71).to_bytes(4, "little") + bytes(2) + (48).to_bytes(2, "little")


def data_offset(path: Path) -> int:
    """Where the records of a perf.data begin."""
    return int.from_bytes(path.read_bytes()[40:48], "little")


def told_size(folder: Path) -> int:
    """Bytes of records that the header tells."""
    return int.from_bytes((folder / "perf.data").read_bytes()[48:56], "little")


def patched(folder: Path, at: int, field: bytes) -> None:
    """Overwrites a field of every AUXTRACE record."""
    data = bytearray((folder / "perf.data").read_bytes())
    start = data.find(CHUNK_HEAD)
    while start != -1:
        data[start + at : start + at + len(field)] = field
        start = data.find(CHUNK_HEAD, start + 1)
    (folder / "perf.data").write_bytes(data)


def test_a_stream_of_a_cpu_has_the_threads_that_ran_there(tmp_path: Path) -> None:
    session = Session(tmp_path / "s.ptw", [BARE])
    for tid, time in ((100, 1000), (101, 2000)):
        session.writer.comm(100, tid, b"thread%d" % tid, 0)
        session.writer.switch_in(100, tid, 1, ns_of(time))
    for time in (900, 1500, 2500):
        session.hit(7, BARE, time)
    session.finish()
    patched(tmp_path / "s.ptw", 36, b"\xff\xff\xff\xff\x01\x00\x00\x00")
    hits = list(ptwprobe.open(tmp_path / "s.ptw").hits())
    assert [(hit.tid, hit.comm, hit.cpu) for hit in hits] == [(-1, "", 1), (100, "thread100", 1), (101, "thread101", 1)]


def test_without_factors_of_the_clock_times_are_said_to_be_ticks(tmp_path: Path) -> None:
    session = Session(tmp_path / "s.ptw", [BARE])
    session.hit(100, BARE, 1000)
    session.round()
    session.writer.finish(SHIFT, 0, 0)
    error, hit = ptwprobe.open(tmp_path / "s.ptw").events()
    assert isinstance(error, TraceError)
    assert "times are its values, not ns" in error.message
    assert isinstance(hit, Hit)
    assert hit.ns == 1000


def test_a_missing_chunk_is_told(tmp_path: Path) -> None:
    session = Session(tmp_path / "s.ptw", [BARE])
    tick = ptw(header_word(BARE.event_id, 0), BARE.slots[0])
    for time in (1000, 2000):
        session.raw(100, chunk(time, tick), time)
    session.finish()
    patched(tmp_path / "s.ptw", 16, (5000).to_bytes(8, "little"))
    events = list(ptwprobe.open(tmp_path / "s.ptw").events())
    assert [event.message for event in events if isinstance(event, TraceError)] == [
        "a chunk of the trace is missing before this one"
    ]
    assert len(events) == 3


def test_after_a_damaged_chunk_the_next_one_is_read(tmp_path: Path) -> None:
    session = Session(tmp_path / "s.ptw", [BARE])
    tick = ptw(header_word(BARE.event_id, 0), BARE.slots[0])
    session.raw(100, chunk(1000, tick, tsc(1100))[:-3], 1000)
    session.raw(100, chunk(2000, tick, b"\x02\xff"), 2000)
    session.raw(100, chunk(3000, tick), 3000)
    trace = ptwprobe.open(session.finish())
    assert [hit.ns for hit in trace.hits()] == [ns_of(1000), ns_of(2000), ns_of(3000)]
    assert [e.message for e in trace.events() if isinstance(e, TraceError)] == [
        "the trace ends inside a packet",
        "bytes that are no packet; decoding goes on at the next PSB",
        "1 bytes skipped up to a PSB",
    ]


def test_a_hit_that_the_end_of_the_file_cuts_is_told(tmp_path: Path) -> None:
    session = Session(tmp_path / "s.ptw", [SIZES])
    session.raw(100, chunk(1000, ptw(header_word(SIZES.event_id, 3), SIZES.slots[0])), 1000)
    events = list(ptwprobe.open(session.finish()).events())
    assert [event.message for event in events if isinstance(event, TraceError)] == [
        "a hit of libc/malloc is not whole: 0 of 3 words"
    ]


def test_a_cut_file_tells_how_much_is_missing(small: Path) -> None:
    end = data_offset(small / "perf.data") + told_size(small)
    size = end // 2
    os.truncate(small / "perf.data", size)
    last = list(ptwprobe.open(small).events())[-1]
    assert isinstance(last, TraceError)
    assert last.message == f"the file is cut here: {end - size} bytes are missing"
    assert last.file_offset is not None
    assert last.file_offset <= size


def big_chunk(folder: Path, hits: int) -> Path:
    """A session with all its hits, one every 1000 ticks, in one chunk; the perf.data."""
    session = Session(folder, [SIZES])
    for number in range(hits):
        session.hit(100, SIZES, 1000 * (number + 1), number, 0, 0)
    return session.finish() / "perf.data"


def set_size(path: Path, size: int) -> None:
    """What the header tells of the records' size."""
    with path.open("r+b") as file:
        file.seek(48)
        file.write(size.to_bytes(8, "little"))


@pytest.mark.parametrize("sized", [True, False])
def test_a_chunk_that_the_end_of_the_file_cuts_is_decoded_up_to_there(tmp_path: Path, sized: bool) -> None:
    path = big_chunk(tmp_path / "s.ptw", 2000)
    end = data_offset(path) + told_size(tmp_path / "s.ptw")
    if not sized:
        # As perf leaves it when it is killed; then only the chunk tells what is missing.
        set_size(path, 0)
        end -= 8
    whole = list(ptwprobe.open(path).hits())
    for cut in range(20_100, 20_000, -1):
        os.truncate(path, cut)
        *hits, error = ptwprobe.open(path).events()
        assert 200 < len(hits) < 2000
        assert hits == whole[: len(hits)]
        assert error == TraceError(None, -1, cut, f"the file is cut here: {end - cut} bytes are missing")


def test_a_chunk_that_is_still_being_written_is_waited_for(tmp_path: Path) -> None:
    path = big_chunk(tmp_path / "s.ptw", 2000)
    records_end = data_offset(path) + told_size(tmp_path / "s.ptw")
    set_size(path, 0)
    data = path.read_bytes()[:records_end]
    path.write_bytes(data[:20_000])
    trace = ptwprobe.open(path)
    assert trace.new_events() == []
    assert trace.totals().errors == 1
    path.write_bytes(data)
    assert len(trace.new_hits(5000)) == 2000
    assert trace.new_events() == []


def test_after_a_chunk_with_an_impossible_size_the_next_one_is_read(tmp_path: Path) -> None:
    session = Session(tmp_path / "s.ptw", [BARE])
    for start in (1000, 2000, 3000):
        for tid in (100, 101):
            session.hit(tid, BARE, start + tid)
        session.round()
    path = session.finish() / "perf.data"
    data = bytearray(path.read_bytes())
    first = data.find(CHUNK_HEAD)
    for size in (1 << 40, (1 << 64) - 1):
        data[first + 8 : first + 16] = size.to_bytes(8, "little")
        path.write_bytes(data)
        error, *hits = ptwprobe.open(path).events()
        assert isinstance(error, TraceError)
        assert f"impossible size ({size} bytes)" in error.message
        assert error.file_offset == first + 48
        assert [(hit.tid, hit.ns) for hit in hits if isinstance(hit, Hit)] == [
            (tid, ns_of(start + tid)) for start in (1000, 2000, 3000) for tid in (100, 101)
        ]
        assert len(hits) == 6


def test_bytes_that_are_no_records_are_skipped_up_to_a_sure_one(tmp_path: Path) -> None:
    session = Session(tmp_path / "s.ptw", [BARE])
    for start in (1000, 2000):
        session.hit(100, BARE, start)
        session.round()
    path = session.finish() / "perf.data"
    data = bytearray(path.read_bytes())
    first = data.find(CHUNK_HEAD)
    # No header any more: the chunk cannot be found, and the next one tells that it is missing.
    data[first : first + 8] = b"\xff" * 8
    path.write_bytes(data)
    skipped, hit = ptwprobe.open(path).events()
    assert isinstance(skipped, TraceError)
    assert "bytes that are no records" in skipped.message
    assert skipped.file_offset == first
    assert isinstance(hit, Hit)
    assert hit.ns == ns_of(2000)


def stock_perf_data(path: Path) -> Path:
    """What perf leaves of two software samples: no record of it speaks of a trace."""
    head = Session(path.parent / "head.ptw", describe=False).finish() / "perf.data"
    data = bytearray(head.read_bytes()[: data_offset(head)])
    sample = (9).to_bytes(4, "little") + bytes(2) + (16).to_bytes(2, "little") + bytes(8)
    comm = (3).to_bytes(4, "little") + bytes(2) + (24).to_bytes(2, "little") + bytes(16)
    path.write_bytes(data + sample + comm + sample)
    set_size(path, 56)
    return path


def test_a_perf_data_without_intel_pt_is_refused_by_name(tmp_path: Path) -> None:
    path = stock_perf_data(tmp_path / "stock.data")
    trace = ptwprobe.open(path)
    readers: list[Callable[[], object]] = [
        trace.totals,
        lambda: list(trace.hits()),
        lambda: script.write(trace, 1),
        lambda: dump.write(trace, 1),
    ]
    for read in readers:
        with pytest.raises(InputError, match="no Intel PT data in it: 3 records, 2 of them samples") as error:
            read()
        assert str(path) in str(error.value)
        assert "perf record -e intel_pt//" in error.value.hint
    assert trace.new_events() == []


def test_a_session_without_hits_is_no_error(tmp_path: Path) -> None:
    trace = ptwprobe.open(Session(tmp_path / "s.ptw", [BARE]).finish())
    assert trace.totals() == Totals()
    assert script.write(trace, 1) == Totals()
    assert dump.write(trace, 1) == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "shorter than its magic"),
        (b"not a perf.data at all", "no PERFILE2"),
        (b"2ELIFREP" + bytes(96), "big-endian"),
        (b"PERFILE2" + (17).to_bytes(8, "little"), "size that cannot be"),
        (b"PERFILE2" + (104).to_bytes(8, "little"), "ends inside the perf.data header"),
    ],
)
def test_what_is_no_perf_data_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.data"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        ptwprobe.open(path)
    assert str(path) in str(error.value)


def test_a_path_that_is_not_there_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        ptwprobe.open(tmp_path)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(InputError, match="not a regular file"):
        ptwprobe.open(fifo)


EVENTS = [
    SynthEvent(0x8000 + n, f"g/e{n}", tuple((f"a{index}", "x64") for index in range(n)), stub=0x7F0000001000 + n * 4096)
    for n in range(13)
]
words = st.one_of(st.integers(0, 2**64 - 1), st.just(header_word(0x8001, 1)))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(100, 103), st.integers(1, 2**40), st.lists(words, max_size=12), st.booleans()),
        max_size=40,
    )
)
def test_every_hit_comes_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, hits: list[tuple[int, int, list[int], bool]]
) -> None:
    session = Session(tmp_path_factory.mktemp("session"), EVENTS)
    now, wanted = 1000, []
    for tid, step, args, end_round in hits:
        now += step
        session.hit(tid, EVENTS[len(args)], now, *args)
        wanted.append((ns_of(now), tid, args))
        if end_round:
            session.round()
    read = [(hit.ns, hit.tid, list(hit.args.values())) for hit in ptwprobe.open(session.finish()).hits()]
    assert read == wanted
