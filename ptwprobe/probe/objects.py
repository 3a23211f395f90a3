"""The ELF files that a process has mapped, where they lie, and which of them an OBJ means.

The file that is opened is the one that is mapped, whatever stands at its path now; where its build id can be read in
memory, it has to be the file's.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TypeVar

from ptwprobe.errors import (
    InputError,
    NotYetError,
    PermissionDeniedError,
    RefusalReason,
    RefusedError,
    ResolveError,
    UnsupportedError,
)
from ptwprobe.model import ObjectFile
from ptwprobe.probe.debugfile import symbol_table
from ptwprobe.probe.dynamic import soname
from ptwprobe.probe.elffile import PAGE, ElfFile, Segment, open_elf
from ptwprobe.probe.symbols import GLOB, SymbolTable
from ptwprobe.process import Mapping, Process

_T = TypeVar("_T")
_NO_RANK = 9
_MAX_TABLES = 128
# What may follow the start of a name, best first.
_STARTS = (re.compile(r"\.so(\.|$)"), re.compile(r"-[\d.]+\.so$"), re.compile(r"[.]"), re.compile(r"-"))


@dataclass(frozen=True)
class Loaded:
    """An object of a process (or a file alone, with bias 0) together with its parsed file."""

    file: ObjectFile
    elf: ElfFile
    root: str = ""

    @property
    def name(self) -> str:
        return PurePosixPath(self.file.path).name

    @cached_property
    def symbols(self) -> SymbolTable:
        return _symbols(self.elf, self.file.path, self.root)


_tables: dict[tuple[object, ...], SymbolTable] = {}


def _symbols(elf: ElfFile, path: str, root: str) -> SymbolTable:
    """The symbols of a file; read once for a build id, however many processes have it mapped."""
    # The target's file system may have debug files that ours has not.
    file_system = Path(root or "/").stat()
    identity = (elf.build_id,) if elf.build_id else (elf.device, elf.inode)
    key = (*identity, elf.size, len(elf.sections), file_system.st_dev, file_system.st_ino)
    if key not in _tables:
        if len(_tables) >= _MAX_TABLES:
            _tables.clear()
        _tables[key] = symbol_table(elf, path, root)
    return _tables[key]


@dataclass(frozen=True)
class Mapped:
    """A file that a process has mapped, not opened yet. ``path`` as the target sees it."""

    process: Process
    path: str
    mappings: tuple[Mapping, ...]
    is_program: bool

    @property
    def name(self) -> str:
        return PurePosixPath(self.path).name

    def open(self) -> tuple[Loaded, ...]:
        """The object, once for every place where it is loaded (dlmopen loads a file again).

        Raises:
            InputError: it is no (proper) ELF file.
            RefusedError, PermissionDeniedError: the mapped file cannot be reached.
        """
        first = self.mappings[0]
        path = self.process.mapped_path(first)
        elf = open_elf(path, self.path)
        root = self.process.root_path("").rstrip("/")
        loaded = []
        for bias in biases(self.mappings, elf.loads, self.is_program):
            self._check_build_id(elf, bias)
            file = ObjectFile(self.path, path, elf.build_id, first.device, first.inode, bias)
            loaded.append(Loaded(file, elf, root))
        return tuple(loaded)

    def _check_build_id(self, elf: ElfFile, bias: int) -> None:
        vaddr = elf.build_id_vaddr
        if vaddr is None:
            return
        expected = bytes.fromhex(elf.build_id)
        try:
            found = self.process.read(vaddr + bias, len(expected))
        except PermissionDeniedError:
            return  # not mapped, or not ours to read; the inode is the right one
        if found != expected:
            raise RefusedError(
                RefusalReason.IDENTITY_CHANGED,
                f"process {self.process.pid}: {self.path} has build id {elf.build_id}, in memory it is {found.hex()}",
                "the file was overwritten in place: restart the target",
            )


def biases(mappings: Sequence[Mapping], loads: Sequence[Segment], is_program: bool = False) -> tuple[int, ...]:
    """What to add to a vaddr for each place where a file with the segments ``loads`` is loaded.

    A segment may be split over several mappings, and two segments may share a page of the file, so every pair of a
    mapping and a segment that fit proposes a bias; those stay by which most segments find themselves mapped.
    """
    proposed = _proposed([m for m in mappings if m.executable], [s for s in loads if s.executable])
    if not proposed and is_program:
        # Some programs move their code to huge pages of anonymous memory; the rest of the file is still mapped.
        proposed = _proposed(mappings, loads)
    found = {bias: sum(any(_backs(m, load, bias) for m in mappings) for load in loads) for bias in proposed}
    return tuple(sorted(bias for bias, count in found.items() if count == max(found.values())))


def _proposed(mappings: Sequence[Mapping], loads: Sequence[Segment]) -> set[int]:
    return {
        m.start - m.offset + load.file_offset - load.vaddr
        for m in mappings
        for load in loads
        if (load.vaddr - load.file_offset) % PAGE == 0
        and _page(load.file_offset) <= m.offset < load.file_offset + load.file_size
    }


def _backs(mapping: Mapping, load: Segment, bias: int) -> bool:
    """Whether ``mapping`` holds bytes of ``load`` where the bias puts them."""
    start = _page(load.vaddr) + bias
    return (
        mapping.start - mapping.offset == start - _page(load.file_offset)
        and mapping.start < start + load.file_size + PAGE
        and mapping.end > start
    )


def _page(value: int) -> int:
    return value & -PAGE


# ---------------------------------------------------------------- of a process


def mapped_files(process: Process) -> list[Mapped]:
    """The files of which ``process`` may run code, main program first, others in the order of their addresses."""
    maps = process.maps()
    entry = process.entry_point()
    groups: dict[tuple[int, int], list[Mapping]] = {}
    program = None
    for mapping in maps:
        if mapping.is_file:
            groups.setdefault((mapping.device, mapping.inode), []).append(mapping)
            if mapping.start <= entry < mapping.end:
                program = (mapping.device, mapping.inode)
    if program is None:
        exe = process.exe
        program = next((key for key, group in groups.items() if group[0].path == exe), None)
    out = [
        Mapped(process, group[0].path, tuple(group), key == program)
        for key, group in groups.items()
        if key == program or any(m.executable for m in group)
    ]
    return sorted(out, key=lambda mapped: not mapped.is_program)


def loaded_objects(process: Process) -> list[Loaded]:
    """All objects of ``process`` that can be opened, main program first."""
    out: list[Loaded] = []
    for mapped in mapped_files(process):
        try:
            out.extend(mapped.open())
        except (InputError, UnsupportedError, RefusedError):
            # Not an ELF file, or not reachable; a probe that names it is told why.
            if mapped.is_program:
                raise
    return out


def objects(process: Process) -> list[ObjectFile]:
    """The ELF files that ``process`` has loaded, main program first; the vdso, which is no file, is left out."""
    return [loaded.file for loaded in loaded_objects(process)]


def loaded_file(path: str) -> Loaded:
    """The file at ``path`` as an object that no process has loaded: runtime addresses are its vaddrs."""
    elf = open_elf(path)
    full = str(Path(path).resolve())
    return Loaded(ObjectFile(full, path, elf.build_id, elf.device, elf.inode, 0), elf)


# ---------------------------------------------------------------- by name


def find_objects(process: Process, obj: str | None) -> list[Loaded]:
    """The objects that ``obj`` means: None the main program, a path, a name, the start of one, a soname, or a glob.

    Raises:
        NotYetError: nothing loaded is called that.
        ResolveError: several files are, and ``obj`` is no glob.
    """
    files = mapped_files(process)
    if obj is None:
        chosen = [m for m in files if m.is_program]
        if not chosen:
            raise NotYetError(f"process {process.pid} has no program mapped", "name an object: OBJ:FUNC")
    elif "/" in obj:
        chosen = [m for m in files if m.path == obj or _is_at(m, obj)] or _glob(files, obj, [m.path for m in files])
    else:
        chosen = best_named(obj, files, [m.name for m in files]) or _glob(files, obj, [m.name for m in files])
        if not chosen:
            chosen = _by_soname(files, obj)
    if not chosen:
        names = sorted({m.name for m in files})
        near = difflib.get_close_matches(obj or "", names, 5, 0.4) or names[:8]
        raise NotYetError(
            f"process {process.pid} has no object {obj!r} mapped", f"mapped are, among others: {', '.join(near)}"
        )
    if len(chosen) > 1 and not GLOB.search(obj or ""):
        paths = ", ".join(m.path for m in chosen)
        raise ResolveError(f"{obj!r} may be any of {len(chosen)} objects", f"say which by its path: {paths}")
    out: list[Loaded] = []
    for mapped in chosen:
        try:
            out.extend(mapped.open())
        except (InputError, UnsupportedError):
            # A glob may take in files that are mapped for something else.
            if len(chosen) == 1:
                raise
    if not out:
        raise NotYetError(
            f"process {process.pid} maps {chosen[0].path}, but not as a program or library is loaded",
            "probe an object that runs there",
        )
    return out


def best_named(obj: str, items: Sequence[_T], names: Sequence[str]) -> list[_T]:
    """Those of ``items`` whose name fits ``obj`` best: the name itself, the name up to ".so", or a start of it that
    ends before a "." or "-" (so ``libc`` is libc.so.6, but not libcrypto.so.3)."""
    ranked = [(_rank(obj, name), item) for name, item in zip(names, items, strict=True)]
    best = min((rank for rank, _ in ranked), default=_NO_RANK)
    return [item for rank, item in ranked if rank == best < _NO_RANK]


def _rank(obj: str, name: str) -> int:
    if name == obj:
        return 0
    if not name.startswith(obj):
        return _NO_RANK
    rest = name[len(obj) :]
    return next((rank for rank, pattern in enumerate(_STARTS, 1) if pattern.match(rest)), _NO_RANK)


def _glob(files: list[Mapped], pattern: str, names: list[str]) -> list[Mapped]:
    if not GLOB.search(pattern):
        return []
    return [m for m, name in zip(files, names, strict=True) if fnmatch.fnmatchcase(name, pattern)]


def _is_at(mapped: Mapped, path: str) -> bool:
    """Whether ``path``, seen from the target (or, for a relative one, from us), leads to the mapped file."""
    for candidate in (path,) if not path.startswith("/") else (mapped.process.root_path(path), path):
        try:
            found = Path(candidate).stat()
        except (OSError, ValueError):
            continue
        if (found.st_dev, found.st_ino) == (mapped.mappings[0].device, mapped.mappings[0].inode):
            return True
    return False


def _by_soname(files: list[Mapped], obj: str) -> list[Mapped]:
    named: list[tuple[str, Mapped]] = []
    for mapped in files:
        try:
            for loaded in mapped.open()[:1]:
                named.append((soname(loaded.elf), mapped))
        except (InputError, UnsupportedError, RefusedError):
            continue
    named = [(name, mapped) for name, mapped in named if name]
    names, items = [name for name, _ in named], [mapped for _, mapped in named]
    return best_named(obj, items, names) or _glob(items, obj, names)
