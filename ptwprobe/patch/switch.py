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
    PROT_NONE,
    SEALS,
    SYS_CLOSE,
    SYS_MEMFD_CREATE,
    SYS_MMAP,
    SYS_MUNMAP,
    Call,
    RemoteCallError,
    call_remotely,
    result,
    scratch,
)
from ptwprobe.process import Mapping, code_name

PLACE_NAME = "ptwprobe-place"
"""Of the memfd that is mapped where pages of code are about to go."""


@dataclass
class Exchange:
    """What becomes of [``start``, ``start`` + ``length``), pages of ``file``.

    replace: they go aside, and ``copy`` takes their place; renew: another copy takes the place of ours; restore: they
    come back; abandon: they go, since something else is mapped in their place. ``content``: what is there now (b"": it
    does not matter). ``scratch``: where our old copy goes, if it has to be kept until all is done. ``carried``: what
    somebody else has written into our copy, (address, bytes), and finds again in the pages that come back.
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
    fd: int = -1
    carried: tuple[tuple[int, bytes], ...] = ()

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def native(
        self,
    ) -> tuple[Literal["replace", "renew", "restore", "abandon"], int, int, bytes, int, int | None, int, int]:
        """As ``Tracer.apply`` takes it."""
        return (
            self.what, self.start, self.length, self.content, self.aside, self.scratch, self.fd, self.file_offset
        )  # fmt: skip


class Prepared:
    """Context manager: inside it everything is there for ``exchanges``, whose fields are filled.

    On the way out of an error nothing of it stays. Raises RemoteCallError where the target cannot have it.
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
        asides = set() if kind else {e.aside for e in self._exchanges if e.what == "replace"}
        self._clean_up([place for place in self._places if place[0] not in asides])

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
        for i, ((first, _), group) in enumerate(zip(spans, groups.values(), strict=True), 1):
            group.sort(key=lambda e: e.start)
            for before, after in pairwise(group):
                if before.end < after.start:
                    gap = result(i, before.end - first)
                    calls.append(("munmap of a gap", (SYS_MUNMAP, [gap, after.start - before.end])))
        calls.append(("close", (SYS_CLOSE, [result(0)])))
        try:
            places = self._call(calls, PLACE_NAME.encode() + b"\0")[1:]
        except RemoteCallError as error:
            self._remote_fds = error.results[:1]
            self._places = list(zip(error.results[1:], sizes, strict=False))
            raise
        for place, (first, _), group in zip(places, spans, groups.values(), strict=False):
            for e in group:
                e.aside = place + e.start - first
                self._places.append((e.aside, e.length))
        for place, e in zip(places[len(spans) :], kept, strict=False):
            e.scratch = place
            self._places.append((place, e.length))
        self._mapped.reserve(self._places)

    def _make_copies(self) -> None:
        """One memfd for all pages of a file that are moved by the same distance, named so that it tells this."""
        groups: dict[bytes, list[Exchange]] = {}
        for e in self._exchanges:
            if e.copy and e.file is not None:
                groups.setdefault(os.fsencode(code_name(e.file, e.aside - e.start)) + b"\0", []).append(e)
        if not groups:
            return
        at = 0
        calls: list[tuple[str, Call]] = []
        for name in groups:
            calls.append(("memfd_create", (SYS_MEMFD_CREATE, [scratch(at), MFD_CLOEXEC | MFD_ALLOW_SEALING])))
            calls.append(("opening the new memfd", (OPEN_HERE, [result(len(calls) - 1)])))
            at += len(name)
        try:
            results = self._call(calls, b"".join(groups))
        except RemoteCallError as error:
            self._remote_fds = error.results[::2]
            for fd in error.results[1::2]:
                os.close(fd)
            raise
        self._remote_fds, ours = results[::2], results[1::2]
        try:
            for remote_fd, fd, group in zip(self._remote_fds, ours, groups.values(), strict=True):
                for e in group:
                    e.fd = remote_fd
                    _write_all(fd, e.copy, e.file_offset)
                fcntl.fcntl(fd, F_ADD_SEALS, SEALS)
        except OSError as error:
            raise TargetError(f"copying code of process {self._mapped.pid}: {error.strerror}") from error
        finally:
            for fd in ours:
                os.close(fd)

    def _clean_up(self, places: Sequence[tuple[int, int]]) -> None:
        calls: list[tuple[str, Call]] = [("close", (SYS_CLOSE, [fd])) for fd in self._remote_fds]
        calls += [("munmap", (SYS_MUNMAP, [addr, length])) for addr, length in places]
        # A target that is gone, or cannot be stopped now, is told of by what comes next; then these stay.
        with contextlib.suppress(TargetError):
            if calls:
                self._call(calls)
        if self._places:
            with contextlib.suppress(TargetError):
                self._mapped.reserve(())

    def _call(self, calls: list[tuple[str, Call]], scratch_bytes: bytes | None = None) -> list[int]:
        return call_remotely(self._mapped.tracer, self._mapped.pid, calls, scratch_bytes)


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
