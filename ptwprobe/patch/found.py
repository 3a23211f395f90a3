"""What a process has of ours, whoever put it there and however that ended; nothing is stopped or changed for it.

Responsible for reading it out of the process itself: mappings have telling names, stubs tell of their sites
(``patch.sites``). A journal adds what no name tells (the gate's page, pages that were put aside). So a fork child, or a
process whose journal was lost, is known as well.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ptwprobe import _native
from ptwprobe.errors import PtwprobeError, TargetGoneError
from ptwprobe.model import Patch, Stub
from ptwprobe.patch import journal
from ptwprobe.patch.journal import Area, AreaKind, Entry
from ptwprobe.patch.mapped import GATE_MARK, RECORDER_OFFSET, RING_NAME, STUB_NAME, ring_name
from ptwprobe.patch.pages import CodePages
from ptwprobe.patch.remote import PAGE
from ptwprobe.patch.sites import FoundSite, SiteState, read_stubs, sites_of
from ptwprobe.patch.switch import PLACE_NAME
from ptwprobe.process import Mapping, Process, file_of_code

MEMFD = "/memfd:"
OUR_NAMES = (MEMFD + "ptwprobe-", MEMFD + STUB_NAME)
"""How the names of all of ours begin."""
_RING_NAME = re.compile(re.escape(MEMFD + RING_NAME) + r":([0-9]+):([0-9]+)")
_FUTEX_OWNER_DIED = 0x4000_0000
_FUTEX_TID_MASK = 0x3FFF_FFFF


class State(Enum):
    """How it came that a process has something of ours; the value is the name in every output."""

    RECORDED = "recorded"
    """A recorder is at work on it."""
    LEFT_OVER = "left-over"
    """Its recorder is gone without having restored it."""
    INHERITED = "inherited"
    """Its parent was recorded when it was forked; it emits nothing."""
    KEPT = "kept"
    """The code is as it was; the stubs are still there, since a thread was in one."""


@dataclass(frozen=True)
class Found:
    """A process with something of ours in it.

    ``recorder``: pid of who records it (for an inherited one: its parent), 0 if nobody does or it is not known.
    ``origin``: (pid as it sees itself, start time) of the process for which the ring was made. ``files``: its
    descriptors that a call of ours did not close any more. ``unknown``: what is not understood, a sentence each.
    """

    process: Process
    comm: str
    state: State
    recorder: int
    origin: tuple[int, int] | None
    areas: tuple[Area, ...]
    sites: tuple[FoundSite, ...]
    files: tuple[int, ...]
    unknown: tuple[str, ...]
    entry: Entry | None

    @property
    def journal_problem(self) -> str:
        """Why its journal is not used, "" where it is or there is none."""
        return self.entry.problem if self.entry else ""

    @property
    def patched(self) -> list[Patch]:
        return [s.patch for s in self.sites if s.state is SiteState.PATCHED and s.patch is not None]


def look(process: Process, *, claimed: bool = False) -> Found | None:
    """What ``process`` has of ours, None if there is nothing. ``claimed``: the lock on the process is ours.

    Raises TargetGoneError, PermissionDeniedError.
    """
    maps = process.maps()
    files = open_files(process, maps)
    if not _any(process, maps) and not files:
        return None
    entry = journal.find(process)
    stubs, unknown = read_stubs(process, _named_areas(maps, STUB_NAME, AreaKind.STUBS))
    rings = _rings(process, maps, stubs)
    areas = _named_areas(maps, STUB_NAME, AreaKind.STUBS) + [area for area, _ in rings]
    sites = sites_of(process, maps, stubs, entry)
    areas += _gates(process, maps, areas, stubs, entry) + _code(process, maps, entry)
    unknown += [
        f"{m.start:#x}-{m.end:#x} is a copy of code, and where the code itself went is not known; left alone"
        for m in maps
        if file_of_code(m) and not _is_stray(m, maps)
    ]
    origin = next((origin for _, origin in rings), None)
    recorder, recorded = _recorder(process, areas, origin, claimed)
    if recorded:
        state = State.RECORDED
    elif origin is not None and not _is(process, origin):
        state = State.INHERITED
    elif all(s.state is SiteState.ORIGINAL for s in sites) and not unknown:
        state = State.KEPT
    else:
        state = State.LEFT_OVER
    return Found(
        process,
        process.comm,
        state,
        recorder,
        origin,
        tuple(areas),
        tuple(sites),
        tuple(files),
        tuple(unknown),
        entry,
    )


def has_ours(process: Process) -> bool:
    """Whether there is anything at all; quick."""
    maps = process.maps()
    return _any(process, maps) or bool(open_files(process, maps))


def processes() -> Iterator[Process]:
    """All processes that we may look into and that have something of ours."""
    told = {entry.journal.identity.pid for entry in journal.entries() if entry.journal is not None}
    for item in Path("/proc").iterdir():
        if item.name.isdecimal():
            with contextlib.suppress(PtwprobeError, OSError):
                maps = (item / "maps").read_bytes()
                if int(item.name) in told or any(name.encode() in maps for name in OUR_NAMES):
                    process = Process(int(item.name))
                    if has_ours(process):
                        yield process


def identity_in_ring(process: Process) -> tuple[int, int]:
    """What the name of a ring says that was made for ``process``: (pid as it sees itself, start time)."""
    return process.namespace_tid(process.pid), process.start_time


def forked_from(origin: tuple[int, int]) -> list[Process]:
    """The processes that inherited the ring of ``origin`` (see ``identity_in_ring``)."""
    return [p for p in processes() if origin in _origins(p) and not _is(p, origin)]


def family(pid: int) -> list[Process]:
    """The processes, other than ``pid``, that inherited something of ours from it; it may have ended."""
    try:
        process = Process(pid)
        own, rings = identity_in_ring(process), _origins(process)
    except TargetGoneError:
        return [p for p in processes() for origin in _origins(p) if origin[0] == pid and not _is(p, origin)]
    inherited = [p for p in processes() if rings & _origins(p) and p.pid != pid and _descends(p.pid, pid)]
    return forked_from(own) + [p for p in inherited if own not in _origins(p)]


def _descends(pid: int, ancestor: int) -> bool:
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            return False
        if pid == ancestor:
            return True
    return False


# ---------------------------------------------------------------- mappings


def _any(process: Process, maps: Sequence[Mapping]) -> bool:
    names = (MEMFD + STUB_NAME, MEMFD + PLACE_NAME, MEMFD + ring_name(identity_in_ring(process)))
    if any(m.path in names or file_of_code(m) is not None or m.is_aside for m in maps):
        return True
    return bool(_target_rings(maps))


def open_files(process: Process, maps: Sequence[Mapping]) -> list[int]:
    """Descriptors that calls of ours have left open; those of a process that records others are its own."""
    own = MEMFD + ring_name(identity_in_ring(process))
    if any(m.path.startswith(MEMFD + RING_NAME) and m.path != own for m in maps):
        return []
    found = []
    with contextlib.suppress(OSError):
        for item in Path(f"/proc/{process.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(item.readlink()).startswith(OUR_NAMES):
                    found.append(int(item.name))
    return sorted(found)


def _named_areas(maps: Sequence[Mapping], name: str, kind: AreaKind) -> list[Area]:
    """Mappings that follow one another in one file (a ring is mapped in parts) are one area."""
    found: list[Area] = []
    inode = 0
    for m in maps:
        if m.path != MEMFD + name:
            continue
        if found and found[-1].end == m.start and inode == m.inode:
            found[-1] = Area(kind, found[-1].start, m.end - found[-1].start)
        else:
            found.append(Area(kind, m.start, m.end - m.start))
        inode = m.inode
    return found


def _rings(process: Process, maps: Sequence[Mapping], stubs: Sequence[Stub]) -> list[tuple[Area, tuple[int, int]]]:
    """The rings that were made for this process, or that it has as a target (a fork child may have a ring before there
    are stubs), and what their names say.
    """
    own = identity_in_ring(process)
    used = {s.request.ring.control_addr for s in stubs if s.request.ring is not None}
    as_target = _target_rings(maps)
    found = []
    for path in _ring_paths(maps):
        match = _RING_NAME.fullmatch(path)
        origin = (int(match[1]), int(match[2])) if match else (0, 0)
        areas = _named_areas(maps, path.removeprefix(MEMFD), AreaKind.RING)
        found += [(area, origin) for area in areas if origin == own or area.start in used or path in as_target]
    return found


def _ring_paths(maps: Sequence[Mapping]) -> list[str]:
    return list(dict.fromkeys(m.path for m in maps if m.path.startswith(MEMFD + RING_NAME)))


def _target_rings(maps: Sequence[Mapping]) -> list[str]:
    """The rings that a process may write to. A recorder, which has the rings of its targets mapped too, only reads."""
    read_only = {m.path for m in maps if m.perms.startswith("r-")}
    return [path for path in _ring_paths(maps) if path not in read_only]


def _gates(
    process: Process, maps: Sequence[Mapping], areas: Sequence[Area], stubs: Sequence[Stub], entry: Entry | None
) -> list[Area]:
    """The gates' pages: they have no name, but each is behind its ring, and stubs and the journal tell of it.

    Only what is such a page now: it may have gone and the program have got other memory there. A ring whose place is
    only reserved tells it by itself.
    """
    told = {s.request.ring.gate_addr for s in stubs if s.request.ring is not None}
    ends = {m.end: m.offset + m.end - m.start for m in maps}
    behind = {area.end: ends[area.end] for area in areas if area.kind is AreaKind.RING}
    told |= {end for end, offset in behind.items() if offset < GATE_MARK}
    if entry is not None and entry.journal is not None:
        told |= {a.start for a in entry.journal.areas if a.kind is AreaKind.GATE}
    wiped = process.wiped_on_fork() if told else []
    found = {t for t in told if not t % PAGE and any(start <= t < end for start, end in wiped)}
    found |= {end for end, offset in behind.items() if offset == GATE_MARK}
    return [Area(AreaKind.GATE, gate, PAGE) for gate in sorted(found)]


def _code(process: Process, maps: Sequence[Mapping], entry: Entry | None) -> list[Area]:
    """Switched pages and where the file's are; what is left where pages were moved to when a change broke off."""
    found = []
    for r in CodePages(process).switched():
        found += [Area(AreaKind.CODE, r.start, r.length), Area(AreaKind.ASIDE, r.aside, r.length)]
    found += _named_areas(maps, PLACE_NAME, AreaKind.PLACE)
    found += [Area(AreaKind.PLACE, m.start, m.end - m.start) for m in maps if _is_stray(m, maps)]
    if entry is not None and entry.journal is not None:
        places = {(a.start, a.end) for a in entry.journal.areas if a.kind is AreaKind.PLACE}
        came = [m for m in maps if (m.start, m.end) in places and _is_second(m, maps)]
        found += [Area(AreaKind.PLACE, m.start, m.end - m.start) for m in came]
    return found


def _is_stray(mapping: Mapping, maps: Sequence[Mapping]) -> bool:
    """Whether it is a copy of ours that was moved away from where it stood for code: the file's code is there again
    (or another copy), and nothing of the file is next to it."""
    file = file_of_code(mapping)
    of_file = [m for m in maps if m.executable and m.is_file and (m.device, m.inode) == file]
    at_home = any(m.offset <= mapping.offset < m.offset + m.end - m.start for m in of_file)
    return at_home and not any(m.end == mapping.start or m.start == mapping.end for m in of_file)


def _is_second(mapping: Mapping, maps: Sequence[Mapping]) -> bool:
    """Whether its pages of a file are mapped as code at another place, too."""
    pages = (mapping.device, mapping.inode, mapping.offset)
    at = mapping.start - mapping.offset
    others = (m for m in maps if m.executable and m.is_file and m.start - m.offset != at)
    return mapping.is_file and any(
        pages[:2] == (m.device, m.inode) and m.offset <= pages[2] < m.offset + m.end - m.start for m in others
    )


def _origins(process: Process) -> set[tuple[int, int]]:
    """What the names of the rings say that a process has as a target."""
    matches = [_RING_NAME.fullmatch(path) for path in _target_rings(process.maps())]
    return {(int(match[1]), int(match[2])) for match in matches if match}


def _is(process: Process, origin: tuple[int, int]) -> bool:
    return origin == identity_in_ring(process)


# ---------------------------------------------------------------- who records


def _recorder(
    process: Process, areas: Sequence[Area], origin: tuple[int, int] | None, claimed: bool
) -> tuple[int, bool]:
    """(pid of the recorder, whether it records this very process): by our locks, else by the ring's own word.

    The latter is right for recorders of other users, too, and where the folder of the locks was removed.
    """
    if not claimed and (who := journal.holder(process)):
        return who.pid, True
    task = max((_recorder_word(process, area) for area in areas if area.kind is AreaKind.RING), default=0)
    if not task or origin is None:
        return 0, False
    return _recorder_of_task(task), _is(process, origin) or _shares_memory_with(process, origin)


def _recorder_word(process: Process, ring: Area) -> int:
    try:
        word = int.from_bytes(process.read(ring.start + RECORDER_OFFSET, 4), "little")
    except PtwprobeError:
        return 0
    return 0 if word & _FUTEX_OWNER_DIED else word & _FUTEX_TID_MASK


def _recorder_of_task(task: int) -> int:
    """The recorder whose tracing task has that pid; the task itself where that cannot be seen."""
    try:
        status = Path(f"/proc/{task}/status").read_text()
    except OSError:
        return task
    return int(status.partition("PPid:")[2].split()[0]) if "ptwprobe-owner" in status else task


def _shares_memory_with(process: Process, origin: tuple[int, int]) -> bool:
    """Whether it is another process in the memory of ``origin`` (CLONE_VM without CLONE_THREAD, vfork)."""
    for item in Path("/proc").iterdir():
        if item.name.isdecimal():
            with contextlib.suppress(PtwprobeError):
                if _is(Process(int(item.name)), origin):
                    return _native.share_memory(process.pid, int(item.name))
    return False


__all__ = ["Found", "FoundSite", "SiteState", "State", "family", "forked_from", "has_ours", "look", "processes"]
