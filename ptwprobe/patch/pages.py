"""Which pages of a target's code are switched for a copy of ours, and which have to be written in place.

A page can be switched where its memory is what its file has: then nobody else has changed it, and our copy of it is
right. Pages near one another are switched as one range, so that a target gets few mappings. Nothing is changed here.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ptwprobe.errors import PtwprobeError
from ptwprobe.model import CodeRange, Patch, Window
from ptwprobe.patch.memory import os_error
from ptwprobe.patch.remote import MAP_PRIVATE, MREMAP_DONTUNMAP, MREMAP_MAYMOVE, PAGE, PROT_READ
from ptwprobe.process import Mapping, Process

MERGE_GAP = 16 * PAGE
"""Ranges are merged where they are this near: a call for another range costs more than to copy so much."""
MOST_RANGES = 64
"""Of one change; more are merged over wider gaps, so that the target does not stand still for thousands of calls."""
_PRESENT, _SWAPPED, _OF_FILE = 1 << 63, 1 << 62, 1 << 61
"""Bits of /proc/PID/pagemap, Documentation/admin-guide/mm/pagemap.rst. What is of the file was never written to."""


@dataclass(frozen=True)
class Span:
    """Pages [``start``, ``end``) of one mapping that are to be switched."""

    mapping: Mapping
    start: int
    end: int

    @property
    def file_offset(self) -> int:
        return self.mapping.offset + self.start - self.mapping.start


class CodePages:
    """The code of a process as it is at this moment."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._code = [m for m in process.maps() if m.executable]
        self._starts = [m.start for m in self._code]

    def can_switch(self, page: int) -> bool:
        """Whether the page at ``page`` can be switched."""
        mapping = self.mapping_at(page)
        return mapping is not None and (not self.written_to(page, page + PAGE) or self._as_in_file(mapping, page))

    def mapping_at(self, addr: int) -> Mapping | None:
        """The mapping of code there, if pages of it can be switched at all."""
        found = self.code_at(addr)
        # A program that may write to its code needs to find there what it wrote.
        fits = found is not None and found.is_file and found.aside is None and found.perms == "r-xp"
        return found if fits and _kernel_can() and found not in self._locked else None

    @functools.cached_property
    def _locked(self) -> set[Mapping]:
        """Code that the program has locked in memory (mlock(2)): moving a part of it would unlock the rest."""
        if not self._process.has_locked_memory:
            return set()
        locked = self._process.locked_mappings()
        return {m for m in self._code if m.start in locked}

    def code_at(self, addr: int) -> Mapping | None:
        """The mapping of code there, switched or not, as the file's."""
        at = bisect_right(self._starts, addr) - 1
        return self._code[at] if at >= 0 and addr < self._code[at].end else None

    def switched(self) -> list[CodeRange]:
        """All that is switched in the process, whoever did it."""
        return [
            CodeRange(m.start, m.end - m.start, _aside(m, m.aside), m.device, m.inode, m.offset)
            for m in self._code
            if m.aside is not None
        ]

    def is_switched(self, span: CodeRange) -> bool | None:
        """Whether the pages of ``span`` are still those that were put there; None where only some are."""
        ours = 0
        for m in self._code:
            start, end = max(m.start, span.start), min(m.end, span.end)
            if start < end and m.aside is not None:
                ours += (end - start) * (_aside(m, m.aside) - m.start == span.aside - span.start)
        return True if ours == span.length else None if ours else False

    def spans(self, patches: Iterable[Patch], switched: Sequence[CodeRange] = ()) -> list[Span]:
        """The ranges to switch for ``patches``, by address. Patches in none of them have to be written in place.

        ``switched``: what is switched already; no span has pages of it.
        """
        taken = {page for r in switched for page in range(r.start, r.end, PAGE)}
        pages: dict[Mapping, set[int]] = {}
        for patch in patches:
            start, end = patch.site.runtime_addr, patch.site.runtime_addr + len(patch.new)
            needed = set(range(start & -PAGE, end, PAGE))
            mapping = self.mapping_at(start)
            if mapping is not None and end <= mapping.end and not needed & taken:
                pages.setdefault(mapping, set()).update(needed)
        gap = MERGE_GAP
        while True:
            found = [span for m, wanted in pages.items() for span in self._merge(m, wanted, taken, gap)]
            if len(found) <= MOST_RANGES or gap >= max(m.end - m.start for m in pages):
                return sorted(found, key=lambda span: span.start)
            gap *= 2

    def _merge(self, mapping: Mapping, pages: set[int], taken: set[int], gap: int) -> list[Span]:
        written = set(self.written_to(min(pages), max(pages) + PAGE))
        unfit = written - {page for page in written & pages if self._as_in_file(mapping, page)} | taken
        out: list[Span] = []
        for page in sorted(pages - unfit):
            before = out[-1] if out else None
            if before and page - before.end <= gap and not unfit.intersection(range(before.end, page, PAGE)):
                out[-1] = Span(mapping, before.start, page + PAGE)
            else:
                out.append(Span(mapping, page, page + PAGE))
        return out

    def written_to(self, start: int, end: int) -> list[int]:
        """The pages in [start, end) that are the process's own by now, not those of their file."""
        try:
            with Path(f"/proc/{self._process.pid}/pagemap").open("rb", buffering=0) as pagemap:
                words = memoryview(os.pread(pagemap.fileno(), (end - start) // PAGE * 8, start // PAGE * 8)).cast("Q")
        except OSError as error:
            raise os_error(self._process.pid, "reading its page table", error) from error
        own = (bool(word & (_PRESENT | _SWAPPED) and not word & _OF_FILE) for word in words)
        return [start + i * PAGE for i, is_own in enumerate(own) if is_own]

    def _as_in_file(self, mapping: Mapping, page: int) -> bool:
        """Whether a page that was written to has the file's bytes (again)."""
        try:
            with self._process.open_mapped(mapping) as file:
                file.seek(mapping.offset + page - mapping.start)
                return self._process.read(page, PAGE) == file.read(PAGE).ljust(PAGE, b"\0")
        except (PtwprobeError, OSError):
            return False


def _aside(mapping: Mapping, aside: Mapping) -> int:
    """Where the first page is that ``mapping`` takes the place of."""
    return aside.start + mapping.offset - aside.offset


def crosses_page(window: Window) -> bool:
    """Whether the bytes that are written lie in two pages."""
    return window.site_addr % PAGE + window.written > PAGE


@functools.cache
def _kernel_can() -> bool:
    """Whether this kernel moves a file's pages and leaves the mapping (Linux 5.13); tried on ourselves."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    failed = ctypes.c_void_p(-1).value
    with Path(sys.executable).open("rb") as file:
        first = libc.mmap(None, ctypes.c_size_t(PAGE), PROT_READ, MAP_PRIVATE, file.fileno(), ctypes.c_long(0))
    if first == failed:
        return False
    size, flags = ctypes.c_size_t(PAGE), MREMAP_MAYMOVE | MREMAP_DONTUNMAP
    second = libc.mremap(ctypes.c_void_p(first), size, size, flags, None)
    for addr in {first, second} - {failed}:
        libc.munmap(ctypes.c_void_p(addr), size)
    return bool(second != failed)
