"""Made-up Intel PT traces over real ELF files, with the truth beside them: front of the generator in
``ptwprobe/native/examples/ptgen``, which describes its options and files.
"""

from __future__ import annotations

import functools
import json
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST = Path(__file__).parent.parent / "ptwprobe/native/Cargo.toml"

KINDS = (
    *("cond", "jump", "indirect-jump", "call", "indirect-call", "return", "syscall", "far-return"),
    *("interrupt", "trace-start", "trace-end", "tx-abort", "far-other"),
)


class Branch(NamedTuple):
    """A taken branch; ``kind`` is an index of :data:`KINDS`. An address is 0 where packets do not tell it."""

    from_addr: int
    to_addr: int
    kind: int


class Hit(NamedTuple):
    """A PTW packet: ``branches`` were before it, ``ip`` is that of its FUP (0 without one)."""

    branches: int
    value: int
    ip: int
    tsc: int


class Psb(NamedTuple):
    """A PSB at ``offset`` in the stream, with so many branches and hits before it. ``ip`` is that of its FUP (0 without
    one)."""

    offset: int
    branches: int
    hits: int
    ip: int


@functools.cache
def generator() -> Path:
    """The program, built if need be."""
    command = ["cargo", "build", "--release", "--example", "ptgen", "--message-format", "json"]
    command += ["--manifest-path", str(MANIFEST)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    for line in done.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message["target"]["name"] == "ptgen":
            return Path(message["executable"])
    raise FileNotFoundError("cargo built no example ptgen")


@dataclass(frozen=True)
class Made:
    """What the generator left in ``folder``; the methods take the number of a stream (a thread)."""

    folder: Path
    truth: dict[str, Any]
    """``truth.json``."""

    @property
    def perf_data(self) -> Path:
        return self.folder / "perf.data"

    def aux(self, stream: int = 0) -> bytes:
        """The packets."""
        return self._bytes("aux", stream)

    def branch_bytes(self, stream: int = 0) -> bytes:
        """24 bytes for each taken branch: from, to, kind."""
        return self._bytes("branches", stream)

    def branches(self, stream: int = 0) -> list[Branch]:
        return [Branch(*record) for record in struct.iter_unpack("<QQB7x", self.branch_bytes(stream))]

    def hits(self, stream: int = 0) -> list[Hit]:
        return [Hit(*record) for record in struct.iter_unpack("<QQQQ", self._bytes("hits", stream))]

    def psbs(self, stream: int = 0) -> list[Psb]:
        return [Psb(*record) for record in struct.iter_unpack("<QQQQ", self._bytes("psbs", stream))]

    def losses(self, stream: int = 0) -> list[dict[str, Any]]:
        """Branches ``first`` to ``sure`` may be known, from there to ``end`` cannot; behind cut bytes a decoder may be
        astray up to ``until``."""
        losses: list[dict[str, Any]] = self.truth["streams"][stream]["losses"]
        return losses

    def _bytes(self, name: str, stream: int) -> bytes:
        return (self.folder / f"{name}{f'-{stream}' if stream else ''}.bin").read_bytes()


def make(folder: Path, elf: Path | str, *words: str, seed: int = 1, **options: object) -> Made:
    """Runs the generator: ``make(folder, "libc.so.6", "--all", seed=3, bytes=100_000, with_="retc,tsc")``."""
    command = [str(generator()), "--elf", str(elf), "--out", str(folder), "--seed", str(seed), *words]
    for name, value in options.items():
        command += [f"--{name.rstrip('_').replace('_', '-')}", str(value)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
    return Made(folder, json.loads((folder / "truth.json").read_text()))


def features() -> Iterator[str]:
    """Names of all features."""
    done = subprocess.run([str(generator()), "--list"], stderr=subprocess.PIPE, text=True, check=False)
    return (line.split()[0] for line in done.stderr.splitlines())
