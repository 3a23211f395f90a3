"""System calls inside a target, and what the native tracer's errors mean to a user.

Responsible for the numbers of x86-64 Linux (asm/unistd_64.h, linux/mman.h) and for nothing that lasts: what is mapped
and why is in ``patch.mapped``.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from ptwprobe._native import NativeError, Tracer
from ptwprobe.errors import (
    PermissionDeniedError,
    PtwprobeError,
    RefusalReason,
    RefusedError,
    TargetError,
    TargetGoneError,
    UnsupportedError,
)

PAGE = 4096

SYS_CLOSE = 3
SYS_MMAP = 9
SYS_MUNMAP = 11
SYS_MADVISE = 28
SYS_MEMFD_CREATE = 319

PROT_NONE, PROT_READ, PROT_WRITE, PROT_EXEC = 0, 1, 2, 4
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS = 0x01, 0x02, 0x10, 0x20
MAP_NORESERVE, MAP_FIXED_NOREPLACE = 0x4000, 0x100000
MREMAP_MAYMOVE, MREMAP_DONTUNMAP = 1, 4
MADV_DONTDUMP, MADV_WIPEONFORK = 16, 18
MFD_CLOEXEC, MFD_ALLOW_SEALING = 1, 2
F_ADD_SEALS = 1033
SEALS = 0x1 | 0x2 | 0x4 | 0x8
"""No more seals, no change of size, no writing (linux/fcntl.h)."""

Argument: TypeAlias = "int | tuple[int, int]"
"""A number, or (index of an earlier call, addend), or (-1, offset in the scratch bytes)."""
Call: TypeAlias = tuple[int, list[Argument]]


def scratch(offset: int = 0) -> Argument:
    """The address of a scratch byte in the target."""
    return (-1, offset)


def result(index: int, add: int = 0) -> Argument:
    """The result of call ``index`` of the batch, plus ``add``."""
    return (index, add)


BUSY_HINT = "try again, or when the process does something else"


def error_of(error: NativeError, pid: int) -> PtwprobeError:
    """The exception for a user that stands for a native one."""
    kind, message, _ = error.args
    if kind == "gone":
        return TargetGoneError(message)
    if kind == "not-permitted":
        return PermissionDeniedError(message, "run as root or as the owner of the process, and detach other tracers")
    if kind == "busy":
        return RefusedError(RefusalReason.BUSY, message, BUSY_HINT)
    if kind == "changed":
        return RefusedError(RefusalReason.BUSY, message, "another tool is changing the same code; try again")
    if kind == "seccomp":
        return RefusedError(RefusalReason.SECCOMP, message, "run as root, or use the uprobe channel")
    if kind == "foreign-probe":
        return RefusedError(RefusalReason.FOREIGN_PROBE, message, "remove the other tool's probe first")
    if kind == "thread-ids":
        return ThreadIdsError(message)
    if kind == "unsupported":
        return UnsupportedError(message)
    return TargetError(f"process {pid}: {message}")


@contextmanager
def native_errors(pid: int) -> Iterator[None]:
    """Raise the errors of ``ptwprobe.errors`` in place of native ones."""
    try:
        yield
    except NativeError as error:
        raise error_of(error, pid) from error


class UnmappedError(TargetError):
    """The target has nothing mapped where something is to be changed. Nothing was."""


class ThreadIdsError(TargetError):
    """A thread does not have its id where the stubs would read it. Nothing was changed."""


_LIMITS = {
    errno.EMFILE: "the process has as many files open as it may: raise its limit (prlimit --nofile)",
    errno.ENOMEM: "the process may not have more memory: raise its limit (prlimit --as), or take a smaller ring (-m)",
}
"""What a limit of the target's own means."""


_NOT_MADE = (errno.EBUSY, errno.ESRCH)
"""Results of ``Tracer.remote`` for a call that was not made; none of those that we make ends so."""


class RemoteCallError(TargetError):
    """A system call in the target failed. ``results``: those of the calls before it."""

    def __init__(self, pid: int, what: str, number: int, results: list[int]) -> None:
        name = errno.errorcode.get(number, number)
        super().__init__(f"process {pid}: {what} failed: {os.strerror(number)} ({name})", _LIMITS.get(number, ""))
        self.number = number
        self.results = results


class UnfinishedCallsError(RefusedError):
    """The thread that makes the calls ended, or came to no stand again: those after ``results`` were not made."""

    def __init__(self, pid: int, what: str, results: list[int]) -> None:
        message = f"process {pid} does not get to {what}: the thread that was to make the call did not stop"
        super().__init__(RefusalReason.BUSY, message, BUSY_HINT)
        self.results = results


def call_remotely(
    tracer: Tracer,
    pid: int,
    calls: Sequence[tuple[str, Call]],
    scratch_bytes: bytes | None = None,
    keep: Sequence[tuple[int, int, int]] = (),
) -> list[int]:
    """Execute named ``calls`` by one thread of the target.

    Raises RemoteCallError for the first that fails, UnfinishedCallsError where not all could be made.

    ``keep``: as of ``Tracer.remote``.
    """
    with native_errors(pid):
        results = tracer.remote(pid, [call for _, call in calls], scratch_bytes, keep)
    if results and -4096 < results[-1] < 0:
        name = calls[len(results) - 1][0]
        if -results[-1] in _NOT_MADE:
            raise UnfinishedCallsError(pid, name, results[:-1])
        raise RemoteCallError(pid, name, -results[-1], results[:-1])
    return results
