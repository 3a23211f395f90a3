"""Stock decoders walk through our patches and stubs by what a session says of the code that ran."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import ptwprobe
from tests.peers.auxdata import AuxData, Image, records
from tests.peers.flow import Decoded
from tests.peers.handmade import fup, pgd, pge, psb, tip, tnt
from tests.peers.ipt import Ipt
from tests.peers.perfpt import PerfPt
from tests.targets import Target

perf_here = pytest.mark.skipif(bool(PerfPt.missing()), reason=f"perf {PerfPt.missing()}")
ipt_here = pytest.mark.skipif(bool(Ipt.missing()), reason=f"libipt {Ipt.missing()}")

_ATTR_CONFIG_AT = 104 + 16 + 8
_BRANCH = 1 << 13
_AUXTRACE = 71


@dataclass(frozen=True)
class Walked:
    """A session whose perf.data has a made-up walk through the probed function, twice."""

    folder: Path
    trace: bytes
    branches: list[tuple[int, int]]

    @property
    def perf_data(self) -> Path:
        return self.folder / "perf.data"


@pytest.fixture
def walked(progs: Callable[..., Path], start: Callable[..., Target], tmp_path: Path) -> Walked:
    """The first walk finds the gate of the stub closed, the second writes a record."""
    target = start(progs("calls"), "1", "100000000", "1000")
    session = ptwprobe.Session(pid=target.pid, output=tmp_path / "s.ptw")
    session.add("probe_me a=$arg1:s64 b=$arg2:s64")
    session.start()
    time.sleep(0.05)
    now_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    time.sleep(0.05)
    session.stop()
    document = json.loads((tmp_path / "s.ptw" / "session.json").read_text())
    clock, [site] = document["clock"], document["events"][0]["sites"]
    # The zero of the clock is a number modulo 2^64.
    tsc = ((now_ns - clock["zero"]) % (1 << 64) << clock["shift"]) // clock["mult"]
    addr, stub = site["addr"], site["stub"]
    images = _first(tmp_path / "s.ptw" / "perf.data")
    image = next(i for i in images if i.addr <= stub < i.addr + i.size)
    code = image.path.read_bytes()[image.file_offset + stub - image.addr :][: site["stub_end"] - stub]
    je = stub + code.index(b"\x0f\x84")
    leave = je + 6 + struct.unpack_from("<i", code, je - stub + 2)[0]
    back = next(
        stub + at
        for at in range(len(code) - 5)
        if code[at] == 0xE9 and stub + at + 5 + struct.unpack_from("<i", code, at + 1)[0] == site["continue"]
    )
    ret = next(at for at in range(site["continue"], site["continue"] + 64) if _byte(images, at) == 0xC3)
    around = [(addr, stub), (back, site["continue"]), (ret, addr)]
    branches = [around[0], (je, leave), *around[1:], *around]
    # At the end the program is interrupted at the site.
    steps = [pge(addr), tnt("T"), tip(addr), tnt("NNNN"), tip(addr), fup(addr), pgd()]
    trace = psb(tsc) + bytes.fromhex("9901") + b"".join(steps)
    _replace_trace(tmp_path / "s.ptw" / "perf.data", trace, target.pid, tsc)
    return Walked(tmp_path / "s.ptw", trace, branches)


def _first(perf_data: Path) -> list[Image]:
    """What was mapped before the probes came out."""
    out: list[Image] = []
    for image in AuxData.read(perf_data).images:
        if not any(image.addr < i.addr + i.size and i.addr < image.addr + image.size for i in out):
            out.append(image)
    return out


def _byte(images: Sequence[Image], addr: int) -> int:
    image = next(i for i in images if i.addr <= addr < i.addr + i.size)
    return image.path.read_bytes()[image.file_offset + addr - image.addr]


def _replace_trace(perf_data: Path, trace: bytes, tid: int, tsc: int) -> None:
    """As if the PT of the CPU, branches included, had been recorded instead of the ring."""
    content = perf_data.read_bytes()
    data_at, _ = struct.unpack_from("<2Q", content, 40)
    head = bytearray(content[:data_at])
    config = struct.unpack_from("<Q", head, _ATTR_CONFIG_AT)[0]
    struct.pack_into("<Q", head, _ATTR_CONFIG_AT, config | _BRANCH)
    data = b"".join(record for kind, record, _ in records(content) if kind != _AUXTRACE)
    chunk = struct.pack("<IHHQQQIIII", _AUXTRACE, 0, 48, len(trace), 0, tsc, 0, tid, 0xFFFFFFFF, 0)
    data += chunk + trace
    struct.pack_into("<Q", head, 48, len(data))
    # No features: they stood behind the data.
    head[72:104] = bytes(32)
    perf_data.write_bytes(bytes(head) + data)


def _pairs(decoded: Decoded) -> list[tuple[int, int]]:
    assert decoded.lists is not None
    branches = decoded.lists.branches
    return [(a, b) for a, b in zip(branches.source, branches.target, strict=True) if a and b]


@perf_here
@pytest.mark.needs("root")
def test_perf_walks_through_patch_and_stub(walked: Walked, tmp_path: Path) -> None:
    decoded = PerfPt(tmp_path).decode(walked.perf_data, "be", lists=True)
    assert decoded.first_errors == []
    assert _pairs(decoded) == walked.branches


@perf_here
@pytest.mark.needs("root")
def test_without_the_images_perf_knows_that_it_does_not_know(walked: Walked, tmp_path: Path) -> None:
    (walked.folder / "images").rename(tmp_path / "elsewhere")
    decoded = PerfPt(tmp_path).decode(walked.perf_data, "be", lists=True)
    assert decoded.first_errors
    assert _pairs(decoded) == []


@ipt_here
@pytest.mark.needs("root")
def test_libipt_walks_through_patch_and_stub(walked: Walked, tmp_path: Path) -> None:
    (tmp_path / "aux").write_bytes(walked.trace)
    decoded = Ipt(tmp_path).decode("insns", tmp_path / "aux", _first(walked.perf_data), lists=True)
    assert decoded.first_errors == []
    assert _pairs(decoded) == walked.branches
