"""What a trace holds besides hits. Times are ns of CLOCK_MONOTONIC; -1 or None is not known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

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


TraceEvent: TypeAlias = "Hit | Lost | Torn | Stray | TraceError"
