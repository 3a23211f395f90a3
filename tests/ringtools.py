"""For tests of the ring without a patched program: rings, a writer that does what a stub does, and perf's reading."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from ptwprobe import _native

EVENT = 0x8000
SLOTS = [0x7F0000001000, 0x7F0000001010, 0x7F0000001020]
MAGIC = 0x5054525731


class Rings:
    """A memfd with rings, as the recorder and as a target see it."""

    def __init__(self, rings: int = 2, ring_bits: int = 16) -> None:
        self.fd = os.memfd_create("ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.memory = _native.RingMemory(self.fd, rings, ring_bits)
        self.writer = _native.RingTestWriter(self.fd, rings, ring_bits)

    def __del__(self) -> None:
        os.close(self.fd)


def recorder(path: Path, rings: Rings, *, pid: int | None = None, nargs: int = 2) -> _native.Recorder:
    """A running recorder with one target and one event."""
    made = _native.Recorder(path, ["ptwprobe", "record"])
    pid = pid or os.getpid()
    made.add_event(EVENT, nargs)
    made.add_target(pid, rings.memory, "target")
    made.add_stub(pid, EVENT, (SLOTS + [SLOTS[-1] + 16 * i for i in range(1, 255)])[: nargs + 1])
    made.start()
    return made


# A payload that is text is printed as text, too.
PTWRITE = re.compile(r"\s*(\d+)/(\d+)\s+([\d.]+):\s+ptwrite:\s+IP: 1 payload: (0x[0-9a-f]+|0)\s.*\s([0-9a-f]+)$")


def perf_words(path: Path, itrace: str = "qwe") -> list[tuple[int, int, int, int]]:
    """(pid, tid, word, slot address) of every PTW, as ``perf script`` prints them."""
    done = subprocess.run(
        ["perf", "script", f"--itrace={itrace}", "--ns", "-F", "pid,tid,time,event,ip,synth", "-i", str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "rror" not in done.stderr, done.stderr
    matches = [PTWRITE.match(line) for line in done.stdout.splitlines()]
    assert all(matches), done.stdout[:1000]
    return [(int(m[1]), int(m[2]), int(m[4], 16), int(m[5], 16)) for m in matches if m]


def perf_records(path: Path) -> str:
    """perf's dump of all records."""
    done = subprocess.run(["perf", "script", "-D", "-i", str(path)], capture_output=True, text=True, check=True)
    return done.stdout


def hits_of(words: list[tuple[int, int, int, int]], nargs: int = 2) -> list[tuple[int, list[int]]]:
    """(tid, arguments) of each hit; every one has its header and its slots."""
    hits = []
    for first in range(0, len(words), nargs + 1):
        part = words[first : first + nargs + 1]
        assert part[0][2] == EVENT << 48 | nargs << 40 | MAGIC
        assert [slot for *_, slot in part][:3] == SLOTS[: nargs + 1][:3]
        assert len({tid for _, tid, *_ in part}) == 1
        hits.append((part[0][1], [word for _, _, word, _ in part[1:]]))
    return hits
