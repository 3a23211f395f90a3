"""What a refusal says: the place, the bytes, the reason, and what would work instead."""

from __future__ import annotations

from pathlib import PurePath

from ptwprobe.errors import RefusalReason, RefusedError
from ptwprobe.model import Site

SHOWN = 8
"""Bytes of code that a message shows."""


def place_of(site: Site, delta: int = 0) -> str:
    """The site, ``delta`` bytes further on, as a probe's WHERE."""
    name = PurePath(site.object.path).name
    function = site.symbol or site.function
    if not function:
        return f"{name}:{site.file_offset + delta:#x}"
    offset = site.vaddr - site.function_vaddr + delta
    return f"{name}:{function}+{offset:#x}" if offset else f"{name}:{function}"


def refused(
    site: Site, code: bytes, reason: RefusalReason, detail: str, hint: str = "", elsewhere: int | None = None
) -> RefusedError:
    """A refusal of ``site``. ``elsewhere``: offset from it, in bytes, of a place that can be probed."""
    shown = code[:SHOWN].hex(" ")
    message = f"{place_of(site)} ({site.runtime_addr:#x}: {shown}): {detail}"
    if not hint:
        classic = "a classic uprobe (one trap per hit) works at this site"
        hint = classic if elsewhere is None else f"{place_of(site, elsewhere)} can be probed; or {classic}"
    return RefusedError(reason, message, hint)
