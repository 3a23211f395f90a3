"""Control flow as decoders and the generator write it to files, and how much of one such list is in another."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

PAIR = 16
"""Bytes of a (from, to)."""
_WINDOW = 8
"""So many branches in a row say where two lists meet again."""
_AHEAD = 400_000
"""Branches that may be lost at once."""


@dataclass(frozen=True)
class Branches:
    """Taken branches in program order. ``third``: the kind, or whatever else its writer put there."""

    source: array[int]
    target: array[int]
    third: array[int]

    @classmethod
    def read(cls, path: Path) -> Branches:
        """Records of 24 bytes: from, to and a third u64."""
        words = array("Q", path.read_bytes())
        return cls(words[0::3], words[1::3], words[2::3])

    def __len__(self) -> int:
        return len(self.source)

    def pairs(self, without: Sequence[tuple[int, int]] = ()) -> bytes:
        """(from, to) of each, but for those with an end in one of the ranges ``without`` (start, end)."""
        words = array("Q", bytes(PAIR * len(self)))
        words[0::2], words[1::2] = self.source, self.target
        if not any(self._touches(start, end) for start, end in without):
            return words.tobytes()
        kept = array("Q")
        for pair in zip(self.source, self.target, strict=True):
            if not any(start <= address < end for start, end in without for address in pair):
                kept.extend(pair)
        return kept.tobytes()

    def _touches(self, start: int, end: int) -> bool:
        """Whether any address may be in the range; quicker than to look at each."""
        return any(len(ends) > 0 and max(ends) >= start and min(ends) < end for ends in (self.source, self.target))


@dataclass(frozen=True)
class Hit:
    """A PTWRITE, after so many branches. ``ip`` 0: not told. ``time``: TSC or ns, as its writer has it."""

    branches: int
    value: int
    ip: int
    time: int

    @staticmethod
    def read(path: Path) -> list[Hit]:
        """Records of 32 bytes."""
        return [Hit(*words) for words in struct.iter_unpack("<4Q", path.read_bytes())]


@dataclass(frozen=True)
class Lists:
    branches: Branches
    hits: list[Hit]

    @classmethod
    def read(cls, branches: Path, hits: Path) -> Lists:
        return cls(Branches.read(branches), Hit.read(hits))


@dataclass(frozen=True)
class Decoded:
    """What a decoder found; ``lists`` only where they were wanted."""

    branches: int
    hits: int
    errors: int
    cpu_s: float
    max_rss_kb: int = 0
    first_errors: list[str] = field(default_factory=list)
    lists: Lists | None = None


def common(truth: bytes, found: bytes) -> int:
    """How many (from, to) of ``found`` stand in ``truth``, both as :meth:`Branches.pairs`, in the same order.

    Where they part, the nearest place further on at which some in a row are the same is where they meet again.
    """
    at = mark = kept = 0
    while at < len(found) and mark < len(truth):
        same = _same(truth, mark, found, at)
        kept += same
        at += same * PAIR
        mark += same * PAIR
        if at >= len(found):
            break
        window = found[at : at + _WINDOW * PAIR]
        place = _find(truth, window, mark)
        if place < 0:
            at += PAIR
        else:
            mark = place
    return kept


def _same(truth: bytes, mark: int, found: bytes, at: int) -> int:
    """Branches that are the same from ``mark`` and ``at`` on."""
    count, step = 0, 1 << 16
    while step:
        low, high = mark + count * PAIR, at + count * PAIR
        size = step * PAIR
        if len(truth) - low >= size and truth[low : low + size] == found[high : high + size]:
            count += step
        else:
            step //= 2
    return count


def _find(truth: bytes, window: bytes, mark: int) -> int:
    end = mark + _AHEAD * PAIR
    place = truth.find(window, mark, end)
    while place >= 0 and place % PAIR:
        place = truth.find(window, place + 1, end)
    return place
