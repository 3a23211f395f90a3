"""Which code a process runs, mapping by mapping: from a file, or from a copy in the session's ``images/``.

A copy is taken of all that no file has: pages with our patches (or somebody else's), stubs, the vdso, deleted files,
code in memory without a file that is not written to any more. It is read while the process runs; nothing in it is
changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePath

from ptwprobe.errors import PtwprobeError
from ptwprobe.model import Patch
from ptwprobe.patch.mapped import STUB_NAME
from ptwprobe.patch.pages import CodePages
from ptwprobe.patch.remote import PAGE
from ptwprobe.probe import elf
from ptwprobe.probe.elffile import open_elf
from ptwprobe.process import Mapping, Process
from ptwprobe.record.elfimage import CODE_OFFSET, Symbol, elf_image
from ptwprobe.record.folder import SessionFolder

MAX_IMAGE_BYTES = 256 << 20
"""Of all copies of a session."""
_VDSO, _MEMFD = "[vdso]", "/memfd:"
_ID_DIGITS = 12
"""Of the build id in a file's name."""


@dataclass(frozen=True)
class Piece:
    """[``start``, ``end``) of a process runs the bytes from ``file_offset`` on of ``path``."""

    start: int
    end: int
    file_offset: int
    path: str
    device: int = 0
    inode: int = 0
    build_id: str = ""


class Images:
    """The copies of one session, and what was told of each process so far."""

    def __init__(self, folder: SessionFolder, note: Callable[[str], None]) -> None:
        """``note`` gets a line where a copy cannot be had."""
        self._folder = folder
        self._note = note
        self._told: dict[int, dict[int, Piece]] = {}
        self._written: set[str] = set()
        self._bytes = 0
        self._failed = False

    def changes(self, process: Process, patches: Sequence[Patch]) -> list[Piece]:
        """The pieces of code, by address, that are not as they were told the last time. ``patches``: those that are in.

        Raises TargetGoneError, PermissionDeniedError.
        """
        told = self._told.setdefault(process.pid, {})
        pieces = list(self._pieces(process, patches))
        changed = [piece for piece in pieces if told.get(piece.start) != piece]
        self._told[process.pid] = {piece.start: piece for piece in pieces}
        return changed

    def _pieces(self, process: Process, patches: Sequence[Patch]) -> Iterator[Piece]:
        build_ids = {(o.device, o.inode): o.build_id for o in elf.objects(process)}
        symbols = list(_symbols(patches))
        pages = CodePages(process)
        for m in process.maps():
            name = _name(m)
            if not m.executable:
                continue
            if name is not None:
                yield from self._copied(process, [(m.start, m.end)], name, symbols)
            elif m.is_file:
                own = list(_runs(pages.written_to(m.start, m.end)))
                copied = list(self._copied(process, own, f"{PurePath(m.path).name}-patched", symbols))
                build_id = build_ids.get((m.device, m.inode), "")
                at = m.start
                for piece in [*copied, Piece(m.end, m.end, 0, "")]:
                    if at < piece.start:
                        offset = m.offset + at - m.start
                        yield Piece(at, piece.start, offset, m.path, m.device, m.inode, build_id)
                    at = piece.end
                yield from copied

    def _copied(
        self, process: Process, ranges: Iterable[tuple[int, int]], name: str, symbols: Sequence[Symbol]
    ) -> Iterator[Piece]:
        for start, end in ranges:
            # The name of a file that is not there says at least that the code is not that of another one.
            path, build_id, offset = str(self._folder.images / name), "", 0
            size = end - start
            if size <= MAX_IMAGE_BYTES:
                code = process.read_some(start, size)
                if name == _VDSO:
                    path, build_id = self._write_vdso(code)
                else:
                    image, build_id = elf_image(start, code, symbols)
                    path = self._write(f"{name}-{build_id[:_ID_DIGITS]}", image)
                    offset = CODE_OFFSET
            else:
                self._note(f"process {process.pid} has {size:,} bytes of code at {start:#x} that no file has: not kept")
            yield Piece(start, end, offset, path, build_id=build_id)

    def _write_vdso(self, code: bytes) -> tuple[str, str]:
        """It is a whole ELF file."""
        path = self._write(f"vdso-{hashlib.sha1(code).hexdigest()[:_ID_DIGITS]}", code)
        try:
            return path, open_elf(path, _VDSO).build_id
        except PtwprobeError:
            return path, ""

    def _write(self, name: str, content: bytes) -> str:
        """The path of the file; where it cannot be written it has none, and the user is told."""
        path = str(self._folder.images / name)
        if name in self._written or self._failed:
            return path
        if self._bytes + len(content) > MAX_IMAGE_BYTES:
            self._fail(f"more than {MAX_IMAGE_BYTES:,} bytes of code that no file has")
            return path
        try:
            self._folder.write_image(name, content)
        except (PtwprobeError, OSError) as error:
            self._fail(str(error))
            return path
        self._written.add(name)
        self._bytes += len(content)
        return path

    def _fail(self, why: str) -> None:
        self._failed = True
        self._note(f"{why}: from here on code that no file has is not kept, and a decoder will not know it")


def _name(mapping: Mapping) -> str | None:
    """What to call a copy of the whole mapping; None where there is a file, or none can be taken."""
    base = PurePath(mapping.path).name or "anonymous"
    if mapping.aside is not None:
        return f"{base}-patched"
    if mapping.path == _VDSO:
        return _VDSO
    if mapping.path.startswith(_MEMFD):
        return "stubs" if mapping.path == _MEMFD + STUB_NAME else base.replace(":", "-")
    if mapping.is_file:
        return f"{base}-deleted" if mapping.deleted else None
    # Code that a runtime writes anew all the time would be another by the time it is decoded.
    return None if "w" in mapping.perms or mapping.path == "[vsyscall]" else base.strip("[]")


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """[start, end) of pages in a row."""
    for _, run in groupby(enumerate(pages), lambda item: item[1] - item[0] * PAGE):
        addrs = [page for _, page in run]
        yield addrs[0], addrs[-1] + PAGE


def _symbols(patches: Iterable[Patch]) -> Iterator[Symbol]:
    """The probed functions, and each stub by the name of its function."""
    for patch in patches:
        site = patch.site
        bias = site.runtime_addr - site.vaddr
        yield site.symbol or site.function, site.function_vaddr + bias, site.function_size
        yield f"ptwprobe:{site.function}", patch.stub.addr, len(patch.stub.code)
