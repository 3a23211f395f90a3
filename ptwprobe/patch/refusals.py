"""What a refusal says: the place, the bytes, the reason, and what would work instead."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from ptwprobe.errors import RefusalReason, RefusedError
from ptwprobe.model import Site

SHOWN = 8
"""Bytes of code that a message shows."""


@dataclass(frozen=True)
class Obstacle:
    """Why one tactic does not fit."""

    reason: RefusalReason
    detail: str


MAY_NOT_CROSS = Obstacle(
    RefusalReason.CROSSES_PAGE,
    "the written bytes would lie in two pages of which one cannot be exchanged: its memory is not what the file has",
)


def place_of(site: Site, delta: int = 0) -> str:
    """The site, ``delta`` bytes further on, as a probe's WHERE."""
    name = PurePath(site.object.path).name
    function = site.symbol or site.function
    if not function:
        return f"{name}:{site.file_offset + delta:#x}"
    offset = site.vaddr - site.function_vaddr + delta
    return f"{name}:{function}+{offset:#x}" if offset else f"{name}:{function}"


_NO_UPROBE = {RefusalReason.NOT_EXECUTABLE, RefusalReason.NOT_AN_INSTRUCTION, RefusalReason.NOT_RELOCATABLE}
"""Where a breakpoint would not do either."""


def refused(
    site: Site, code: bytes, reason: RefusalReason, detail: str, hint: str = "", elsewhere: int | None = None
) -> RefusedError:
    """A refusal of ``site``. ``elsewhere``: offset from it, in bytes, of a place that can be probed."""
    shown = code[:SHOWN].hex(" ") or "no code"
    message = f"{place_of(site)} ({site.runtime_addr:#x}: {shown}): {detail}"
    return RefusedError(reason, message, hint or _alternatives(site, reason, elsewhere))


def _alternatives(site: Site, reason: RefusalReason, elsewhere: int | None) -> str:
    ways = []
    if elsewhere is not None:
        ways.append(f"{place_of(site, elsewhere)} can be probed")
    if reason not in _NO_UPROBE:
        ways.append("a classic uprobe (one trap per hit) works at this site")
    return "; or ".join(ways) or "name the start of an instruction in the file's code"
