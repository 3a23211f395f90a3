"""What a trace holds besides hits. Times are ns of CLOCK_MONOTONIC; -1 or None is not known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ptwprobe.model import Hit


@dataclass(frozen=True)
class Lost:
    """``count`` hits found no room in the ring of ``cpu`` before ``ns``."""

    ns: int | None
    cpu: int
    count: int


@dataclass(frozen=True)
class Torn:
    """``count`` hits in the ring of ``cpu`` were begun and never finished, because their threads died."""

    ns: int | None
    cpu: int
    count: int


@dataclass(frozen=True)
class Stray:
    """A word without a header: the program executed ``ptwrite`` itself. ``ip`` is its runtime address."""

    ns: int | None
    pid: int
    tid: int
    cpu: int
    comm: str
    ip: int | None
    value: int


@dataclass(frozen=True)
class TraceError:
    """Something is wrong in the trace; ``file_offset`` is in bytes of perf.data. Reading went on behind it."""

    ns: int | None
    tid: int
    file_offset: int | None
    message: str


BranchKind: TypeAlias = Literal[
    "cond",
    "jump",
    "indirect-jump",
    "call",
    "indirect-call",
    "return",
    "syscall",
    "far-return",
    "interrupt",
    "trace-start",
    "trace-end",
    "tx-abort",
    "far-other",
]
BRANCH_KINDS: tuple[BranchKind, ...] = get_args(BranchKind)


@dataclass(frozen=True)
class Branch:
    """A taken branch, direct jumps and calls included, from one runtime address to another.

    An address is None where the trace does not tell it: behind a ``syscall`` into a kernel that is not traced, say, or
    where tracing starts or ends. ``kind``: ``far-return`` is sysret, iret and their like; ``interrupt`` is asynchronous
    (faults and signals too), its ``from_addr`` the instruction that was to run next.
    """

    ns: int | None
    pid: int
    tid: int
    cpu: int
    from_addr: int | None
    to_addr: int | None
    kind: BranchKind


@dataclass(frozen=True)
class Loss:
    """Something that is not known. ``what`` is a stable word:

    ``lost``, ``torn``: hits (see :class:`Lost`, :class:`Torn`); ``overflow``: the CPU dropped packets; ``missing``:
    bytes of the trace are not there; ``bad-packet``: they are damaged; ``no-code``, ``mismatch``, ``endless``,
    ``unexpected``: the flow could not be followed up to the next sure point; ``incomplete``: a hit without all its
    words; ``file``: something else in the file. ``file_offset`` is in bytes of perf.data.
    """

    ns: int | None
    tid: int
    what: str
    file_offset: int | None
    message: str


TraceEvent: TypeAlias = "Hit | Lost | Torn | Stray | TraceError"
