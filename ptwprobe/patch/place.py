"""Where stubs may lie in a target: free address space, and an allocator that shares its pages among stubs.

Only addresses are decided here; ``install`` maps what :meth:`Allocator.ranges` says.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

PAGE = 4096
ALIGN = 16
HIGHEST = 1 << 47
"""User addresses end here, whether or not the machine has five-level page tables."""
BRK_ROOM = 3 << 29
"""Bytes above the heap that brk may still grow into; a program at a fixed address needs the rest of 2 GiB for stubs."""
STACK_ROOM = 8 << 20
STACK_ROOM_UNLIMITED = 1 << 30
STACK_GAP = (1 << 20) + PAGE
"""The kernel keeps 256 pages free below a growing stack (stack_guard_gap); one more, so that nothing touches."""
GO_ARENAS = (0x00C0_0000_0000, 0x00E0_0000_0000)
"""Go's heap grows through these addresses (runtime/malloc.go, "hint addresses"); only if something is mapped there."""
ARENA = 1 << 20
"""Stubs without narrow constraints are packed into stretches of this many bytes."""
MAX_MAPPINGS = 4096
"""Mappings that one target gets at most for stubs."""
DEFAULT_MAP_COUNT = 65530
"""The kernel's default of vm.max_map_count."""

Range = tuple[int, int]
"""[start, end) of runtime addresses."""


class MappedRange(Protocol):
    """What is needed of a line of ``/proc/PID/maps``."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def path(self) -> str: ...


@dataclass(frozen=True)
class AddressSpace:
    """What of a target's addresses is taken, or will be.

    ``brk`` and ``stack``: with the room that they may grow into, (0, 0) if there is none; ``lowest``: the lowest
    address that may be mapped.
    """

    mappings: tuple[Range, ...]
    brk: Range
    stack: Range
    go_heap: bool
    lowest: int

    @classmethod
    def of(
        cls, mappings: Iterable[MappedRange], brk_start: int, stack_limit: int | None, lowest: int = 0x10000
    ) -> AddressSpace:
        """From the lines of ``maps``; ``brk_start``: where the heap begins (0: not known), ``stack_limit``: bytes that
        the main thread's stack may have (None: no limit).
        """
        mappings = list(mappings)
        heap = [m for m in mappings if m.path == "[heap]"]
        stack = [m for m in mappings if m.path == "[stack]"]
        brk_start = min([m.start for m in heap] + ([brk_start] if brk_start else []), default=0)
        brk_end = max([m.end for m in heap], default=brk_start)
        room = STACK_ROOM_UNLIMITED if stack_limit is None else max(STACK_ROOM, stack_limit)
        # And down to the next mapping, whatever the limit is now: it may be raised, and nothing needs this room.
        lowest_stack = min((m.start for m in stack), default=0)
        below = max((m.end for m in mappings if m.end <= lowest_stack), default=lowest_stack)
        stack_bottom = min([below, *(m.end - room - STACK_GAP for m in stack), lowest_stack - STACK_GAP])
        return cls(
            mappings=tuple((m.start, m.end) for m in mappings),
            brk=(brk_start, brk_end + BRK_ROOM if brk_end else 0),
            stack=(stack_bottom, stack[-1].end) if stack else (0, 0),
            go_heap=any(m.start < GO_ARENAS[1] and GO_ARENAS[0] < m.end for m in mappings),
            lowest=max(lowest, PAGE),
        )

    def free(self) -> list[Range]:
        """Free ranges of whole pages, by address; a page's distance is kept from every mapping."""
        taken = [(start - PAGE, end + PAGE) for start, end in self.mappings]
        taken += [self.brk, self.stack, (0, self.lowest)]
        if self.go_heap:
            taken.append(GO_ARENAS)
        out = []
        at = 0
        for start, end in sorted(taken):
            first = -(-at // PAGE) * PAGE
            last = min(start, HIGHEST - PAGE) // PAGE * PAGE
            if first < last:
                out.append((first, last))
            at = max(at, end)
        if at < HIGHEST - PAGE:
            out.append((-(-at // PAGE) * PAGE, HIGHEST - PAGE))
        return out


def read_brk_start(pid: int) -> int:
    """Where the heap of ``pid`` begins (``start_brk``, field 47 of proc_pid_stat(5)); 0 if it is not told."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return int(text.rpartition(")")[2].split()[44])
    except (OSError, IndexError, ValueError):
        return 0


def lowest_mappable() -> int:
    """``vm.mmap_min_addr``, but never the first 64 KiB: a null pointer plus a field has to fault."""
    try:
        return max(0x10000, int(Path("/proc/sys/vm/mmap_min_addr").read_text()))
    except (OSError, ValueError):
        return 0x10000


def mappings_left(used: int) -> int:
    """How many more mappings a process that has ``used`` of them may have at all (vm.max_map_count)."""
    try:
        limit = int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        limit = DEFAULT_MAP_COUNT
    return max(0, limit - used)


def stub_mappings(left: int) -> int:
    """How many of ``left`` mappings stubs may take: the program needs some, and so do the pages that are patched."""
    return min(MAX_MAPPINGS, left // 4)


class Allocator:
    """Hands out room for stubs and remembers which pages have to be mapped for it."""

    def __init__(self, space: AddressSpace, max_mappings: int = MAX_MAPPINGS) -> None:
        free = space.free()
        # Free bytes as two sorted lists, so that bisect can look into them.
        self._starts = [start for start, _ in free]
        self._ends = [end for _, end in free]
        self._pages: Counter[int] = Counter()
        self._arenas: list[Range] = []
        self._cursors: list[int] = []
        self._mappings = 0
        self._max_mappings = max_mappings

    def allocate(self, size: int, lowest: int, highest: int, near: int) -> int | None:
        """The address of ``size`` free bytes, ``lowest`` ≤ address ≤ ``highest``; None if there are none.

        Aligned to 16 bytes unless the range is too narrow for that. Where there is a choice: pages that are mapped
        already, then those next to ``near``.
        """
        if size <= 0 or lowest > highest:
            return None
        if highest - lowest >= ARENA:
            found = self._from_arenas(size, lowest, highest) or self._new_arena(size, lowest, highest, near)
        else:
            found = self._from_anywhere(size, lowest, highest)
        if found is None or not self._take(found, found + size):
            return None
        return found

    def shrink(self, addr: int, size: int, used: int) -> None:
        """Gives back what a stub at ``addr`` did not need of its ``size`` bytes."""
        self.release(addr, size)
        if used > 0:
            self._take(addr, addr + used)

    def release(self, addr: int, size: int) -> None:
        """Gives back the ``size`` bytes at ``addr``, which :meth:`allocate` returned."""
        start, end = addr, addr + size
        self._uncount_pages(start, end)
        i = bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == end:
            end = self._ends[i]
            del self._starts[i], self._ends[i]
        if i and self._ends[i - 1] == start:
            self._ends[i - 1] = end
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)

    def ranges(self) -> list[tuple[int, int]]:
        """(address, length in bytes) of what has to be mapped, by address; adjacent pages are one."""
        out: list[tuple[int, int]] = []
        for page in sorted(self._pages):
            if out and sum(out[-1]) == page * PAGE:
                out[-1] = (out[-1][0], out[-1][1] + PAGE)
            else:
                out.append((page * PAGE, PAGE))
        return out

    # ------------------------------------------------------------ choosing

    def _from_arenas(self, size: int, lowest: int, highest: int) -> int | None:
        for i, (start, end) in enumerate(self._arenas):
            if end <= lowest or start > highest:
                continue
            found = self._first_fit(size, max(lowest, self._cursors[i]), min(highest, end - size))
            if found is not None:
                self._cursors[i] = found + size
                return found
        return None

    def _new_arena(self, size: int, lowest: int, highest: int, near: int) -> int | None:
        best: tuple[int, int, int] | None = None  # distance, start, end
        first = max(bisect_right(self._starts, lowest) - 1, 0)
        for i in range(first, len(self._starts)):
            start, end = max(self._starts[i], lowest), min(self._ends[i], highest + size)
            if self._starts[i] > highest:
                break
            length = min(ARENA, end - start)
            if length < size + ALIGN:
                continue
            at = min(max(near, start), end - length)
            distance = max(at - near, near - (at + length), 0)
            if best is None or distance < best[0]:
                best = (distance, at, at + length)
        if best is None:
            return self._from_anywhere(size, lowest, highest)
        _, start, end = best
        found = self._first_fit(size, max(start, lowest), min(highest, end - size))
        if found is not None:
            self._arenas.append((start, end))
            self._cursors.append(found + size)
        return found

    def _from_anywhere(self, size: int, lowest: int, highest: int, tries: int = 64) -> int | None:
        """The fit that needs the fewest new pages, among the first ``tries`` free ranges."""
        best: tuple[int, int] | None = None
        first = max(bisect_right(self._starts, lowest) - 1, 0)
        for i in range(first, min(first + tries, len(self._starts))):
            start, end = max(self._starts[i], lowest), min(self._ends[i] - size, highest)
            if start > end:
                continue
            aligned = -(-start // ALIGN) * ALIGN
            at = aligned if aligned <= end else start
            new = sum(page not in self._pages for page in range(at // PAGE, (at + size - 1) // PAGE + 1))
            if best is None or new < best[0]:
                best = (new, at)
        return None if best is None else best[1]

    def _first_fit(self, size: int, lowest: int, highest: int) -> int | None:
        i = max(bisect_right(self._starts, lowest) - 1, 0)
        while i < len(self._starts) and self._starts[i] <= highest:
            at = -(-max(self._starts[i], lowest) // ALIGN) * ALIGN
            if at <= highest and at + size <= self._ends[i]:
                return at
            i += 1
        return None

    # ------------------------------------------------------------ keeping count

    def _take(self, start: int, end: int) -> bool:
        """Marks [start, end), which is free, as used; False if that would make too many mappings."""
        self._count_pages(start, end)
        if self._mappings > self._max_mappings:
            self._uncount_pages(start, end)
            return False
        i = bisect_right(self._starts, start) - 1
        free_start, free_end = self._starts[i], self._ends[i]
        left = [(free_start, start)] if free_start < start else []
        right = [(end, free_end)] if end < free_end else []
        self._starts[i : i + 1] = [s for s, _ in left + right]
        self._ends[i : i + 1] = [e for _, e in left + right]
        return True

    def _count_pages(self, start: int, end: int) -> None:
        for page in range(start // PAGE, (end - 1) // PAGE + 1):
            if page not in self._pages:
                self._mappings += 1 - (page - 1 in self._pages) - (page + 1 in self._pages)
            self._pages[page] += 1

    def _uncount_pages(self, start: int, end: int) -> None:
        for page in range(start // PAGE, (end - 1) // PAGE + 1):
            self._pages[page] -= 1
            if not self._pages[page]:
                del self._pages[page]
                self._mappings -= 1 - (page - 1 in self._pages) - (page + 1 in self._pages)
