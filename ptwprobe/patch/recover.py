"""Restoring a process that a ptwprobe has left with something of ours in it, whatever became of that ptwprobe.

Responsible for who may do it and when: never while a recorder is at work, and only to the very process that was looked
at. What there is to undo is found by ``patch.found``; undoing is ``patch.install``'s, as at the end of any recording.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ptwprobe import _native
from ptwprobe.errors import InputError, PtwprobeError, RefusalReason, RefusedError, TargetGoneError
from ptwprobe.patch import found, journal, runfolder
from ptwprobe.patch.found import Found, SiteState, State, forked_from, has_ours
from ptwprobe.patch.install import Target
from ptwprobe.patch.journal import Claim, Identity
from ptwprobe.patch.remote import native_errors
from ptwprobe.patch.runfolder import Lock
from ptwprobe.process import Process, process_of_thread

PATIENCE_SECONDS = 5.0
"""How long a target that does not come to a stand, or is traced by somebody else, is tried."""
RETRY_SECONDS = 0.02


@dataclass(frozen=True)
class Restored:
    """What was done to a process: ``sites`` back to their old bytes, ``areas`` unmapped.

    ``left``: a sentence for everything that had to stay. Empty: nothing of ours is there any more.
    """

    process: Process
    comm: str
    sites: int
    areas: int
    left: tuple[str, ...]
    journal_problem: str = ""


def restore(process: Process, claim: Claim | None = None) -> Restored:
    """Take everything of ours out of ``process``, by the right of ``claim``, or of one for the time that it takes.

    Raises RefusedError (busy) while somebody records it, or where it does not come to a stand; TargetGoneError,
    PermissionDeniedError, TargetError.
    """
    if claim is not None:
        return _restore(process, claim)
    own = Claim.take(process)
    try:
        return _restore(process, own)
    finally:
        own.end()


def _restore(process: Process, claim: Claim) -> Restored:
    comm = process.comm
    before = found.look(process, claimed=True)
    if before is None:
        claim.clear()
        return Restored(process, comm, 0, 0, ())
    if before.state is State.RECORDED:
        # The lock is ours, so that recorder has one elsewhere: another user's, or its folder was removed.
        raise journal.busy(process, before.recorder)
    notes = _take_out(process, claim)
    after = found.look(process, claimed=True)
    if after is None:
        claim.clear()
    return _compare(process, comm, before, after, notes)


def _take_out(process: Process, claim: Claim) -> list[str]:
    """Undo what can be undone; why something had to stay."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    tracer = _native.Tracer()
    try:
        while True:
            try:
                return _take_out_once(tracer, process, claim)
            except RefusedError as error:
                if error.reason is not RefusalReason.BUSY or time.monotonic() > deadline:
                    raise
            time.sleep(RETRY_SECONDS)
    finally:
        tracer.close()


def _take_out_once(tracer: _native.Tracer, process: Process, claim: Claim) -> list[str]:
    target = Target(tracer, process.pid)
    with _SameProcess(claim.identity) as same:
        target.attach()
        try:
            # A pid that was given to another process since is not the one that the journal and we mean.
            same.check()
            now = found.look(process, claimed=True)
            if now is None:
                return []
            understood = not now.unknown and all(s.state in (SiteState.PATCHED, SiteState.ORIGINAL) for s in now.sites)
            # Where something is not understood, a jump that we do not see may lead into the stubs.
            target.adopt(now.patched, now.areas if understood else ())
            target.leave()
            with native_errors(process.pid):
                tracer.close_files(process.pid)
            return list(target.notes)
        finally:
            with contextlib.suppress(PtwprobeError):
                target.release()
            target.forget()


class _SameProcess:
    """A check that a pid is still that of ``identity``, by a descriptor that stands for the process itself."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        try:
            self._fd = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            raise TargetGoneError(f"process {identity.pid} is gone") from None

    def check(self) -> None:
        """Raises TargetGoneError."""
        ended = bool(select.select([self._fd], [], [], 0)[0])
        if ended or not self._identity.alive:
            raise TargetGoneError(f"process {self._identity.pid} is gone")

    def __enter__(self) -> _SameProcess:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def _compare(process: Process, comm: str, before: Found, after: Found | None, notes: list[str]) -> Restored:
    if after is None:
        return Restored(process, comm, len(before.patched), len(before.areas), (), before.journal_problem)
    left = [*notes, *after.unknown]
    for site in after.sites:
        if site.state is not SiteState.ORIGINAL:
            left.append(f"{site.path} at {site.addr:#x}: {describe(site)}")
    if after.areas and not left:
        left.append("stubs and ring stay mapped")
    still = {site.addr for site in after.sites if site.state is not SiteState.ORIGINAL}
    done = sum(patch.site.runtime_addr not in still for patch in before.patched)
    return Restored(process, comm, done, len(before.areas) - len(after.areas), tuple(left), before.journal_problem)


def describe(site: found.FoundSite) -> str:
    """What is at a site, in words."""
    if site.state is SiteState.PATCHED:
        return "patched"
    if site.state is SiteState.ORIGINAL:
        return "as it was"
    if site.state is SiteState.NO_STUB:
        return f"jumps to {site.stub_addr:#x}, where no stub of this version is; left alone"
    was = site.patch.old.hex(" ") if site.patch else "?"
    ours = site.patch.new.hex(" ") if site.patch else "?"
    return f"has {site.memory.hex(' ')}, neither the original {was} nor our {ours}; left alone"


# ---------------------------------------------------------------- all processes


def sweep() -> None:
    """Remove journals and locks of processes that are gone, or have nothing of ours any more (exec, for one)."""
    for entry in journal.entries():
        with contextlib.suppress(OSError, PtwprobeError):
            if entry.stale or _is_done(entry):
                entry.remove()
    for folder in runfolder.existing():
        folder.remove_half_written()
        for key in folder.names(runfolder.LOCK_SUFFIX):
            with contextlib.suppress(OSError, InputError, ValueError):
                identity = journal.identity_of_key(key)
                if identity is not None and not identity.alive:
                    lock = folder.lock(key)
                    if isinstance(lock, Lock):
                        lock.release()


def _is_done(entry: journal.Entry) -> bool:
    """Whether the process lives and has nothing of ours."""
    if entry.journal is None or entry.foreign:
        return False
    return not has_ours(Process(entry.journal.identity.pid))


def status(pid: int | None = None) -> list[Found]:
    """Every process that has something of ours and that we may look into, by pid; or the process ``pid`` alone.

    Raises, for ``pid``, TargetGoneError and PermissionDeniedError.
    """
    sweep()
    if pid is not None:
        one = found.look(Process(process_of_thread(pid)))
        return [one] if one else []
    out = []
    for process in found.processes():
        with contextlib.suppress(PtwprobeError):
            if one := found.look(process):
                out.append(one)
    return sorted(out, key=lambda f: f.process.pid)


def detach(pid: int, with_children: bool = False) -> Iterator[Restored | PtwprobeError]:
    """Restore the process ``pid`` and, ``with_children``, those that inherited something of ours from it.

    Each gets its turn: an error of one is an outcome like others. Where ``pid`` has ended, its children are still
    known by the name of the ring that they share.
    """
    sweep()
    family = found.family(pid) if with_children else []
    try:
        yield restore(Process(process_of_thread(pid)))
    except TargetGoneError as error:
        if not family:
            yield error
    except PtwprobeError as error:
        yield error
    for process in family:
        try:
            yield restore(process)
        except TargetGoneError:
            continue  # it ended meanwhile
        except PtwprobeError as error:
            yield error


__all__ = ["Restored", "describe", "detach", "forked_from", "has_ours", "restore", "status", "sweep"]
