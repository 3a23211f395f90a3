"""The check that stands before a stub is used: its bytes, disassembled by a decoder that is not the assembler, are the
instructions that the templates say, one by one, with their values.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator

from .. import _native
from ..errors import StubError
from .layout import Layout, Piece

DISPLACED = "displaced"
"""Name of the one raw piece that is code."""

_SIZE = re.compile(r"\b(?:byte|word|dword|qword) ptr ")
_NUMBER = re.compile(r"([+-])? ?(-)?(?<!\w)(0x[0-9a-f]+|\d+)\b")


def verified(layout: Layout) -> tuple[bytes, tuple[str, ...]]:
    """The layout's code and its listing.

    :raises StubError: an instruction is not what its template says
    """
    code = []
    listing: list[str] = []
    for piece, data, meant in layout.filled():
        instructions = _native.stub_listing(data, piece.addr) if meant or piece.name == DISPLACED else []
        if meant:
            _compare(piece, [text for _, _, text in instructions], meant)
        code.append(data)
        listing.append(f"; {piece.name}")
        listing.extend(_lines(piece.addr, data, instructions))
    return b"".join(code), tuple(listing)


def _compare(piece: Piece, texts: list[str], meant: list[str]) -> None:
    if len(texts) == len(meant) and all(canonical(a) == canonical(b) for a, b in zip(texts, meant, strict=True)):
        return
    wrong = next(((a, b) for a, b in zip(texts, meant, strict=False) if canonical(a) != canonical(b)), (texts, meant))
    raise StubError(f"template {piece.name} at {piece.addr:#x} came out as {wrong[0]!r}, meant was {wrong[1]!r}")


def _lines(addr: int, data: bytes, instructions: Iterable[tuple[int, int, str]]) -> Iterator[str]:
    """One line an instruction; eight bytes a line for what is not code."""
    shown = False
    for at, length, text in instructions:
        shown = True
        yield f"{at:#x}: {data[at - addr : at - addr + length].hex(' '):<32} {text}"
    if not shown:
        for offset in range(0, len(data), 8):
            yield f"{addr + offset:#x}: {data[offset : offset + 8].hex(' ')}"


@functools.lru_cache(maxsize=1 << 12)
def canonical(text: str) -> str:
    """An instruction's text without what two writers of the same instruction may differ in."""
    text = _SIZE.sub("", text.replace("movabs", "mov")).replace("[rip + ", "[")
    return _NUMBER.sub(_number, text).replace(" ", "")


def _number(match: re.Match[str]) -> str:
    sign, minus, digits = match.groups()
    value = int(digits, 0)
    if (sign == "-") != (minus is not None):
        value = -value
    if sign is None:
        return str(value % (1 << 64))
    return f"{value:+d}" if value else ""
