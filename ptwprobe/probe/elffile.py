"""One ELF file: its segments, sections, build id, and translation between vaddr and file offset.

Headers and notes are read with pyelftools, tables as plain bytes. The file is hostile input: every size is checked
against the file before anything is read, counts are bounded, and whatever is wrong is an :class:`InputError` that
names the offset. Symbols are ``symbols.py``.
"""

from __future__ import annotations

import io
import os
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import IO, TypeVar, cast

from elftools.common.exceptions import ELFError
from elftools.common.utils import struct_parse
from elftools.construct import ConstructError
from elftools.elf.elffile import ELFFile
from elftools.elf.notes import iter_notes

from ptwprobe.errors import InputError, PermissionDeniedError, UnsupportedError

_MAX_SECTIONS = 16_384
_MAX_SEGMENTS = 1_024
_MAX_TABLE = 1 << 30
"""No symbol or string table is read beyond this many bytes."""
_MAX_NOTES = 1 << 16
_PF_X = 1
_SHF_ALLOC, _SHF_EXECINSTR = 2, 4
_SHF_COMPRESSED = 1 << 11
_EM_X86_64 = 62
PAGE = 4096

_T = TypeVar("_T")


@dataclass(frozen=True)
class Segment:
    """A program header. ``vaddr`` and ``file_offset`` of its first byte; sizes in bytes."""

    type: str
    flags: int
    file_offset: int
    vaddr: int
    file_size: int
    memory_size: int

    @property
    def executable(self) -> bool:
        return bool(self.flags & _PF_X)


@dataclass(frozen=True)
class Section:
    """A section header; ``link`` is the index of the section that goes with it (a table's strings, say)."""

    index: int
    name: str
    type: str
    flags: int
    vaddr: int
    file_offset: int
    size: int
    link: int

    @property
    def allocated(self) -> bool:
        return bool(self.flags & _SHF_ALLOC)

    @property
    def executable(self) -> bool:
        return bool(self.flags & _SHF_EXECINSTR)


class _CheckedFile(io.RawIOBase):
    """What pyelftools reads from: refuses reads that no honest file needs."""

    def __init__(self, elf: ElfFile) -> None:
        self._elf = elf
        self._position = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._elf.size}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        data = self._elf.read_at(self._position, size)
        self._position += len(data)
        return data


class ElfFile:
    """The 64-bit x86 ELF file at ``path``; it stays open, so a file that is deleted meanwhile stays readable.

    ``name`` stands for it in messages (``path`` may be a name in /proc).

    Raises:
        InputError: it is no ELF file, or a malformed one.
        UnsupportedError: it is for another kind of machine.
        PermissionDeniedError: it may not be read.
    """

    def __init__(self, path: str, name: str = "", data: bytes | None = None) -> None:
        self.path = path
        self.name = name or path
        self._file: io.RawIOBase
        if data is None:
            self._file, self.size, self.device, self.inode = _open_regular(path, self.name)
        else:
            self._file, self.size, self.device, self.inode = io.FileIO(os.memfd_create("elf"), "r+"), len(data), 0, 0
            self._file.write(data)
        self._check_ident()
        stream = cast(IO[bytes], _CheckedFile(self))
        self._elf = self._structure(lambda: ELFFile(stream))
        self._stream = stream
        self.segments = self._structure(self._read_segments)
        self.sections = self._structure(self._read_sections)

    def __repr__(self) -> str:
        return f"ElfFile({self.name!r})"

    # ------------------------------------------------------------ bytes

    def read_at(self, file_offset: int, size: int) -> bytes:
        """Exactly ``size`` bytes at ``file_offset``."""
        if size < 0 or file_offset < 0 or file_offset + size > self.size:
            raise self.malformed(file_offset, f"{size} bytes do not fit in the file of {self.size} bytes")
        if size > _MAX_TABLE:
            raise self.malformed(file_offset, f"a table of {size} bytes")
        data = os.pread(self._file.fileno(), size, file_offset)
        if len(data) != size:
            raise self.malformed(file_offset, "the file has become shorter")
        return data

    def section_data(self, section: Section) -> bytes:
        """The bytes of a section that has some."""
        if section.type == "SHT_NOBITS":
            return b""
        if section.flags & _SHF_COMPRESSED:
            raise self.malformed(section.file_offset, f"section {section.name} is compressed")
        return self.read_at(section.file_offset, section.size)

    def section(self, name: str) -> Section | None:
        return next((s for s in self.sections if s.name == name), None)

    def malformed(self, file_offset: int, what: str) -> InputError:
        return InputError(f"{self.name}: malformed ELF file at offset {file_offset:#x}: {what}", "rebuild the file")

    # ------------------------------------------------------------ addresses

    @cached_property
    def loads(self) -> tuple[Segment, ...]:
        return tuple(s for s in self.segments if s.type == "PT_LOAD")

    def file_offset(self, vaddr: int) -> int | None:
        """File offset of the byte at ``vaddr``; None where no segment has file contents for it."""
        for load in self.loads:
            if load.vaddr <= vaddr < load.vaddr + load.file_size:
                return vaddr - load.vaddr + load.file_offset
        return None

    def code_vaddr(self, file_offset: int) -> int | None:
        """vaddr of the byte at ``file_offset`` in an executable segment, None outside of them."""
        for load in self.loads:
            if load.executable and load.file_offset <= file_offset < load.file_offset + load.file_size:
                return file_offset - load.file_offset + load.vaddr
        return None

    def is_code(self, vaddr: int) -> bool:
        return any(s.executable and s.vaddr <= vaddr < s.vaddr + s.file_size for s in self.loads)

    @cached_property
    def _plt(self) -> tuple[tuple[int, int], ...]:
        return tuple((s.vaddr, s.vaddr + s.size) for s in self.sections if s.name.startswith((".plt", ".iplt")))

    def is_plt(self, vaddr: int) -> bool:
        """Whether ``vaddr`` is in a procedure linkage table: jumps that the linker made, no functions."""
        return any(start <= vaddr < end for start, end in self._plt)

    def code(self, vaddr: int, size: int) -> bytes:
        """Up to ``size`` bytes of the file's code at ``vaddr``."""
        for load in self.loads:
            if load.executable and load.vaddr <= vaddr < load.vaddr + load.file_size:
                size = min(size, load.vaddr + load.file_size - vaddr)
                return self.read_at(vaddr - load.vaddr + load.file_offset, size)
        return b""

    def code_end(self, vaddr: int) -> int:
        """Where the section (or, without sections, the segment) with the code at ``vaddr`` ends; ``vaddr`` if none."""
        ends = [s.vaddr + s.size for s in self.sections if s.executable and s.vaddr <= vaddr < s.vaddr + s.size]
        ends = ends or [s.vaddr + s.file_size for s in self.loads if s.vaddr <= vaddr < s.vaddr + s.file_size]
        return min(ends, default=vaddr)

    # ------------------------------------------------------------ identity

    @cached_property
    def build_id(self) -> str:
        """The GNU build id in hex, "" if there is none."""
        found = self._build_id_note
        return found[1].hex() if found else ""

    @property
    def build_id_vaddr(self) -> int | None:
        """vaddr of the build id's bytes, where they are loaded."""
        found = self._build_id_note
        if found is None:
            return None
        offset = found[0]
        for load in self.loads:
            if load.file_offset <= offset < load.file_offset + load.file_size:
                return offset - load.file_offset + load.vaddr
        return None

    @cached_property
    def _build_id_note(self) -> tuple[int, bytes] | None:
        """File offset and bytes of the build id."""
        # Sections first: the segments of a separate debug file point nowhere.
        places = [(s.file_offset, s.size) for s in self.sections if s.type == "SHT_NOTE"]
        places += [(s.file_offset, s.file_size) for s in self.segments if s.type == "PT_NOTE"]
        for offset, size in places:
            if size > _MAX_NOTES or offset + size > self.size:
                continue
            found = self._structure(lambda offset=offset, size=size: self._find_build_id(offset, size))  # type: ignore[misc]
            if found:
                return found
        return None

    def _find_build_id(self, offset: int, size: int) -> tuple[int, bytes] | None:
        for note in iter_notes(self._elf, offset, size):
            if note["n_type"] == "NT_GNU_BUILD_ID" and 0 < len(note["n_descdata"]) <= 64:
                # pyelftools gives where the note begins: 12 bytes of header, then the name "GNU\0".
                return note["n_offset"] + 16, bytes(note["n_descdata"])
        return None

    # ------------------------------------------------------------ headers

    def _check_ident(self) -> None:
        if self.size < 64 or self.read_at(0, 4) != b"\x7fELF":
            raise InputError(f"{self.name} is no ELF file", "name a program or a shared library")
        ident = self.read_at(0, 20)
        machine = struct.unpack_from("<H", ident, 18)[0]
        if ident[4] != 2:
            raise UnsupportedError(f"{self.name} is a 32-bit ELF file", "only 64-bit x86 programs can be probed")
        if ident[5] != 1 or machine != _EM_X86_64:
            raise UnsupportedError(f"{self.name} is not for x86-64 (ELF machine {machine})", "take a file for x86-64")

    def _read_segments(self) -> tuple[Segment, ...]:
        header = self._elf.header
        count = self._elf.num_segments()
        if count > _MAX_SEGMENTS:
            raise self.malformed(header["e_phoff"], f"{count} program headers")
        out = []
        for i in range(count):
            offset = header["e_phoff"] + i * header["e_phentsize"]
            entry = struct_parse(self._elf.structs.Elf_Phdr, self._stream, stream_pos=offset)
            out.append(
                Segment(
                    str(entry["p_type"]),
                    entry["p_flags"],
                    entry["p_offset"],
                    entry["p_vaddr"],
                    entry["p_filesz"],
                    entry["p_memsz"],
                )
            )
        return tuple(out)

    def _read_sections(self) -> tuple[Section, ...]:
        header = self._elf.header
        count = self._elf.num_sections()
        if count == 0:
            return ()
        if count > _MAX_SECTIONS:
            raise self.malformed(header["e_shoff"], f"{count} section headers")
        entries = [
            struct_parse(self._elf.structs.Elf_Shdr, self._stream, header["e_shoff"] + i * header["e_shentsize"])
            for i in range(count)
        ]
        strings = b""
        index = self._elf.get_shstrndx()
        if index < count and entries[index]["sh_type"] == "SHT_STRTAB":
            strings = self.read_at(entries[index]["sh_offset"], entries[index]["sh_size"])
        return tuple(
            Section(
                i,
                c_string(strings, entry["sh_name"]).decode("utf-8", "replace"),
                str(entry["sh_type"]),
                entry["sh_flags"],
                entry["sh_addr"],
                entry["sh_offset"],
                entry["sh_size"],
                entry["sh_link"],
            )
            for i, entry in enumerate(entries)
        )

    def _structure(self, read: Callable[[], _T]) -> _T:
        """Runs a piece of pyelftools, which meets malformed files with whatever exception comes along."""
        try:
            return read()
        except (ELFError, ConstructError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise self.malformed(self._position(), str(error) or type(error).__name__) from None
        except (AssertionError, RecursionError, MemoryError, struct.error) as error:
            raise self.malformed(self._position(), type(error).__name__) from None

    def _position(self) -> int:
        stream = getattr(self, "_stream", None)
        return stream.tell() if stream else 0


def c_string(table: bytes, offset: int) -> bytes:
    """The bytes from ``offset`` up to the next NUL (or the end); b"" outside the table. At most 64 KiB."""
    if not 0 <= offset < len(table):
        return b""
    end = table.find(b"\0", offset, offset + 65_536)
    return table[offset : end if end >= 0 else offset + 65_536]


def _open_regular(path: str, name: str) -> tuple[io.FileIO, int, int, int]:
    """``path`` open for reading, its size, device and inode. Never waits for a FIFO nor opens a device."""
    try:
        # O_NONBLOCK: what stands at the path may be a FIFO.
        file = io.FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
    except PermissionError:
        raise PermissionDeniedError(f"no permission to read {name}", "run as root, or as the file's owner") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(f"cannot open {name}: {reason}", "check the path") from None
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        file.close()
        raise InputError(f"{name} is no regular file", "name a program or a shared library")
    return file, found.st_size, found.st_dev, found.st_ino


@lru_cache(maxsize=128)
def _cached(device: int, inode: int, mtime_ns: int, size: int, path: str, name: str) -> ElfFile:
    return ElfFile(path, name)


def open_elf(path: str, name: str = "") -> ElfFile:
    """As ``ElfFile(path, name)``, but a file that was opened before and has not changed is parsed only once."""
    try:
        found = os.stat(path)  # noqa: PTH116
    except (OSError, ValueError):
        return ElfFile(path, name)
    return _cached(found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size, path, name)
