"""Where an object's symbols come from: its own tables, a separate debug file, or mini-debuginfo.

A separate debug file is looked for by build id, then by .gnu_debuglink (with its CRC), in the target's file system and
then in ours (GDB manual, "Debugging Information in Separate Files"). Mini-debuginfo is an xz-compressed ELF file
in .gnu_debugdata. A file that does not belong to the object is passed over.
"""

from __future__ import annotations

import contextlib
import lzma
import os
import struct
import zlib
from collections.abc import Iterator

from ptwprobe.errors import InputError, PtwprobeError
from ptwprobe.probe.elffile import ElfFile, Section, c_string, open_elf
from ptwprobe.probe.symbols import SymbolTable, Table

DEBUG_ROOT = "/usr/lib/debug"
_MAX_MINI_DEBUG = 256 << 20
_CHUNK = 1 << 20


def symbol_table(elf: ElfFile, path: str = "", root: str = "") -> SymbolTable:
    """The symbols of ``elf``, which the target knows as ``path``; ``root``: the target's root directory for us.

    Raises:
        InputError: the object's own tables are malformed.
    """
    tables = [*_tables(elf, "SHT_SYMTAB"), *_tables(elf, "SHT_DYNSYM")]
    if not any(section.type == "SHT_SYMTAB" for section in elf.sections):
        tables = [*_separate(elf, path, root), *tables, *_mini_debug(elf)]
    return SymbolTable(elf, tables)


def _separate(elf: ElfFile, path: str, root: str) -> list[Table]:
    for candidate, crc in _candidates(elf, path, root):
        # A debug file that cannot be read is as good as none: the object's own symbols are left.
        with contextlib.suppress(PtwprobeError):
            debug = open_elf(candidate)
            if (debug.device, debug.inode) == (elf.device, elf.inode):
                continue
            belongs = debug.build_id == elf.build_id if elf.build_id else _crc32(debug) == crc
            tables = _tables(debug, "SHT_SYMTAB") if belongs else []
            if tables:
                return tables
    return []


def _candidates(elf: ElfFile, path: str, root: str) -> Iterator[tuple[str, int | None]]:
    """Paths where a separate debug file may be, with the CRC it has to have (None: the build id tells)."""
    roots = [root, ""] if root else [""]
    if len(elf.build_id) > 2:
        for base in roots:
            yield f"{base}{DEBUG_ROOT}/.build-id/{elf.build_id[:2]}/{elf.build_id[2:]}.debug", None
    link = elf.section(".gnu_debuglink")
    if link is None or not path.startswith("/"):
        return
    data = elf.section_data(link)
    name = os.fsdecode(c_string(data, 0))
    if len(data) < 8 or not name or "/" in name:
        return
    (crc,) = struct.unpack("<I", data[-4:])
    folder = os.path.dirname(path)  # noqa: PTH120
    for base in roots:
        for place in (folder, f"{folder}/.debug", f"{DEBUG_ROOT}{folder}"):
            yield f"{base}{place}/{name}", crc


def _crc32(elf: ElfFile) -> int:
    crc = 0
    for offset in range(0, elf.size, _CHUNK):
        crc = zlib.crc32(elf.read_at(offset, min(_CHUNK, elf.size - offset)), crc)
    return crc


def _mini_debug(elf: ElfFile) -> list[Table]:
    section = elf.section(".gnu_debugdata")
    if section is None:
        return []
    try:
        unpacker = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MAX_MINI_DEBUG)
        data = unpacker.decompress(elf.section_data(section), _MAX_MINI_DEBUG)
    except lzma.LZMAError as error:
        raise elf.malformed(section.file_offset, f".gnu_debugdata: {error}") from None
    if not unpacker.eof:
        raise elf.malformed(section.file_offset, ".gnu_debugdata is cut off or too large")
    return _tables(ElfFile("", f"{elf.name} (.gnu_debugdata)", data), "SHT_SYMTAB")


def _tables(elf: ElfFile, section_type: str) -> list[Table]:
    return [_table(elf, section) for section in elf.sections if section.type == section_type]


def _table(elf: ElfFile, section: Section) -> Table:
    if section.link >= len(elf.sections):
        raise elf.malformed(section.file_offset, f"section {section.name} has no string table")
    rows = elf.section_data(section)
    strings = elf.section_data(elf.sections[section.link])
    versym = elf.section(".gnu.version") if section.type == "SHT_DYNSYM" else None
    if versym is None:
        return Table(rows, strings)
    names: tuple[tuple[int, str], ...] = ()
    # Without the names of versions, their numbers still tell the default one.
    with contextlib.suppress(InputError):
        names = _version_names(elf)
    return Table(rows, strings, elf.section_data(versym), names)


def _version_names(elf: ElfFile) -> tuple[tuple[int, str], ...]:
    """Number → name of the versions that the object defines (.gnu.version_d; LSB, "Symbol Versioning")."""
    section = elf.section(".gnu.version_d")
    if section is None or section.link >= len(elf.sections):
        return ()
    data, strings = elf.section_data(section), elf.section_data(elf.sections[section.link])
    out = []
    offset = 0
    for _ in range(len(data) // 20):
        if offset + 20 > len(data):
            break
        _version, _flags, number, _count, _hash, aux, following = struct.unpack_from("<HHHHIII", data, offset)
        if offset + aux + 4 <= len(data):
            (name,) = struct.unpack_from("<I", data, offset + aux)
            out.append((number, c_string(strings, name).decode("utf-8", "replace")))
        if not following:
            break
        offset += following
    return tuple(out)
