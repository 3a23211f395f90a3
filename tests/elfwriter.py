"""Small ELF files made of bytes: sections at chosen addresses, symbols, relocations. Enough to be read, not to run."""

from __future__ import annotations

import builtins
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

PAGE = 4096
EXEC, DYN = 2, 3
PROGBITS, SYMTAB, STRTAB, RELA, DYNAMIC = 1, 2, 3, 4, 6
WRITE, ALLOC, EXECINSTR = 1, 2, 4
R_X86_64_RELATIVE = 8
DT_RELA, DT_RELASZ, DT_RELR, DT_RELRSZ = 7, 8, 36, 35


@dataclass
class Section:
    """``vaddr`` 0: not loaded. ``flags`` are SHF_*, ``link`` names another section."""

    name: str
    data: bytes
    vaddr: int = 0
    type: int = PROGBITS
    flags: int = 0
    link: str = ""
    entry_size: int = 0
    info: int = 0


@dataclass
class Symbol:
    name: str
    vaddr: int
    size: int = 0
    type: int = 2  # STT_FUNC
    section: str = ".text"


@dataclass
class ElfWriter:
    """Collects sections and symbols; :meth:`bytes` is the file.

    Every loaded section becomes a PT_LOAD of its own. ``with_sections`` False leaves the section table out, as a
    stripped-down file has it.
    """

    type: int = DYN
    machine: int = 62
    entry: int = 0
    with_sections: bool = True
    sections: list[Section] = field(default_factory=list)
    symbols: list[Symbol] = field(default_factory=list)
    program_headers: list[tuple[int, int, int, int]] = field(default_factory=list)
    """More headers: (type, flags, vaddr, size) of what a loaded section holds."""

    def text(self, vaddr: int, code: bytes, name: str = ".text") -> ElfWriter:
        self.sections.append(Section(name, code, vaddr, PROGBITS, ALLOC | EXECINSTR))
        return self

    def data(self, vaddr: int, data: bytes, name: str = ".data", *, writable: bool = True) -> ElfWriter:
        self.sections.append(Section(name, data, vaddr, PROGBITS, ALLOC | (WRITE if writable else 0)))
        return self

    def function(self, name: str, vaddr: int, size: int = 0, section: str = ".text") -> ElfWriter:
        self.symbols.append(Symbol(name, vaddr, size, section=section))
        return self

    def relative(self, vaddr: int, relocations: Sequence[tuple[int, int]]) -> ElfWriter:
        """A loaded table of R_X86_64_RELATIVE: (place, value), and a dynamic table that names it."""
        table = b"".join(struct.pack("<QQq", place, R_X86_64_RELATIVE, value) for place, value in relocations)
        self.sections.append(Section(".rela.dyn", table, vaddr, RELA, ALLOC, ".dynstr", 24))
        return self.dynamic(vaddr + PAGE, [(DT_RELA, vaddr), (DT_RELASZ, len(table))])

    def dynamic(self, vaddr: int, entries: Sequence[tuple[int, int]]) -> ElfWriter:
        """A dynamic table of (tag, value), and an empty string table, in two pages."""
        table = b"".join(struct.pack("<QQ", *entry) for entry in [*entries, (0, 0)])
        self.sections.append(Section(".dynstr", b"\0", vaddr, STRTAB, ALLOC))
        self.sections.append(Section(".dynamic", table, vaddr + PAGE, DYNAMIC, ALLOC, ".dynstr", 16))
        self.program_headers.append((2, 6, vaddr + PAGE, len(table)))
        return self

    def bytes(self) -> bytes:
        sections = [*self.sections]
        if self.symbols:
            names, table = b"\0", bytes(24)
            for symbol in self.symbols:
                index = 1 + next(i for i, s in enumerate(sections) if s.name == symbol.section)
                table += struct.pack("<IBBHQQ", len(names), 0x10 | symbol.type, 0, index, symbol.vaddr, symbol.size)
                names += symbol.name.encode() + b"\0"
            sections.append(Section(".symtab", table, 0, SYMTAB, 0, ".strtab", 24, 1))
            sections.append(Section(".strtab", names, 0, STRTAB))
        names = b"\0" + b"".join(s.name.encode() + b"\0" for s in sections) + b".shstrtab\0"
        sections.append(Section(".shstrtab", names, 0, STRTAB))
        loaded = [s for s in sections if s.flags & ALLOC]
        headers = len(loaded) + len(self.program_headers)
        out = bytearray(64 + 56 * headers)
        offsets: list[int] = []
        for section in sections:
            # A file offset has to equal the address modulo the page size.
            at = len(out) + (section.vaddr - len(out)) % (PAGE if section.flags & ALLOC else 8)
            out += bytes(at - len(out)) + section.data
            offsets.append(at)
        self._program_headers(out, sections, offsets)
        table_at = len(out) + -len(out) % 8
        out += bytes(table_at - len(out))
        if self.with_sections:
            out += bytes(64) + b"".join(
                self._section_header(section, offset, sections)
                for section, offset in zip(sections, offsets, strict=True)
            )
        ident = b"\x7fELF\x02\x01\x01" + bytes(9)
        counts = (len(sections) + 1, len(sections)) if self.with_sections else (0, 0)
        out[:64] = ident + struct.pack(
            "<HHIQQQIHHHHHH",
            *(self.type, self.machine, 1, self.entry, 64, table_at if self.with_sections else 0, 0),
            *(64, 56, headers, 64, *counts),
        )
        return bytes(out)

    def write(self, path: Path) -> str:
        path.write_bytes(self.bytes())
        return str(path)

    def _program_headers(self, out: bytearray, sections: list[Section], offsets: list[int]) -> None:
        at = 64
        places = [(s, o) for s, o in zip(sections, offsets, strict=True) if s.flags & ALLOC]
        for section, offset in places:
            flags = 4 | (1 if section.flags & EXECINSTR else 0) | (2 if section.flags & WRITE else 0)
            size = len(section.data)
            struct.pack_into("<IIQQQQQQ", out, at, 1, flags, offset, section.vaddr, section.vaddr, size, size, PAGE)
            at += 56
        for kind, flags, vaddr, size in self.program_headers:
            section, offset = next((s, o) for s, o in places if s.vaddr <= vaddr <= s.vaddr + len(s.data))
            offset += vaddr - section.vaddr
            struct.pack_into("<IIQQQQQQ", out, at, kind, flags, offset, vaddr, vaddr, size, size, 8)
            at += 56

    @staticmethod
    def _section_header(section: Section, offset: int, sections: list[Section]) -> builtins.bytes:
        names = [s.name for s in sections]
        name = 1 + sum(len(n) + 1 for n in names[: names.index(section.name)])
        link = 1 + names.index(section.link) if section.link else 0
        return struct.pack(
            "<IIQQQQIIQQ",
            *(name, section.type, section.flags, section.vaddr, offset, len(section.data)),
            *(link, section.info, 1, section.entry_size),
        )
