"""Pieces in a row: filled templates and raw bytes, with labels for the places that fields refer to.

Every piece has its size before any address is known, so one pass places them and a second one fills.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from .template import Pattern, pattern

NO_TEXTS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Piece:
    """A template and its values (a ``str`` is a label: the address of what has it), or bytes that no template makes."""

    name: str
    addr: int
    pattern: Pattern | None = None
    values: Mapping[str, int | str] = field(default_factory=dict)
    raw: bytes = b""


class Layout:
    """The code of one stub in the making, from ``addr`` on."""

    def __init__(self, addr: int) -> None:
        self.addr = addr
        self.next_addr = addr
        self.labels: dict[str, int] = {}
        self._pieces: list[Piece] = []

    @property
    def size(self) -> int:
        return self.next_addr - self.addr

    def label(self, name: str) -> None:
        """What comes next is called ``name``."""
        self.labels[name] = self.next_addr

    def add(self, template: str, texts: Mapping[str, str] = NO_TEXTS, /, **values: int | str) -> None:
        made = pattern(template, **texts)
        self._pieces.append(Piece(template, self.next_addr, made, values))
        self.next_addr += made.size

    def raw(self, name: str, data: bytes) -> None:
        """Bytes that no template makes: displaced code, literals."""
        self._pieces.append(Piece(name, self.next_addr, raw=data))
        self.next_addr += len(data)

    def filled(self) -> Iterator[tuple[Piece, bytes, list[str]]]:
        """Every piece, its bytes, and the instructions that its template means (none for raw bytes)."""
        for piece in self._pieces:
            if piece.pattern is None:
                yield piece, piece.raw, []
            else:
                values = {k: self.labels[v] if isinstance(v, str) else v for k, v in piece.values.items()}
                yield piece, piece.pattern.fill(piece.addr, values), list(piece.pattern.text(values))
