"""The text formats of ``script`` and ``dump``: a contract with other tools, so the whole text is expected."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest

import ptwprobe
from ptwprobe.errors import OutputError, UsageError
from ptwprobe.model import Totals
from ptwprobe.report import dump, script
from tests.synth import PSB, PSBEND, Session, chunk, ns_of, small_session


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_session(tmp_path_factory.mktemp("script") / "small.ptw")


def lines(folder: Path, format: str = "text", **filters: object) -> tuple[list[str], Totals]:
    out = folder.parent / "out"
    with out.open("wb") as file:
        totals = script.write(ptwprobe.open(folder), file.fileno(), format, **filters)  # type: ignore[arg-type]
    return out.read_text().splitlines(), totals


ALL = Totals(hits=5, lost=5, torn=1, stray=1, errors=4)

TEXT = """\
            prog     100 [000]     0.001001000: libc/malloc: (401000) size=64 flags=0xff delta=-1
wo"rk,\\x1b[1m\\xff     101 [001]     0.001001250: libc/malloc: (401000) size=9007199254740993 flags=0x0 delta=127
               -       - [001]     0.001001400: lost: 5 hits
               -       - [000]     0.001001450: torn: 1 hit
            prog     100 [000]     0.001001500: prog/tick: (402000)
            prog     100 [001]     0.001002000: libc/malloc: (401000) size=9007199254740992 flags=0x1 delta=-128
wo"rk,\\x1b[1m\\xff     101 [001]     0.001002500: error: a hit of libc/malloc is not whole: 1 of 3 words (byte N)
wo"rk,\\x1b[1m\\xff     101 [001]     0.001002600: ptwrite: (405000) 0xdead
wo"rk,\\x1b[1m\\xff     101 [001]     0.001002600: error: the CPU dropped packets here (OVF) (byte N)
wo"rk,\\x1b[1m\\xff     101 [001]     0.001002700: prog/tick: (402000)
wo"rk,\\x1b[1m\\xff     101 [001]     0.001002700: error: bytes that are no packet; decoding goes on at the next PSB (byte N)
wo"rk,\\x1b[1m\\xff     101 [001]     0.001002700: error: 1 bytes skipped up to a PSB (byte N)
"""  # noqa: E501

JSON_LINES = r"""
{"type":"hit","time":1001000,"pid":100,"tid":100,"cpu":0,"comm":"prog","event":"libc/malloc","ip":"0x401000","args":{"size":64,"flags":255,"delta":-1}}
{"type":"hit","time":1001250,"pid":100,"tid":101,"cpu":1,"comm":"wo\"rk,\\x1b[1m\\xff","event":"libc/malloc","ip":"0x401000","args":{"size":"9007199254740993","flags":0,"delta":127}}
{"type":"lost","time":1001400,"cpu":1,"kind":"lost","count":5}
{"type":"lost","time":1001450,"cpu":0,"kind":"torn","count":1}
{"type":"hit","time":1001500,"pid":100,"tid":100,"cpu":0,"comm":"prog","event":"prog/tick","ip":"0x402000","args":{}}
{"type":"hit","time":1002000,"pid":100,"tid":100,"cpu":1,"comm":"prog","event":"libc/malloc","ip":"0x401000","args":{"size":9007199254740992,"flags":1,"delta":-128}}
{"type":"error","time":1002500,"pid":100,"tid":101,"cpu":1,"offset":N,"message":"a hit of libc/malloc is not whole: 1 of 3 words"}
{"type":"ptwrite","time":1002600,"pid":100,"tid":101,"cpu":1,"comm":"wo\"rk,\\x1b[1m\\xff","ip":"0x405000","value":57005}
{"type":"error","time":1002600,"pid":100,"tid":101,"cpu":1,"offset":N,"message":"the CPU dropped packets here (OVF)"}
{"type":"hit","time":1002700,"pid":100,"tid":101,"cpu":1,"comm":"wo\"rk,\\x1b[1m\\xff","event":"prog/tick","ip":"0x402000","args":{}}
{"type":"error","time":1002700,"pid":100,"tid":101,"cpu":1,"offset":N,"message":"bytes that are no packet; decoding goes on at the next PSB"}
{"type":"error","time":1002700,"pid":100,"tid":101,"cpu":1,"offset":N,"message":"1 bytes skipped up to a PSB"}
"""  # noqa: E501

CSV = r"""
type,time,pid,tid,cpu,comm,event,ip,args,count,message
hit,1001000,100,100,0,prog,libc/malloc,0x401000,size=64 flags=0xff delta=-1,,
hit,1001250,100,101,1,"wo""rk,\x1b[1m\xff",libc/malloc,0x401000,size=9007199254740993 flags=0x0 delta=127,,
lost,1001400,,,1,,,,,5,
torn,1001450,,,0,,,,,1,
hit,1001500,100,100,0,prog,prog/tick,0x402000,,,
hit,1002000,100,100,1,prog,libc/malloc,0x401000,size=9007199254740992 flags=0x1 delta=-128,,
error,1002500,100,101,1,"wo""rk,\x1b[1m\xff",,,,,a hit of libc/malloc is not whole: 1 of 3 words (byte N)
ptwrite,1002600,100,101,1,"wo""rk,\x1b[1m\xff",,0x405000,value=0xdead,,
error,1002600,100,101,1,"wo""rk,\x1b[1m\xff",,,,,the CPU dropped packets here (OVF) (byte N)
hit,1002700,100,101,1,"wo""rk,\x1b[1m\xff",prog/tick,0x402000,,,
error,1002700,100,101,1,"wo""rk,\x1b[1m\xff",,,,,bytes that are no packet; decoding goes on at the next PSB (byte N)
error,1002700,100,101,1,"wo""rk,\x1b[1m\xff",,,,,1 bytes skipped up to a PSB (byte N)
"""


@pytest.mark.parametrize(("format", "expected"), [("text", TEXT), ("jsonl", JSON_LINES), ("csv", CSV)])
def test_the_whole_output_is_as_expected(small: Path, format: str, expected: str) -> None:
    got, totals = lines(small, format)
    # Where in the file an error is, another test tells.
    got = [re.sub(r'(byte |"offset":)\d+', r"\1N", line) for line in got]
    got = [line.replace(" of the file)", ")") for line in got]
    assert got == [line for line in expected.splitlines() if line]
    assert totals == ALL


def test_json_lines_and_csv_are_read_by_their_parsers(small: Path) -> None:
    objects = [json.loads(line) for line in lines(small, "jsonl")[0]]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines(small, "csv")[0]))))
    assert len(objects) == len(rows) == 12
    assert [str(o["time"]) for o in objects] == [row["time"] for row in rows]
    assert objects[1]["comm"] == rows[1]["comm"] == 'wo"rk,\\x1b[1m\\xff'


def test_events_are_chosen_by_globs_and_losses_stay(small: Path) -> None:
    got, totals = lines(small, events=["*/tick"])
    assert totals == Totals(hits=2, lost=5, torn=1, stray=0, errors=4)
    assert sum("prog/tick" in line for line in got) == 2
    assert lines(small, events=["tick", "mal*"])[1].hits == 5
    assert lines(small, events=["libc"])[1].hits == 0


def test_threads_are_chosen_by_tid(small: Path) -> None:
    assert lines(small, tids=[100])[1] == Totals(hits=3, lost=5, torn=1)
    assert lines(small, tids=[100, 101])[1] == ALL


def test_times_are_chosen_in_ns_or_seconds(small: Path) -> None:
    assert lines(small, time=f"{ns_of(2500)},{ns_of(3000)}")[1] == Totals(hits=2, lost=5, torn=1)
    assert lines(small, time=f"0.001002,{ns_of(4000)}")[1] == Totals(hits=1)
    assert lines(small, time=",0.0010012")[1] == Totals(hits=1)
    assert lines(small, time="0.0010027,")[1] == Totals(hits=1, errors=2)


@pytest.mark.parametrize("text", ["5", "a,b", "1,2,3", "-1,", "1e3,", "1.2.3,", "٣,"])
def test_a_time_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--time"):
        script.parse_time_range(text)


def test_a_time_range_may_be_open() -> None:
    assert script.parse_time_range("5,") == (5, None)
    assert script.parse_time_range(",1.5") == (None, 1_500_000_000)
    assert script.parse_time_range("0.0000000019,") == (1, None)


def test_a_reader_that_goes_away_ends_it_quietly(small: Path) -> None:
    trace = ptwprobe.open(small)
    for write in (script.write, dump.write):
        read_end, write_end = os.pipe()
        os.close(read_end)
        try:
            write(trace, write_end)
        finally:
            os.close(write_end)


def test_an_output_that_cannot_be_written_is_an_error(small: Path) -> None:
    for write in (script.write, dump.write):
        with (
            Path("/dev/full").open("wb") as full,
            pytest.raises(OutputError, match=r"cannot write the output: No space left on device$"),
        ):
            write(ptwprobe.open(small), full.fileno())


def test_dump_shows_what_is_lost_cut_or_no_record(small: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(small / "perf.data", tmp_path))

    def dumped() -> tuple[str, int]:
        out = tmp_path / "out"
        with out.open("wb") as file:
            errors = dump.write(ptwprobe.open(path), file.fileno())
        return out.read_text(), errors

    text, errors = dumped()
    assert re.search(r"^LOST at 0x[0-9a-f]+: 5 hits$", text, re.MULTILINE)
    assert re.search(r"^TORN at 0x[0-9a-f]+: 1 hits$", text, re.MULTILINE)
    assert (errors, text.count("error")) == (1, 1)
    whole = path.read_bytes()
    end = int.from_bytes(whole[40:48], "little") + int.from_bytes(whole[48:56], "little")
    cut = whole.rfind((71).to_bytes(4, "little") + bytes(2)) + 48 + 40
    path.write_bytes(whole[:cut])
    text, errors = dumped()
    *_, last = text.splitlines()
    assert last == f"error: the file is cut here: {end - cut} bytes are missing (byte {cut} of the file)"
    assert (errors, text.count("error")) == (2, 2)
    first = whole.find((71).to_bytes(4, "little") + bytes(2))
    path.write_bytes(whole[:first] + b"\xff" * 8 + whole[first + 8 :])
    text, errors = dumped()
    assert re.search(rf"^error: \d+ bytes that are no records; .* \(byte {first} of the file\)$", text, re.MULTILINE)
    assert errors == 2


def test_dump_shows_every_packet_with_its_offset(tmp_path: Path) -> None:
    session = Session(tmp_path / "d.ptw")
    packets = [
        "00", "06", "fc", "02a3050000000080", "2d3412", "51 04030201", "61060504030201", "9d060504030201",
        "dd0807060504030201", "0243 030000000000", "9905", "9921", "0283", "02031e00", "1907060504030201",
        "0273020100ff01", "5942", "fb", "02c8 0100000000", "02f3", "02c388 0100000000000000", "029201000000",
        "02320100000000000001", "02e2", "02c2 6000000001000000", "02228021", "02a23408000000", "026384", "0c01000000",
        "02b3", "0213810e", "0253000900000000000000",
    ]  # fmt: skip
    session.raw(100, chunk(0x1000, *map(bytes.fromhex, packets), b"\x02\xff\x00", PSB, PSBEND, b"\x19\x01"), 0x1000)
    session.finish()
    out = tmp_path / "out"
    with out.open("wb") as file:
        assert dump.write(ptwprobe.open(tmp_path / "d.ptw"), file.fileno()) == 2
    head, *rest = out.read_text().splitlines()
    assert head.startswith("AUXTRACE at 0x")
    assert "idx 0 tid 100 cpu - size 0x" in head
    assert [line[59:].split(" (byte")[0] for line in rest] == [
        "PSB", "TSC 0x1000", "PSBEND", "PAD", "TNT.8 T", "TNT.8 TTTTTN", "TNT.64 " + "N" * 44 + "TNT", "TIP 1: 0x1234",
        "TIP.PGE 2: 0x1020304", "TIP.PGD 3: 0x10203040506", "FUP 4: 0x10203040506", "FUP 6: 0x102030405060708",
        "PIP cr3 0x20 nr 1", "MODE.Exec cs.l 1 cs.d 0 if 1", "MODE.TSX intx 1 abort 0", "TraceStop", "CBR 30",
        "TSC 0x1020304050607", "TMA ctc 0x102 fast 0x1ff", "MTC 0x42", "CYC 31", "VMCS 0x1000", "OVF", "MNT 0x1",
        "PTW.4 0x1 ip", "PTW.8 0x100000000000001", "EXSTOP ip", "MWAIT hints 0x60 ext 0x1", "PWRE c-state 0x21 hw 1",
        "PWRX last 3 deepest 4 wake 0x8", "BBP type 0x4 items of 4", "BIP.4 id 0x1 0x1", "BEP ip",
        "CFE type 0x1 vector 0xe ip", "EVD type 0x0 0x9", "error: no packet: goes on at the next PSB", "PSB", "PSBEND",
        "error: cut: the chunk ends inside a packet",
    ]  # fmt: skip
    start = int(head.rsplit(" ", 1)[1], 16)
    for line in rest:
        in_file = re.search(r" \(byte (\d+) of the file\)$", line)
        assert (in_file is not None) == ("error" in line)
        assert in_file is None or int(in_file[1]) == start + int(line[:8], 16)
    offsets = [int(line[:8], 16) for line in rest]
    assert offsets == sorted(offsets)
    assert rest[1] == "00000010:  19 00 10 00 00 00 00 00                         TSC 0x1000"
