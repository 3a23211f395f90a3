"""The places in a process's code that stubs in it tell of, and what is there now; nothing is changed.

A stub is one only if it assembles to the very bytes that are there, so nothing is taken on trust. Which mappings have
stubs is found by ``patch.found``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ptwprobe.errors import PtwprobeError, TargetGoneError
from ptwprobe.model import ObjectFile, Patch, Site, Stub, Tactic, Window
from ptwprobe.patch.journal import Area, Entry
from ptwprobe.patch.plan import JUMP
from ptwprobe.process import Mapping, Process
from ptwprobe.stub.match import match_stub

_NOT_FILLING = re.compile(rb"[^\xcc]")
_MOST_STUB_BYTES = 16 << 20
"""Of one process; what lies behind is not looked at, and said to be unknown."""


class SiteState(Enum):
    PATCHED = "patched"
    ORIGINAL = "original"
    """The code is as it was, though there is still a stub for it."""
    CHANGED = "changed"
    """Neither our jump nor the original bytes."""
    NO_STUB = "no-stub"
    """Our jump as the journal tells it, but what it leads to is no stub of this version."""


@dataclass(frozen=True)
class FoundSite:
    """A place in the code for which there is a stub. ``patch`` undoes to what was there; None where that is not sure.

    ``memory``: the bytes that are there now.
    """

    addr: int
    stub_addr: int
    path: str
    state: SiteState
    memory: bytes
    patch: Patch | None = None


def read_stubs(process: Process, areas: Sequence[Area]) -> tuple[list[Stub], list[str]]:
    """All stubs in ``areas``, and what of the areas is neither stub nor filling."""
    stubs, unknown = [], []
    left = _MOST_STUB_BYTES
    for area in areas:
        if area.length > left:
            unknown.append(f"the {area.length:,} bytes of stubs at {area.start:#x} are more than can be looked through")
            continue
        left -= area.length
        # A recorder that died before it wrote the file of its stubs has left one without pages.
        code = process.read_some(area.start, area.length)
        at = 0
        while more := _NOT_FILLING.search(code, at):
            stub = match_stub(code[more.start() :], area.start + more.start())
            if stub is None:
                strange = area.start + more.start()
                unknown.append(f"the bytes at {strange:#x}, among our stubs, are no stub of this version of ptwprobe")
                break
            stubs.append(stub)
            at = stub.end - area.start
    return stubs, unknown


def sites_of(process: Process, maps: Sequence[Mapping], stubs: Sequence[Stub], entry: Entry | None) -> list[FoundSite]:
    by_addr: dict[int, FoundSite] = {}
    for stub in stubs:
        site = _site(process, maps, stub)
        known = by_addr.get(site.addr)
        # A site that was probed again has a stub of each time, and a jump to one of them at most.
        if known is None or site.state is SiteState.PATCHED or known.state is SiteState.CHANGED:
            by_addr[site.addr] = site
    if entry is not None and entry.journal is not None:
        for told in entry.journal.sites:
            if told.addr not in by_addr and _read(process, told.addr, len(told.new)) == told.new:
                by_addr[told.addr] = FoundSite(told.addr, told.stub, told.path, SiteState.NO_STUB, told.new)
    return sorted(by_addr.values(), key=lambda s: s.addr)


def _site(process: Process, maps: Sequence[Mapping], stub: Stub) -> FoundSite:
    """What is at the site that ``stub`` was made for."""
    patch = patch_of(stub, maps)
    addr, path = patch.site.runtime_addr, patch.site.object.path
    memory = _read(process, addr, JUMP)
    if memory == jump(addr, stub.addr):
        return FoundSite(addr, stub.addr, path, SiteState.PATCHED, memory, patch)
    now = memory[: len(patch.old)]
    if now == patch.old or not memory or now == _in_file(process, maps, addr, len(now)):
        # Unmapped, or mapped over: the object that was patched is not there any more.
        return FoundSite(addr, stub.addr, path, SiteState.ORIGINAL, memory, patch)
    return FoundSite(addr, stub.addr, path, SiteState.CHANGED, memory, patch)


def patch_of(stub: Stub, maps: Sequence[Mapping]) -> Patch:
    """The patch that leads to ``stub``, as far as the stub tells; enough to undo it."""
    request = stub.request
    addr = request.site_addr
    written = min(JUMP, len(request.displaced))
    mapping = next((m for m in maps if m.start <= addr < m.end), None)
    path, device, inode = (mapping.path, mapping.device, mapping.inode) if mapping else ("", 0, 0)
    offset = addr - mapping.start + mapping.offset if mapping else 0
    return Patch(
        site=Site(
            object=ObjectFile(path=path, open_path="", build_id="", device=device, inode=inode, bias=0),
            function="",
            symbol="",
            function_vaddr=0,
            function_size=0,
            vaddr=0,
            file_offset=offset,
            runtime_addr=addr,
            is_entry=False,
        ),
        event_id=request.event_id,
        window=Window(
            tactic=Tactic.WINDOW if written == JUMP else Tactic.PUN,
            site_addr=addr,
            displaced=request.displaced,
            written=written,
            target_min=stub.addr,
            target_max=stub.addr,
        ),
        stub=stub,
        old=request.displaced[:written],
        new=jump(addr, stub.addr)[:written],
    )


def jump(from_addr: int, to_addr: int) -> bytes:
    """The 5-byte jump; of addresses too far apart one that leads elsewhere, which is found nowhere."""
    return b"\xe9" + (to_addr - from_addr - JUMP & 0xFFFF_FFFF).to_bytes(4, "little")


def _read(process: Process, addr: int, size: int) -> bytes:
    """Empty where nothing is mapped."""
    try:
        return process.read(addr, size)
    except TargetGoneError:
        raise
    except PtwprobeError:
        return b""


def _in_file(process: Process, maps: Sequence[Mapping], addr: int, size: int) -> bytes | None:
    mapping = next((m for m in maps if m.start <= addr < m.end), None)
    if mapping is None or not mapping.is_file:
        return None
    try:
        with process.open_mapped(mapping) as file:
            file.seek(addr - mapping.start + mapping.offset)
            return file.read(size)
    except (PtwprobeError, OSError):
        return None
