"""Where a thread's id stands in its thread-local storage, so that a stub can read it with one load.

Responsible for finding the offset from ``fs`` in a live process. The id is the one of the thread's own PID namespace,
as its libc got it from the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ptwprobe import _native
from ptwprobe.errors import TargetGoneError
from ptwprobe.model import ThreadIdSource

KNOWN_OFFSETS = (0x2D0, 0x30)
"""``struct pthread.tid`` of glibc on x86-64 (2.11 to 2.41 at least), and of musl."""
SCANNED = range(0, 0x800, 4)


def find(pid: int, tid: int, fs_base: int) -> tuple[ThreadIdSource, int]:
    """(TLS_FIELD, offset) where thread ``tid``, whose storage is at ``fs_base``, has its id at ``fs:offset``, else
    (FS_BASE, 0).

    That all other threads have theirs there is for the change to see to, when they stand.
    """
    offset = _first_match(pid, [(tid, fs_base)], (*KNOWN_OFFSETS, *SCANNED))
    return (ThreadIdSource.FS_BASE, 0) if offset is None else (ThreadIdSource.TLS_FIELD, offset)


def find_known(tracer: _native.Tracer, pid: int) -> int | None:
    """The offset of a known libc that fits all threads now, or None."""
    return _first_match(pid, [(tid, fs_base) for tid, _, _, fs_base, _, _ in tracer.threads(pid)], KNOWN_OFFSETS)


def _first_match(pid: int, threads: Sequence[tuple[int, int]], offsets: Sequence[int]) -> int | None:
    areas = []
    try:
        with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
            for tid, fs_base in threads:
                own = _namespace_tid(pid, tid)
                if own is not None:
                    areas.append((own.to_bytes(4, "little"), _read(memory.fileno(), fs_base)))
    except (FileNotFoundError, ProcessLookupError) as error:
        raise TargetGoneError(f"process {pid} is gone") from error
    if not areas:
        return None
    return next((o for o in offsets if all(area[o : o + 4] == own for own, area in areas)), None)


def _read(memory: int, fs_base: int) -> bytes:
    """As many of the first bytes at ``fs_base`` as are mapped."""
    if not fs_base:
        return b""
    try:
        return os.pread(memory, SCANNED.stop, fs_base)
    except OSError:
        return b""


def _namespace_tid(pid: int, tid: int) -> int | None:
    """The thread's id as it sees itself; None when the thread is gone."""
    try:
        with Path(f"/proc/{pid}/task/{tid}/status").open(encoding="ascii", errors="replace") as status:
            line = next(line for line in status if line.startswith("NSpid:"))
    except (OSError, StopIteration):
        return None
    return int(line.split()[-1])
