"""Control flow as decoders and the generator write it to files, and how much of one such list is in another."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PAIR = 16
"""Bytes of a (from, to)."""
_WINDOW = 8
"""So many branches in a row say where two lists meet again."""
_AHEAD = 200_000
"""Branches that may be lost at once."""
_STEP = 64
_CANDIDATES = 100
_TRUST = 200
"""So many branches may be passed over for each that is the same behind them."""


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
        content = words.tobytes()
        kept, begin = [], 0
        for index in sorted(set(self._touching(without))):
            kept.append(content[begin * PAIR : index * PAIR])
            begin = index + 1
        return b"".join([*kept, content[begin * PAIR :]])

    def _touching(self, ranges: Sequence[tuple[int, int]]) -> Iterator[int]:
        """Indexes of the branches with an end in one of the ranges."""
        low, high = min((start for start, _ in ranges), default=0), max((end for _, end in ranges), default=0)
        for ends in (self.source, self.target):
            # Few lie near, and only these are looked at closely.
            near = [index for index, address in enumerate(ends) if low <= address < high]
            yield from (index for index in near if any(start <= ends[index] < end for start, end in ranges))


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
    first_errors: list[str] = field(default_factory=list)
    lists: Lists | None = None


def common(truth: bytes, found: bytes) -> int:
    """How many (from, to) of ``found`` stand in ``truth``, both as :meth:`Branches.pairs`, in the same order.

    Where they part, the nearest place further on at which some in a row are the same is where they meet again. It is
    looked for in steps that grow, since a decoder that went astray may yield very many that never were.
    """
    at = mark = kept = 0
    while at < len(found) and mark < len(truth):
        same = _same(truth, mark, found, at)
        kept += same
        at += same * PAIR
        mark += same * PAIR
        parted_at, parted_mark, step = at, mark, 1
        while at < len(found):
            place = _find(truth, mark, found, at)
            if place >= 0:
                mark = place
                break
            at += step * PAIR
            step = min(2 * step, _STEP)
        # Back over what a step went too far.
        while at > parted_at and mark > parted_mark and truth[mark - PAIR : mark] == found[at - PAIR : at]:
            at -= PAIR
            mark -= PAIR
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


def _find(truth: bytes, mark: int, found: bytes, at: int) -> int:
    """Where ``truth`` goes on like ``found`` does at ``at``: for the longer, the further on that is. -1: nowhere."""
    window = found[at : at + _WINDOW * PAIR]
    end = mark + _AHEAD * PAIR
    place = mark - 1
    for _ in range(_CANDIDATES):
        place = truth.find(window, place + 1, end)
        if place < 0:
            return -1
        if place % PAIR:
            continue
        same = _same(truth, place, found, at)
        if same * _TRUST >= (place - mark) // PAIR or at + same * PAIR == len(found):
            return place
    return -1
