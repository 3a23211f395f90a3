"""What an object's dynamic linking says: its soname, and the relocations that tell how IFUNCs were bound.

Formats: System V ABI, AMD64 supplement, "Relocation"; the generic ABI, "Dynamic Section".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from ptwprobe.probe.elffile import ElfFile, c_string

_DT_NULL, _DT_SONAME = 0, 14
_RELA = struct.Struct("<QQq")
R_X86_64_64, R_X86_64_GLOB_DAT, R_X86_64_JUMP_SLOT, R_X86_64_IRELATIVE = 1, 6, 7, 37
_BY_SYMBOL = frozenset({R_X86_64_64, R_X86_64_GLOB_DAT, R_X86_64_JUMP_SLOT})


class Relocation(NamedTuple):
    """``vaddr`` of the word that is relocated."""

    vaddr: int
    type: int
    symbol: int
    addend: int


def soname(elf: ElfFile) -> str:
    """DT_SONAME, "" if there is none."""
    section = next((s for s in elf.sections if s.type == "SHT_DYNAMIC"), None)
    if section is None or section.link >= len(elf.sections):
        return ""
    data = elf.section_data(section)
    for tag, value in struct.iter_unpack("<QQ", data[: len(data) & ~15]):
        if tag == _DT_NULL:
            break
        if tag == _DT_SONAME:
            return c_string(elf.section_data(elf.sections[section.link]), value).decode("utf-8", "replace")
    return ""


def relocations(elf: ElfFile) -> Iterator[Relocation]:
    """The relocations that the dynamic linker (or a static program's start) applies."""
    for section in elf.sections:
        if section.type == "SHT_RELA" and section.allocated:
            data = elf.section_data(section)
            for vaddr, info, addend in _RELA.iter_unpack(data[: len(data) - len(data) % _RELA.size]):
                yield Relocation(vaddr, info & 0xFFFF_FFFF, info >> 32, addend)


def irelative_words(elf: ElfFile, resolver_vaddr: int) -> list[int]:
    """vaddrs of the words that hold what the IFUNC resolver at ``resolver_vaddr`` returned."""
    return [r.vaddr for r in relocations(elf) if r.type == R_X86_64_IRELATIVE and r.addend == resolver_vaddr]


def symbol_words(elf: ElfFile, names: set[str]) -> list[int]:
    """vaddrs of the words that are to hold the address of a dynamic symbol with one of ``names``."""
    dynsym = next((s for s in elf.sections if s.type == "SHT_DYNSYM"), None)
    if dynsym is None or dynsym.link >= len(elf.sections):
        return []
    strings = elf.section_data(elf.sections[dynsym.link])
    wanted = {name.encode() for name in names}
    if not any(name + b"\0" in strings for name in wanted):
        return []
    rows = elf.section_data(dynsym)
    indexes = {
        index
        for index, (offset, _) in enumerate(struct.iter_unpack("<I20s", rows[: len(rows) - len(rows) % 24]))
        if c_string(strings, offset) in wanted
    }
    return [r.vaddr for r in relocations(elf) if r.symbol in indexes and r.type in _BY_SYMBOL and not r.addend]
