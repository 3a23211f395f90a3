"""What is on disk about a process that we change: enough for anybody to restore it after we have died at any moment.

Responsible for the text of a journal, for whose it is (pid, start time, boot), and for the right to change a process,
which one at a time has. Files and locks are in ``patch.runfolder``; restoring is in ``patch.recover``.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from ptwprobe.errors import InputError, PermissionDeniedError, RefusalReason, RefusedError, TargetGoneError
from ptwprobe.model import Patch
from ptwprobe.patch import runfolder
from ptwprobe.patch.runfolder import Holder, Lock, RunFolder
from ptwprobe.process import Process

VERSION = 1
SUFFIX = ".json"
CLAIM_SECONDS = 0.2
"""How long a lock is tried for that somebody may have taken only to look."""
ENDING_SECONDS = 6.0
"""How long a killed recorder's tracing task may take to restore its targets; it gives up itself before."""
_MOST = 1 << 20
"""Sites or mappings of one process; a journal with more is damaged."""
_HIGHEST = 1 << 64

_T = TypeVar("_T")


class AreaKind(Enum):
    """What a mapping of ours is for."""

    RING = "ring"
    GATE = "gate"
    STUBS = "stubs"
    CODE = "code"
    """Pages of a file, with patches in them, in place of the file's own."""
    ASIDE = "aside"
    """The file's own pages meanwhile."""
    PLACE = "place"
    """Where pages of code may go while they are exchanged."""


@dataclass(frozen=True)
class Area:
    """A mapping of ours: ``length`` bytes at the runtime address ``start``."""

    kind: AreaKind
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class JournalSite:
    """A place in the code: ``new`` is there instead of ``old``, and leads to the stub at ``stub``."""

    addr: int
    old: bytes
    new: bytes
    stub: int
    path: str

    @classmethod
    def of(cls, patch: Patch) -> JournalSite:
        return cls(patch.site.runtime_addr, patch.old, patch.new, patch.stub.addr, patch.site.object.path)


@dataclass(frozen=True)
class Identity:
    """Which process: ``start_time`` in clock ticks since boot, so that with ``boot_id`` no other one has it ever."""

    pid: int
    start_time: int
    boot_id: str
    pid_namespace: int

    @classmethod
    def of(cls, process: Process) -> Identity:
        return cls(process.pid, process.start_time, read_boot_id(), own_pid_namespace())

    @property
    def key(self) -> str:
        return f"{self.pid}-{self.start_time}"

    @property
    def alive(self) -> bool:
        """Whether that very process is there. Only for one of our boot and PID namespace."""
        try:
            return Process(self.pid).start_time == self.start_time
        except TargetGoneError:
            return False


def identity_of_key(key: str) -> Identity | None:
    """What the name of a file says about its process."""
    pid, _, start_time = key.partition("-")
    if not (pid.isdecimal() and start_time.isdecimal()):
        return None
    return Identity(int(pid), int(start_time), read_boot_id(), own_pid_namespace())


@dataclass(frozen=True)
class Journal:
    """All that was told about one process: what was mapped, and what is patched or about to be."""

    identity: Identity
    comm: str
    recorder: int
    areas: tuple[Area, ...]
    sites: tuple[JournalSite, ...]

    def to_text(self) -> bytes:
        return json.dumps(
            {
                "version": VERSION,
                **asdict(self.identity),
                "comm": self.comm,
                "recorder": self.recorder,
                "areas": [{"kind": a.kind.value, "start": a.start, "length": a.length} for a in self.areas],
                "sites": [
                    {"addr": s.addr, "old": s.old.hex(), "new": s.new.hex(), "stub": s.stub, "path": s.path}
                    for s in self.sites
                ],
            },
            indent=1,
        ).encode()

    @classmethod
    def from_text(cls, text: bytes) -> Journal:
        """Raises ValueError for what no ptwprobe of this version wrote."""
        try:
            found = json.loads(text.decode())
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
        if found.get("version") != VERSION:
            raise ValueError(f"its version is {found.get('version')!r}, not {VERSION}")
        return cls(
            Identity(*(_get(found, name, kind) for name, kind in _IDENTITY)),
            _get(found, "comm", str),
            _get(found, "recorder", int),
            _list(found, "areas", _area),
            _list(found, "sites", _site),
        )


_IDENTITY: tuple[tuple[str, type], ...] = (
    ("pid", int),
    ("start_time", int),
    ("boot_id", str),
    ("pid_namespace", int),
)


def _get(item: dict[str, Any], name: str, kind: type[_T]) -> _T:
    value = item.get(name)
    # A bool is an int to Python.
    if type(value) is not kind or (isinstance(value, int) and not 0 <= value < _HIGHEST):
        raise ValueError(f"'{name}' is {value!r}")
    return value


def _list(item: dict[str, Any], name: str, make: Callable[[dict[str, Any]], _T]) -> tuple[_T, ...]:
    values = _get(item, name, list)
    if len(values) > _MOST or not all(isinstance(v, dict) for v in values):
        raise ValueError(f"'{name}' is not as it should be")
    return tuple(make(value) for value in values)


def _area(item: dict[str, Any]) -> Area:
    return Area(AreaKind(_get(item, "kind", str)), _get(item, "start", int), _get(item, "length", int))


def _site(item: dict[str, Any]) -> JournalSite:
    old, new = (bytes.fromhex(_get(item, name, str)) for name in ("old", "new"))
    if not old or len(old) != len(new):
        raise ValueError("'old' and 'new' of a site do not match")
    return JournalSite(_get(item, "addr", int), old, new, _get(item, "stub", int), _get(item, "path", str))


# ---------------------------------------------------------------- finding


def read_boot_id() -> str:
    """A name for the time since the machine was started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def own_pid_namespace() -> int:
    """The inode of the namespace that our pids are of."""
    return Path("/proc/self/ns/pid").stat().st_ino


@dataclass(frozen=True)
class Entry:
    """A journal as it stands on disk. ``problem`` says why there is no ``journal`` to be had from the file."""

    folder: RunFolder
    key: str
    journal: Journal | None
    problem: str = ""

    @property
    def path(self) -> Path:
        return self.folder.path / (self.key + SUFFIX)

    @property
    def foreign(self) -> bool:
        """Whether it is about a process that we cannot name: one of another PID namespace."""
        return self.journal is not None and self.journal.identity.pid_namespace != own_pid_namespace()

    @property
    def stale(self) -> bool:
        """Whether its process is gone."""
        if self.journal is not None:
            identity = self.journal.identity
            return not self.foreign and (identity.boot_id != read_boot_id() or not identity.alive)
        told = identity_of_key(self.key)
        return told is not None and not told.alive

    def remove(self) -> None:
        """Take it off the disk, unless somebody is at work on that process."""
        lock = self.folder.lock(self.key)
        if isinstance(lock, Lock):
            self.folder.remove(self.key + SUFFIX)
            lock.release()


def _read(folder: RunFolder, key: str) -> Entry:
    try:
        journal = Journal.from_text(folder.read(key + SUFFIX))
        if journal.identity.key != key:
            raise ValueError("it is about another process than its name says")
    except FileNotFoundError:
        raise
    except OSError as error:
        return Entry(folder, key, None, f"{folder.path / (key + SUFFIX)}: {error.strerror}")
    except InputError as error:
        return Entry(folder, key, None, error.message)
    except (ValueError, UnicodeError) as error:
        return Entry(folder, key, None, f"{folder.path / (key + SUFFIX)} is damaged: {error}")
    return Entry(folder, key, journal)


def entries() -> list[Entry]:
    """Every journal of this user."""
    found = []
    for folder in runfolder.existing():
        for key in folder.names(SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                found.append(_read(folder, key))
    return found


def find(process: Process) -> Entry | None:
    """The journal of a process."""
    identity = Identity.of(process)
    for folder in runfolder.existing():
        try:
            entry = _read(folder, identity.key)
        except FileNotFoundError:
            continue
        if entry.journal is None or entry.journal.identity == identity:
            return entry
    return None


def holder(process: Process) -> Holder | None:
    """Who is changing the process now, as far as this user's locks tell.

    A recorder that was killed is waited for: what becomes of the process shows when its tracing task has ended, too.
    """
    key = Identity.of(process).key
    deadline = time.monotonic() + ENDING_SECONDS
    while True:
        who = next((who for folder in runfolder.existing() if (who := folder.holder(key))), None)
        if who is None or not who.pid or _exists(who.pid) or time.monotonic() > deadline:
            return who
        time.sleep(0.01)


# ---------------------------------------------------------------- the right to change a process


class Claim:
    """One process is ours to change, and what we do to it is on disk before it is done."""

    def __init__(self, folder: RunFolder, identity: Identity, comm: str, lock: Lock) -> None:
        self.identity = identity
        self._folder = folder
        self._comm = comm
        self._lock = lock

    @classmethod
    def take(cls, process: Process) -> Claim:
        """Raises RefusedError (busy) where somebody else has it, PermissionDeniedError where no journal can be kept."""
        folder = runfolder.writable()
        identity = Identity.of(process)
        begun = time.monotonic()
        while True:
            try:
                lock = folder.lock(identity.key)
            except OSError as error:
                raise PermissionDeniedError(f"{folder.path}: {error.strerror}", "make the folder usable") from error
            if isinstance(lock, Lock):
                return cls(folder, identity, process.comm, lock)
            # A recorder that was killed is restoring its targets; who looks holds the lock for an instant.
            ending = lock.pid != os.getpid() and not _exists(lock.pid)
            if time.monotonic() - begun > (ENDING_SECONDS if ending else CLAIM_SECONDS):
                raise busy(process, lock.pid)
            time.sleep(0.01)

    def write(self, areas: Sequence[Area], sites: Sequence[JournalSite]) -> None:
        """Put on disk what will be in the process. Raises PermissionDeniedError; then it must not be put there."""
        journal = Journal(self.identity, self._comm, os.getpid(), tuple(areas), tuple(sites))
        try:
            self._folder.write(self.identity.key + SUFFIX, journal.to_text())
        except OSError as error:
            raise PermissionDeniedError(
                f"the journal of process {self.identity.pid} cannot be written: {self._folder.path}: {error.strerror}",
                "without it the process could not be restored after a crash; make room there",
            ) from error

    def clear(self) -> None:
        """Nothing of ours is in the process any more."""
        with contextlib.suppress(OSError):
            self._folder.remove(self.identity.key + SUFFIX)

    def end(self) -> None:
        """Let others change the process. May be called again."""
        self._lock.release()


def busy(process: Process, recorder: int) -> RefusedError:
    """Somebody else has the process."""
    who = f"ptwprobe (pid {recorder})" if recorder else "another ptwprobe"
    return RefusedError(
        RefusalReason.BUSY, f"process {process.pid} is in the hands of {who}", "wait for its end, or end it"
    )


def _exists(pid: int) -> bool:
    try:
        return pid > 0 and Process(pid).exists
    except TargetGoneError:
        return False
