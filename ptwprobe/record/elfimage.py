"""A piece of a process's code as an ELF file, so that perf, libipt and our decoder find it by a mapping's name.

perf tells 64-bit from 32-bit code, checks the build id and names functions by what such a file says of itself.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from ptwprobe.patch.remote import PAGE

Symbol = tuple[str, int, int]
"""Name, runtime address, size in bytes."""

CODE_OFFSET = PAGE
"""File offset of the code: mappings begin at whole pages."""

_ET_DYN, _EM_X86_64 = 3, 62
_PT_LOAD, _PT_NOTE = 1, 4
_PROGBITS, _SYMTAB, _STRTAB, _NOTE = 1, 2, 3, 7
_ALLOC, _EXECINSTR = 2, 4
_NT_GNU_BUILD_ID = 3
_HEADER_SIZE, _SEGMENT_SIZE, _SECTION_SIZE, _SYMBOL_SIZE = 64, 56, 64, 24
_GLOBAL_FUNCTION = 0x12
_SECTIONS = (".note.gnu.build-id", ".text", ".symtab", ".strtab", ".shstrtab")


def elf_image(start: int, code: bytes, symbols: Sequence[Symbol] = ()) -> tuple[bytes, str]:
    """An ELF file with ``code``, which runs at runtime address ``start`` (a whole page), and its build id (hex).

    The build id is a hash of all that tells one image from another.
    """
    named = sorted({s for s in symbols if start <= s[1] < start + len(code)}, key=lambda s: (s[1], s[0]))
    build_id = hashlib.sha1(repr((start, named)).encode() + code).digest()
    note = struct.pack("<III4s", 4, len(build_id), _NT_GNU_BUILD_ID, b"GNU\0") + build_id
    note_at = _HEADER_SIZE + 2 * _SEGMENT_SIZE
    names, table = b"\0", bytes(_SYMBOL_SIZE)
    for name, addr, size in named:
        text_section = 1 + _SECTIONS.index(".text")
        table += struct.pack("<IBBHQQ", len(names), _GLOBAL_FUNCTION, 0, text_section, addr, size)
        names += name.encode(errors="surrogateescape") + b"\0"
    titles = b"\0" + b"".join(title.encode() + b"\0" for title in _SECTIONS)
    table_at = -(-(CODE_OFFSET + len(code)) // 8) * 8
    names_at = table_at + len(table)
    titles_at = names_at + len(names)
    sections_at = -(-(titles_at + len(titles)) // 8) * 8
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = struct.pack(
        "<HHIQQQIHHHHHH",
        *(_ET_DYN, _EM_X86_64, 1, start, _HEADER_SIZE, sections_at, 0),
        *(_HEADER_SIZE, _SEGMENT_SIZE, 2, _SECTION_SIZE, 1 + len(_SECTIONS), len(_SECTIONS)),
    )
    # Read and execute.
    load = struct.pack("<IIQQQQQQ", _PT_LOAD, 5, CODE_OFFSET, start, start, len(code), len(code), PAGE)
    notes = struct.pack("<IIQQQQQQ", _PT_NOTE, 4, note_at, 0, 0, len(note), len(note), 4)
    # Type, flags, address, offset, size, link, info, alignment, size of an entry.
    sections = [
        (_NOTE, 0, 0, note_at, len(note), 0, 0, 4, 0),
        (_PROGBITS, _ALLOC | _EXECINSTR, start, CODE_OFFSET, len(code), 0, 0, 16, 0),
        (_SYMTAB, 0, 0, table_at, len(table), 1 + _SECTIONS.index(".strtab"), 1, 8, _SYMBOL_SIZE),
        (_STRTAB, 0, 0, names_at, len(names), 0, 0, 1, 0),
        (_STRTAB, 0, 0, titles_at, len(titles), 0, 0, 1, 0),
    ]
    rows = bytes(_SECTION_SIZE)
    for title, section in zip(_SECTIONS, sections, strict=True):
        rows += struct.pack("<IIQQQQIIQQ", titles.index(b"\0" + title.encode() + b"\0") + 1, *section)
    out = bytearray(ident + header + load + notes + note)
    for at, part in ((CODE_OFFSET, code), (table_at, table + names + titles), (sections_at, rows)):
        out += bytes(at - len(out)) + part
    return bytes(out), build_id.hex()
