"""Generated traces as the benches of decoders want them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests import ptgen
from tests.peers.auxdata import Image
from tests.peers.flow import Lists

LIBC = Path("/lib/x86_64-linux-gnu/libc.so.6")


@dataclass(frozen=True)
class Trace:
    """One thread's trace over :data:`LIBC`, and its truth."""

    made: ptgen.Made

    @property
    def perf_data(self) -> Path:
        return self.made.perf_data

    @property
    def aux(self) -> Path:
        """The packets alone."""
        return self.made.folder / "aux.bin"

    @property
    def branches(self) -> int:
        return int(self.made.truth["streams"][0]["branches"])

    @property
    def hits(self) -> int:
        """PTWRITEs."""
        return int(self.made.truth["streams"][0]["hits"])

    @property
    def words(self) -> int:
        """PTWRITEs of one hit of a probe."""
        return int(self.made.truth["words"])

    @cached_property
    def images(self) -> list[Image]:
        """The code that files have."""
        mappings = [mapping for mapping in self.made.truth["mappings"] if not mapping["path"].startswith("[")]
        return [Image(Path(each["path"]), each["offset"], each["len"], each["addr"]) for each in mappings]

    @cached_property
    def stubs(self) -> list[tuple[int, int, int, int]]:
        """Start, end, site, and where the program goes on."""
        return [(stub["start"], stub["end"], stub["site"], stub["continue"]) for stub in self.made.truth["stubs"]]

    def truth(self) -> Lists:
        return Lists.read(self.made.folder / "branches.bin", self.made.folder / "hits.bin")


def generate(folder: Path, preset: str, megabytes: int, *flags: str, **options: object) -> Trace:
    """``flags`` and ``options`` as the generator's command line has them, without their dashes."""
    words = [f"--{flag}" for flag in flags]
    for name, value in options.items():
        words += [f"--{name}", str(value)]
    return Trace(ptgen.make(folder, LIBC, "--preset", preset, *words, bytes=megabytes << 20))
