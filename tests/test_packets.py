"""Packets, one by one, as stock decoders read them: ``dump`` beside ``perf script -D`` and libipt."""

from __future__ import annotations

import itertools
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.progs.build import build
from tests.synth import OVF, PSB, PSBEND, Session

DRIVER = Path(__file__).parent / "peers" / "ipt_packets.c"


class Line(NamedTuple):
    """A packet of a dump: where it is, its bytes, what it says."""

    offset: int
    data: bytes
    text: str


def packets(words: str) -> list[bytes]:
    return [bytes.fromhex(word) for word in words.split()]


EVERY: list[bytes] = [
    # Flow.
    *packets("00 06 fc fe 02a3050000000080 02a3020000000000"),
    *packets("2d3412 4d04030201 6d060504030281 8d060504030201 cd0807060504030201 0d"),
    *packets("310403 5104030201 11 210403 61060504030201 01 9d060504030201 dd0807060504030201 1d"),
    *packets("0243030000000000 0243feffffffff0f 9905 9900 9902 9901 9921 9922 9920 0283 02c80100000000"),
    # Time.
    *packets("02031e00 1907060504030201 0273020100ff01 02730201000000 5942 fb 03 0f04 ffffffff0e"),
    OVF,
    PSB,
    PSBEND,
    # Words and power.
    *packets("02c3880807060504030201 029201000000 02120403020a 0232080706050403020a 02b20807060504030201"),
    *packets("0262 02e2 02c26000000001000000 02c2ff00000003000000 02222080 02228021"),
    *packets("02a23408000000 02a21201000000 02a21204000000"),
]
BLOCKS: list[bytes] = [
    *packets("026384 0c01000000 fcffffffff 0233 026301 0c0102030405060708 5942 fc0102030405060708 02b3"),
    *packets("0213810e 02130100 02138aff 0253000900000000000000 0253011122334455667788"),
]
"""Blocks of items and events, which libipt does not know."""


def session(folder: Path, chunks: Sequence[bytes]) -> Path:
    made = Session(folder)
    for data in chunks:
        made.raw(100, data, 1000)
    return made.finish()


def lines(text: str, start: str, line: str) -> list[list[Line]]:
    """One list for each chunk, which begins with a line that has ``start``."""
    chunks: list[list[Line]] = []
    for row in text.splitlines():
        if start in row:
            chunks.append([])
        elif match := re.match(line + r"([0-9a-f]{8}): ((?: [0-9a-f]{2})+) +(.*)", row):
            data = bytes.fromhex(match[2])
            # PADs are put behind the packet before them by perf, and say nothing.
            if match[3] != "PAD":
                chunks[-1].append(Line(int(match[1], 16), data, match[3]))
    return chunks


def dump(folder: Path) -> list[list[Line]]:
    done = subprocess.run(["ptwprobe", "dump", str(folder)], capture_output=True, text=True, check=False)
    return lines(done.stdout, "AUXTRACE at", "")


def perf_dump(folder: Path) -> list[list[Line]]:
    command = ["perf", "script", "-D", "-i", str(folder / "perf.data")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return lines(done.stdout, "Intel Processor Trace data", r"\.  ")


def number(text: str) -> int:
    return int(text, 0)


Say = Callable[[re.Match[str]], str]

BITS = {"1 0": "64", "0 1": "32", "0 0": "16"}
AS_PERF: list[tuple[str, Say]] = [
    (r"TNT\.\d+ (\w+)", lambda m: f"TNT {m[1]} ({len(m[1])})"),
    (r"(TIP|TIP.PGE|TIP.PGD|FUP) \d: (.*)", lambda m: f"{m[1]} {m[2]}"),
    (r"PIP cr3 (.*) nr (.)", lambda m: f"PIP {number(m[1]) >> 5:#x} (NR={m[2]})"),
    (r"MODE.Exec cs.l (.) cs.d (.) if (.)", lambda m: f"MODE.Exec IF:{m[3]} {BITS[f'{m[1]} {m[2]}']}"),
    (r"MODE.TSX intx (.) abort (.)", lambda m: f"MODE.TSX TXAbort:{m[2]} InTX:{m[1]}"),
    (r"TraceStop", lambda m: "TraceSTOP"),
    (r"(CBR|CYC) (\d+)", lambda m: f"{m[1]} {number(m[2]):#x}"),
    (r"TMA ctc (.*) fast (.*)", lambda m: f"TMA CTC {m[1]} FC {m[2]}"),
    (r"VMCS (.*)", lambda m: f"VMCS {number(m[1]) >> 12:#x}"),
    (r"PTW\.\d (\w+)( ip)?", lambda m: f"PTWRITE {m[1]} IP:{int(bool(m[2]))}"),
    (r"(EXSTOP|BEP)( ip)?", lambda m: f"{m[1]} IP:{int(bool(m[2]))}"),
    (r"MWAIT hints (.*) ext (.*)", lambda m: f"Hints {m[1]} Extensions {m[2]}"),
    (
        r"PWRE c-state (.*) hw (.)",
        lambda m: f"HW:{m[2]} CState:{number(m[1]) >> 4} Sub-CState:{number(m[1]) & 15}",
    ),
    (
        r"PWRX last (.*) deepest (.*) wake (.*)",
        lambda m: f"Last CState:{m[1]} Deepest CState:{m[2]} Wake Reason {m[3]}",
    ),
    (r"BBP type (.*) items of (.)", lambda m: f"BBP SZ {m[2]}-byte Type {m[1]}"),
    (r"BIP\.\d id (.*) (.*)", lambda m: f"BIP ID {number(m[1]):#04x} Value {m[2]}"),
    (
        r"CFE type (\w+) vector (\w+)( ip)?",
        lambda m: f"CFE IP:{int(bool(m[3]))} Type {number(m[1]):#04x} Vector {m[2]}",
    ),
    (r"EVD type (.*) (.*)", lambda m: f"EVD Type {number(m[1]):#04x} Payload {m[2]}"),
]


def as_perf(text: str) -> str:
    """What perf calls the same packet."""
    for pattern, say in AS_PERF:
        if match := re.fullmatch(pattern, text):
            return say(match).replace("0x0 ", "0 ") if text.startswith("PIP") else say(match)
    return text


def perf_text(line: Line) -> str:
    """Without the raw payload that perf prints before its fields."""
    return re.sub(r"^(MWAIT|PWRE|PWRX) 0x\w+ ", "", line.text) if line.text != "PAD" else ""


@pytest.mark.skipif(not shutil.which("perf"), reason="no perf")
def test_perf_reads_every_packet_as_dump_does(tmp_path: Path) -> None:
    data = PSB + PSBEND + b"".join(EVERY + BLOCKS)
    folder = session(tmp_path / "every.ptw", [data])
    (ours,), (theirs,) = dump(folder), perf_dump(folder)
    assert sum(len(line.data) for line in ours) == len(data) - EVERY.count(b"\0")
    assert len(ours) == len(EVERY) + len(BLOCKS) + 2 - EVERY.count(b"\0")
    for line, their in zip(ours, theirs, strict=True):
        assert line.offset == their.offset
        assert their.data.startswith(line.data)
        assert not their.data[len(line.data) :].strip(b"\0")
        assert as_perf(line.text) == perf_text(their)


def damaged(rng: random.Random) -> bytes:
    """Packets in any order, some of them spoiled."""
    data = bytearray(PSB + PSBEND)
    for _ in range(rng.randrange(1, 20)):
        packet = bytearray(rng.choice(EVERY + BLOCKS))
        if rng.random() < 0.2:
            packet[rng.randrange(len(packet))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.1:
            del packet[rng.randrange(len(packet)) :]
        data += packet
    return bytes(data)


@pytest.mark.skipif(not shutil.which("perf"), reason="no perf")
@pytest.mark.parametrize("seed", range(2))
def test_perf_finds_the_same_packets_up_to_the_same_damage(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    folder = session(tmp_path / "damaged.ptw", [damaged(rng) for _ in range(1000)])
    bad = 0
    for ours, theirs in zip(dump(folder), perf_dump(folder), strict=True):
        for line, their in itertools.zip_longest(ours, theirs):
            # No stop bit: libipt has it for damage as well.
            if "error" in line.text or their.text in ("Bad packet!", "TNT  (0)"):
                assert "error" in line.text
                assert their.text in ("Bad packet!", "TNT  (0)")
                bad += 1
                break
            assert line.offset == their.offset
            assert their.data.startswith(line.data)
            # Reserved bits, which perf prints with the field beside them, may be set.
            assert as_perf(line.text).split()[0] == perf_text(their).split()[0]
    assert 200 < bad < 900


@pytest.mark.skipif(not Path("/usr/include/intel-pt.h").exists(), reason="no libipt-dev")
def test_libipt_reads_every_packet_as_dump_does(tmp_path: Path) -> None:
    data = PSB + PSBEND + b"".join(EVERY)
    (ours,) = dump(session(tmp_path / "every.ptw", [data]))
    aux = tmp_path / "aux"
    aux.write_bytes(data)
    command = [str(build(DRIVER, tmp_path)), str(aux)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    theirs = [line.split(" ", 2) for line in done.stdout.splitlines() if not line.endswith("PAD")]
    # It does not know the interrupt flag, and takes HW from bit 3 of its byte (the SDM, and perf, from bit 7).
    texts = [re.sub(r" (if|hw) \d", "", line.text) for line in ours]
    assert theirs == [[str(line.offset), str(len(line.data)), text] for line, text in zip(ours, texts, strict=True)]
