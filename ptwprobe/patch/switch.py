"""What an exchange of code pages needs in the target: places for the pages that go, and memfds with our copies.

Responsible for all of it being there before the target stops for the change, and for what is left of it going
afterwards. Which pages are exchanged is decided in ``patch.change``; exchanging them is native (``_native.Tracer``).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Literal

from ptwprobe._native import OPEN_HERE
from ptwprobe.errors import TargetError
from ptwprobe.patch.mapped import Mapped
from ptwprobe.patch.remote import (
    F_ADD_SEALS,
    MAP_PRIVATE,
    MFD_ALLOW_SEALING,
    MFD_CLOEXEC,
    PROT_EXEC,
    PROT_NONE,
    PROT_READ,
    SEALS,
    SYS_CLOSE,
    SYS_MEMFD_CREATE,
    SYS_MMAP,
    SYS_MUNMAP,
    Argument,
    Call,
    RemoteCallError,
    UnfinishedCallsError,
    call_remotely,
    result,
    scratch,
)
from ptwprobe.process import Mapping, code_name

PLACE_NAME = "ptwprobe-place"
"""Of the memfd that is mapped where pages of code are about to go."""

_Place = tuple[int, int, int]
"""(index of the call that maps it, offset in what it maps, length)."""


@dataclass
class Exchange:
    """What becomes of [``start``, ``start`` + ``length``), pages of ``file``.

    replace: they go aside, and ``copy`` takes their place; renew: another copy takes the place of ours; restore: they
    come back; abandon: they go, since something else is mapped in their place. ``content``: what is there now (b"": it
    does not matter). ``ready``: where ``copy`` is mapped until then. ``scratch``: where our old copy goes, if it has to
    be kept until all is done. ``carried``: what somebody else has written into our copy, (address, bytes), and finds
    again in the new one, or in the pages that come back.
    """

    what: Literal["replace", "renew", "restore", "abandon"]
    start: int
    length: int
    file: Mapping | None = None
    file_offset: int = 0
    content: bytes = b""
    copy: bytes = b""
    aside: int = 0
    scratch: int | None = None
    ready: int = 0
    carried: tuple[tuple[int, bytes], ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def native(self) -> tuple[Literal["replace", "renew", "restore", "abandon"], int, int, bytes, int, int | None, int]:
        """As ``Tracer.apply`` takes it."""
        return self.what, self.start, self.length, self.content, self.aside, self.scratch, self.ready


class Prepared:
    """Context manager: inside it everything is there for ``exchanges``, and their fields say where.

    On the way out of an error nothing of it stays. Raises RemoteCallError where the target cannot have it,
    UnfinishedCallsError where it is too busy.
    """

    def __init__(self, mapped: Mapped, exchanges: Sequence[Exchange]) -> None:
        self._mapped = mapped
        self._exchanges = exchanges
        self._places: list[tuple[int, int]] = []
        self._remote_fds: list[int] = []

    def __enter__(self) -> Prepared:
        try:
            self._reserve()
            self._make_copies()
        except BaseException:
            self._clean_up(self._places)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        used = set() if kind else {e.aside for e in self._exchanges if e.what == "replace"}
        used |= set() if kind else {e.ready for e in self._exchanges}
        self._clean_up([place for place in self._places if place[0] not in used])

    def _reserve(self) -> None:
        """Places to go to. Those of one file lie to one another as its pages do, so that one name can tell of all."""
        groups: dict[Mapping, list[Exchange]] = {}
        for e in self._exchanges:
            if e.what == "replace" and e.file is not None:
                groups.setdefault(e.file, []).append(e)
        kept = [e for e in self._exchanges if e.scratch is not None]
        spans = [(min(e.start for e in group), max(e.end for e in group)) for group in groups.values()]
        sizes = [end - start for start, end in spans] + [e.length for e in kept]
        if not sizes:
            return
        # Of a file with a name, which tells whose it is should we die; nothing is ever read from it.
        calls: list[tuple[str, Call]] = [("memfd_create", (SYS_MEMFD_CREATE, [scratch(), MFD_CLOEXEC]))]
        calls += [
            ("mmap of a place for code", (SYS_MMAP, [0, size, PROT_NONE, MAP_PRIVATE, result(0), 0])) for size in sizes
        ]
        calls.append(("close", (SYS_CLOSE, [result(0)])))
        # The first call makes the memfd.
        keep = [
            (i, e.start - first, e.length)
            for i, ((first, _), group) in enumerate(zip(spans, groups.values(), strict=True), 1)
            for e in group
        ]
        keep += [(i, 0, e.length) for i, e in enumerate(kept, len(spans) + 1)]
        try:
            places = self._call(calls, PLACE_NAME.encode() + b"\0", keep)
        except (RemoteCallError, UnfinishedCallsError) as error:
            self._remote_fds = error.results[:1]
            self._places = list(zip(error.results[1:], sizes, strict=False))
            raise
        self._places = [(places[i] + offset, length) for i, offset, length in keep]
        gaps: list[tuple[int, int]] = []
        for place, (first, _), group in zip(places[1:], spans, groups.values(), strict=False):
            for before, after in pairwise(sorted(group, key=lambda e: e.start)):
                if before.end < after.start:
                    gaps.append((place + before.end - first, after.start - before.end))
        if gaps:
            try:
                self._call([("munmap of a gap", (SYS_MUNMAP, [addr, length])) for addr, length in gaps])
            except TargetError as error:
                # A gap that cannot go (too many mappings) does no harm.
                self._mapped.remember_left(error, gaps, 0)
        addrs = [addr for addr, _ in self._places]
        for e in (e for group in groups.values() for e in group):
            e.aside = addrs.pop(0)
        for e in kept:
            e.scratch = addrs.pop(0)

    def _make_copies(self) -> None:
        """One memfd for all pages of a file that are moved by the same distance, named so that it tells this.

        It is mapped, and then filled and sealed by us. The target keeps no descriptor of it.
        """
        groups: dict[bytes, list[Exchange]] = {}
        for e in self._exchanges:
            if e.copy and e.file is not None:
                groups.setdefault(os.fsencode(code_name(e.file, e.aside - e.start)) + b"\0", []).append(e)
        for name, group in groups.items():
            create: Call = (SYS_MEMFD_CREATE, [scratch(), MFD_CLOEXEC | MFD_ALLOW_SEALING])
            calls: list[tuple[str, Call]] = [("memfd_create", create), ("opening the memfd", (OPEN_HERE, [result(0)]))]
            for e in group:
                args: list[Argument] = [0, e.length, PROT_READ | PROT_EXEC, MAP_PRIVATE, result(0), e.file_offset]
                calls.append(("mmap of code", (SYS_MMAP, args)))
            calls.append(("close", (SYS_CLOSE, [result(0)])))
            keep = [(2 + i, 0, e.length) for i, e in enumerate(group)]
            try:
                done = self._call(calls, name, keep)
            except (RemoteCallError, UnfinishedCallsError) as error:
                self._remote_fds = error.results[:1]
                self._places += [(addr, e.length) for addr, e in zip(error.results[2:], group, strict=False)]
                if len(error.results) > 1:
                    os.close(error.results[1])
                raise
            fd, mapped = done[1], done[2:-1]
            self._places += [(addr, e.length) for addr, e in zip(mapped, group, strict=True)]
            try:
                for e, addr in zip(group, mapped, strict=True):
                    e.ready = addr
                    _write_all(fd, e.copy, e.file_offset)
                fcntl.fcntl(fd, F_ADD_SEALS, SEALS)
            except OSError as error:
                raise TargetError(f"copying code of process {self._mapped.pid}: {error.strerror}") from error
            finally:
                os.close(fd)

    def _clean_up(self, places: Sequence[tuple[int, int]]) -> None:
        calls: list[tuple[str, Call]] = [("close", (SYS_CLOSE, [fd])) for fd in self._remote_fds]
        calls += [("munmap", (SYS_MUNMAP, [addr, length])) for addr, length in places]
        if calls:
            try:
                self._call(calls)
            except TargetError as error:
                # It does not come to a stand now, say.
                self._mapped.remember_left(error, places, len(self._remote_fds))
        if self._places:
            with contextlib.suppress(TargetError):
                self._mapped.tell()

    def _call(
        self, calls: list[tuple[str, Call]], scratch_bytes: bytes | None = None, keep: Sequence[_Place] = ()
    ) -> list[int]:
        return call_remotely(self._mapped.tracer, self._mapped.pid, calls, scratch_bytes, keep)


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
