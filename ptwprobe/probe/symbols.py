"""The functions that an ELF file's symbol tables name, and which of them a name or glob means.

A table holds functions and IFUNCs that are defined in the file; PLT entries and ``.cold`` parts are left out, since no
function starts there. Tables are unpacked as a whole (a row of pyelftools costs 100 times as much). Where the tables
come from is ``debugfile.py``.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ptwprobe import _native
from ptwprobe.probe.elffile import ElfFile, c_string

_ROW = struct.Struct("<IBBHQQ")
_STT_FUNC, _STT_FILE, _STT_GNU_IFUNC = 2, 4, 10
_FUNCTIONS = frozenset({_STT_FUNC, _STT_GNU_IFUNC})
_STB_LOCAL, _STB_WEAK = 0, 2
_SHN_UNDEF, _SHN_ABS = 0, 0xFFF1
_NOT_HERE = frozenset({_SHN_UNDEF, _SHN_ABS})
_VERSYM_HIDDEN = 0x8000
_MAX_COMPARED = 5_000
_MAX_FUNCTIONS = 4_000_000
_MAX_NAMES = 256 << 20
"""Bytes of all function names of one table: rows may share and overlap their strings without end."""
_COLD = re.compile(r"\.cold(\.\d+)?$")
_CLONE = re.compile(r"\.(part|isra|constprop)\.\d+")
# A static function keeps its signature under these names (LTO and ThinLTO make them unique).
_PRIVATISED = re.compile(r"(\.lto_priv\.\d+|\.llvm\.\d+|\.localalias)+$")
# The Itanium ABI's abbreviations: demanglers differ in whether they spell them out.
_STD_CLASS = re.compile(
    r"std::(?:basic_)?(string|istream|ostream|iostream)(?:<char,std::char_traits<char>(?:,std::allocator<char>)?>)?"
    r"(?:(::~?)basic_\1)?"
)
_RUST_METHOD = re.compile(r"^<([\w:]+)>::")
GLOB = re.compile(r"[*?\[]")


class Symbol(NamedTuple):
    """A function by one of its names: ``name`` raw, without version; ``size`` 0 where the table does not say it.

    ``source`` is the source file of a static function, "" if not known. ``hidden``: an old version of the name,
    bound only by programs that were linked against it.
    """

    name: str
    vaddr: int
    size: int
    ifunc: bool
    binding: int
    version: str
    hidden: bool
    source: str

    @property
    def local(self) -> bool:
        return self.binding == _STB_LOCAL


@dataclass(frozen=True)
class Table:
    """A symbol table as it stands in a file. ``versions``: per symbol its word of .gnu.version (dynsym only),
    ``version_names``: what they stand for."""

    rows: bytes
    strings: bytes
    versions: bytes = b""
    version_names: tuple[tuple[int, str], ...] = ()


class SymbolTable:
    """All functions of ``elf`` out of ``tables``; where two tables have the same symbol, the first one's counts."""

    def __init__(self, elf: ElfFile, tables: Sequence[Table]) -> None:
        self._elf = elf
        self._tables = tables

    # ------------------------------------------------------------ reading

    @cached_property
    def functions(self) -> tuple[Symbol, ...]:
        """Every name of every function, in address order."""
        out: dict[tuple[str, int], Symbol] = {}
        for table in self._tables:
            for symbol in self._read(table, None):
                out.setdefault((symbol.name, symbol.vaddr), symbol)
        return tuple(sorted(out.values(), key=lambda symbol: symbol.vaddr))

    def named(self, name: str) -> list[Symbol]:
        """The symbols called exactly ``name`` (raw), without decoding all others."""
        out: dict[int, Symbol] = {}
        for table in self._tables:
            offsets = _name_offsets(table.strings, name.encode())
            for symbol in self._read(table, offsets) if offsets else ():
                if symbol.name == name:
                    out.setdefault(symbol.vaddr, symbol)
        return [out[vaddr] for vaddr in sorted(out)]

    def _read(self, table: Table, offsets: set[int] | None) -> Iterator[Symbol]:
        """The functions of ``table``; with ``offsets`` only those whose name stands at one of them."""
        version_names = dict(table.version_names)
        rows = memoryview(table.rows)[: len(table.rows) - len(table.rows) % _ROW.size]
        source_offset = count = total = 0
        for index, (offset, info, _other, section, value, size) in enumerate(_ROW.iter_unpack(rows)):
            kind = info & 15
            if kind == _STT_FILE:
                source_offset = offset
            if kind not in _FUNCTIONS or section in _NOT_HERE or (offsets is not None and offset not in offsets):
                continue
            # "foo@@VER" is the default version of foo, "foo@VER" an old one.
            name, at, version = _text(c_string(table.strings, offset)).partition("@")
            if not name or (".cold" in name and _COLD.search(name)) or self._elf.is_plt(value):
                continue
            count, total = count + 1, total + len(name)
            if count > _MAX_FUNCTIONS or total > _MAX_NAMES:
                raise self._elf.malformed(
                    0, f"a symbol table of more than {count - 1} functions, {total} bytes of names"
                )
            hidden = bool(at) and not version.startswith("@")
            if 2 * index + 2 <= len(table.versions):
                (word,) = struct.unpack_from("<H", table.versions, 2 * index)
                hidden, version = bool(word & _VERSYM_HIDDEN), version_names.get(word & ~_VERSYM_HIDDEN, "")
            binding = info >> 4
            source = ""
            if binding == _STB_LOCAL:
                source = _text(c_string(table.strings, source_offset))
            yield Symbol(name, value, size, kind == _STT_GNU_IFUNC, binding, version.lstrip("@"), hidden, source)

    # ------------------------------------------------------------ by address

    @cached_property
    def _starts(self) -> list[int]:
        return [symbol.vaddr for symbol in self.functions]

    def at(self, vaddr: int) -> tuple[Symbol, ...]:
        """All symbols that start at ``vaddr``, best name first."""
        first, last = bisect_left(self._starts, vaddr), bisect_right(self._starts, vaddr)
        return tuple(sorted(self.functions[first:last], key=_by_quality))

    def containing(self, vaddr: int) -> Symbol | None:
        """The function whose bounds hold ``vaddr``, by its best name."""
        index = bisect_right(self._starts, vaddr)
        # A few steps back: a function may have other entries inside, whose sizes end before it does.
        for symbol in reversed(self.functions[max(index - 16, 0) : index]):
            if vaddr < symbol.vaddr + self.size(symbol):
                return self.at(symbol.vaddr)[0]
        return None

    def size(self, symbol: Symbol) -> int:
        """The symbol's size in bytes; where the table does not say it, up to the next function or the section's end."""
        end = self._elf.code_end(symbol.vaddr)
        if symbol.size:
            return max(min(symbol.size, end - symbol.vaddr), 0)
        index = bisect_right(self._starts, symbol.vaddr)
        if index < len(self._starts):
            end = min(end, self._starts[index])
        return max(end - symbol.vaddr, 0)

    # ------------------------------------------------------------ by name

    @cached_property
    def _demangled(self) -> dict[str, tuple[str, str]]:
        """Raw name → (demangled with parameters, without), for the names that are mangled."""
        names = list({symbol.name for symbol in self.functions if symbol.name.startswith(("_Z", "_R"))})
        results = _native.demangle_all(names) if names else []
        return {name: both for name, both in zip(names, results, strict=True) if both}

    def display(self, symbol: Symbol) -> str:
        """The demangled name, or the raw one where it is not mangled."""
        both = _native.demangle(symbol.name) if symbol.name.startswith(("_Z", "_R")) else None
        return both[0] if both else symbol.name

    def find(self, pattern: str) -> tuple[list[Symbol], bool]:
        """One symbol for each function that ``pattern`` means, in address order, and whether it was taken as a glob.

        In turn, until something is found: a raw name (``name@VERSION`` for an old one), the name of a static function
        that LTO renamed, a demangled name with or without its parameters, a glob over all of these.
        """
        name, at, version = pattern.partition("@")
        found = self.named(name)
        if at:
            found = [symbol for symbol in found if symbol.version == version.lstrip("@")]
        elif not all(symbol.hidden for symbol in found):
            found = [symbol for symbol in found if not symbol.hidden]
        if not found and any(pattern.encode() + b"." in table.strings for table in self._tables):
            found = [s for s in self.functions if s.name.startswith(pattern) and _PRIVATISED.sub("", s.name) == pattern]
        if not found:
            wanted = squeeze(pattern)
            same = {raw for raw, both in self._demangled.items() if wanted in (squeeze(both[0]), squeeze(both[1]))}
            found = [symbol for symbol in self.functions if symbol.name in same]
        is_glob = not found and bool(GLOB.search(pattern))
        if is_glob:
            matches = re.compile(fnmatch.translate(pattern)).match
            same = {raw for raw, both in self._demangled.items() if matches(both[0]) or matches(both[1])}
            found = [s for s in self.functions if not s.hidden and (s.name in same or matches(s.name))]
        best: dict[int, Symbol] = {}
        for symbol in sorted(found, key=_by_quality):
            if self._elf.is_code(symbol.vaddr):
                best.setdefault(symbol.vaddr, symbol)
        return [best[vaddr] for vaddr in sorted(best)], is_glob

    def near(self, pattern: str, count: int = 5) -> list[str]:
        """Names that look like ``pattern``, compilers' clones of it first."""
        clones = [s.name for s in self.functions if s.name.startswith(pattern) and _CLONE.match(s.name, len(pattern))]
        plain = {both[1] for both in self._demangled.values()}
        plain.update(symbol.name for symbol in self.functions if symbol.name not in self._demangled)
        # Comparing takes long; names of about the same length are the likely ones.
        likely = [name for name in plain if abs(len(name) - len(pattern)) <= 3][:_MAX_COMPARED]
        return [*clones[:count], *difflib.get_close_matches(pattern, likely, count)][:count]


def _text(raw: bytes) -> str:
    """A name out of a file, fit for any output: what is not UTF-8 or moves the cursor comes escaped."""
    text = raw.decode("utf-8", "backslashreplace")
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def squeeze(name: str) -> str:
    """A demangled name for comparison.

    White space does not matter, nor the long forms of std::string and the streams, nor the brackets that Rust's v0
    mangling has around the type of a method: ``<a::T>::f`` is ``a::T::f``.
    """
    name = _RUST_METHOD.sub(r"\1::", name).replace(" ", "")
    if "basic_" not in name:
        return name
    return _STD_CLASS.sub(lambda found: f"std::{found[1]}" + (f"{found[2]}{found[1]}" if found[2] else ""), name)


def _by_quality(symbol: Symbol) -> tuple[bool, bool, bool, int, str]:
    """Sorts the names of one function: public before private ones, the plain ones first."""
    return (symbol.local, symbol.binding == _STB_WEAK, symbol.name.startswith("__"), len(symbol.name), symbol.name)


def _name_offsets(strings: bytes, name: bytes) -> set[int]:
    """Where ``name`` stands in a string table, with or without a version, also as the tail of a longer string."""
    out: set[int] = set()
    for end in (b"\0", b"@"):
        at = strings.find(name + end)
        while at >= 0 and len(out) < 100_000:
            out.add(at)
            at = strings.find(name + end, at + 1)
    return out
