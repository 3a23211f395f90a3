"""Assembly templates with named fields: filled with values, and matched against memory to read the values back.

A template (``stubs/NAME.s``) has two kinds of blanks. ``<name>`` is text, a register name, say: every combination of
texts is assembled on its own. ``{name:kind}`` is a number with a fixed place in the bytes. A combination is assembled
once, with placeholders; where the bytes change with a placeholder is that field's place. After that, filling is a copy
of the bytes and a few stores, and matching a comparison under a mask.

Which templates make up a stub is not known here (``assemble.py``, ``match.py``).
"""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import keystone

from .. import _native
from ..errors import StubError
from .encode import expand

_FIELD = re.compile(r"\{(\w+):(\w+)\}")
_TEXT = re.compile(r"<(\w+)>")


class FieldKind(Enum):
    """What a field holds. Relative ones are given and read as the absolute address that they lead to."""

    U8 = "u8"
    U32 = "u32"
    S32 = "s32"
    U64 = "u64"
    REL8 = "rel8"
    REL32 = "rel32"


_PACKER = {
    FieldKind.U8: struct.Struct("<B"),
    FieldKind.U32: struct.Struct("<I"),
    FieldKind.S32: struct.Struct("<i"),
    FieldKind.U64: struct.Struct("<Q"),
    FieldKind.REL8: struct.Struct("<b"),
    FieldKind.REL32: struct.Struct("<i"),
}

# Two values for each kind that differ in every byte, large enough for keystone to choose the full width.
_PLACEHOLDERS = {
    FieldKind.U8: (0x11, 0x22),
    FieldKind.U32: (0x11223344, 0x55667788),
    FieldKind.S32: (0x11223344, 0x55667788),
    FieldKind.U64: (0x1122334455667788, 0x99AABBCCDDEEFF10),
    FieldKind.REL8: (0x40, 0x60),
    FieldKind.REL32: (0x11223344, 0x55667788),
}


@dataclass(frozen=True)
class Field:
    """A number's place: ``offset`` in bytes from the start of the pattern."""

    name: str
    kind: FieldKind
    offset: int

    @property
    def packer(self) -> struct.Struct:
        return _PACKER[self.kind]

    @property
    def relative(self) -> bool:
        return self.kind in (FieldKind.REL8, FieldKind.REL32)

    @property
    def end(self) -> int:
        # A relative field is the last part of its instruction, so it counts from here.
        return self.offset + self.packer.size


class Pattern:
    """An assembled template: its bytes, and where its fields are."""

    def __init__(self, name: str, lines: tuple[str, ...], code: bytes, fields: tuple[Field, ...]) -> None:
        self.name = name
        self.lines = lines
        self.fields = fields
        self.size = len(code)
        mask = bytearray(b"\xff" * len(code))
        for field in fields:
            mask[field.offset : field.end] = bytes(field.packer.size)
        self._mask = int.from_bytes(mask, "little")
        self._fixed = int.from_bytes(code, "little") & self._mask
        self._blank = self._fixed.to_bytes(len(code), "little")
        self._places = tuple((f.name, f.packer, f.offset, f.end if f.relative else None) for f in fields)

    def fill(self, addr: int, values: Mapping[str, int]) -> bytes:
        """The bytes at ``addr``. A value that does not fit its field is a :class:`StubError`."""
        code = bytearray(self._blank)
        for name, packer, offset, end in self._places:
            value = values[name]
            try:
                packer.pack_into(code, offset, value if end is None else value - addr - end)
            except struct.error as error:
                raise StubError(
                    f"{name}={value:#x} does not fit the stub at {addr:#x} (template {self.name})"
                ) from error
        return bytes(code)

    def match(self, code: bytes, addr: int, offset: int = 0) -> dict[str, int] | None:
        """The fields, if ``code`` has this pattern at ``offset``; ``addr`` is the address of that place."""
        if offset < 0 or offset + self.size > len(code):
            return None
        if int.from_bytes(code[offset : offset + self.size], "little") & self._mask != self._fixed:
            return None
        values = {}
        for name, packer, place, end in self._places:
            (value,) = packer.unpack_from(code, offset + place)
            values[name] = value if end is None else addr + end + value
        return values

    def text(self, values: Mapping[str, int]) -> Iterator[str]:
        """The instructions with their values, as the template writes them."""
        for line in self.lines:
            yield _FIELD.sub(lambda m: f"{values[m[1]]:#x}", line)


@functools.cache
def pattern(name: str, **texts: str) -> Pattern:
    """The template ``name`` with ``texts`` in its ``<blanks>``."""
    source = _native.stub_template(name)
    if source is None:
        raise ValueError(f"no template {name}")
    lines = tuple(_TEXT.sub(lambda m: texts[m[1]], line) for line in _instructions(source))
    kinds = {name: FieldKind(kind) for name, kind in _FIELD.findall("\n".join(lines))}
    first = {name: _PLACEHOLDERS[kind][0] for name, kind in kinds.items()}
    code = _assemble(lines, first)
    fields = tuple(_locate(name, kind, lines, first, code) for name, kind in kinds.items())
    return Pattern(name, lines, code, fields)


def _instructions(source: str) -> Iterator[str]:
    for line in source.splitlines():
        stripped = line.partition("#")[0].strip()
        if stripped:
            yield stripped


def _locate(name: str, kind: FieldKind, lines: tuple[str, ...], first: Mapping[str, int], code: bytes) -> Field:
    other = _assemble(lines, {**first, name: _PLACEHOLDERS[kind][1]})
    places = [i for i, (a, b) in enumerate(zip(code, other, strict=True)) if a != b]
    size = _PACKER[kind].size
    if not places or places != list(range(places[0], places[0] + size)):
        raise ValueError(f"field {name} has no place of {size} bytes in {lines}")
    return Field(name, kind, places[0])


@functools.cache
def _keystone() -> keystone.Ks:
    return keystone.Ks(keystone.KS_ARCH_X86, keystone.KS_MODE_64)


def _assemble(lines: tuple[str, ...], values: Mapping[str, int]) -> bytes:
    text = "\n".join(expand(_FIELD.sub(lambda m: f"{values[m[1]]:#x}", line)) for line in lines)
    code, _ = _keystone().asm(text, 0)
    if code is None:
        raise ValueError(f"keystone made nothing of {lines}")
    return bytes(code)
