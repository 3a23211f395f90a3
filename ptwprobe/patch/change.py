"""The changes of one target's code: patches in, patches out, all of a change or none of it.

Responsible for what of the code is changed now. Which bytes change is decided in ``patch.plan``; stopping threads and
writing is native (``_native.Tracer``).
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ptwprobe import _native
from ptwprobe.errors import RefusalReason, RefusedError
from ptwprobe.model import Patch
from ptwprobe.patch.memory import os_error
from ptwprobe.patch.remote import UnmappedError, error_of, native_errors


class Code:
    """What is patched in a process. Methods raise as those of ``install.Target``."""

    def __init__(self, tracer: _native.Tracer, pid: int) -> None:
        self.patches: list[Patch] = []
        self._tracer = tracer
        self._pid = pid

    def apply(self, patches: Sequence[Patch], thread_id_offset: int | None = None) -> int:
        """Put all patches in, or none; returns the ns that the target stood still.

        ``thread_id_offset``: where, from its fs base, every thread must have its id, else ThreadIdsError. Raises
        UnmappedError where an object was unloaded, as ``undo`` does.
        """
        if not patches:
            return 0
        sites = [
            (p.site.runtime_addr, p.old, p.new, len(p.window.displaced), list(p.stub.displaced_map)) for p in patches
        ]
        with _changing(self._pid, patches):
            stood = self._tracer.apply(self._pid, sites, thread_id_offset=thread_id_offset)
        self.patches += patches
        return stood

    def undo(self, patches: Sequence[Patch], release: bool = False) -> int:
        """Take all patches out, or none; returns the ns that the target stood still. The stubs stay.

        ``release``: the target is not traced any more afterwards.
        """
        if not patches:
            return 0
        none: list[tuple[int, int]] = []
        sites = [(p.site.runtime_addr, p.new, p.old, len(p.window.displaced), none) for p in patches]
        with _changing(self._pid, patches):
            stood = self._tracer.apply(self._pid, sites, release=release)
        undone = {id(p) for p in patches}
        self.patches = [p for p in self.patches if id(p) not in undone]
        return stood

    def undo_all(self, seconds: float, notes: list[str]) -> bool:
        """Take everything out, and end tracing with it, trying a busy target for so long.

        False where patches had to stay: see ``notes``.
        """
        deadline = time.monotonic() + seconds
        while True:
            notes += self.drop_ended()
            self._drop_unloaded(notes)
            try:
                self.undo(self.patches, release=True)
                return True
            except (RefusedError, UnmappedError) as error:
                if isinstance(error, RefusedError) and error.reason is RefusalReason.FOREIGN_PROBE:
                    break
                if time.monotonic() > deadline:
                    raise
        # Somebody changed one of our sites: the others still come out.
        for patch in list(self.patches):
            try:
                self.undo([patch])
            except (RefusedError, UnmappedError) as error:
                notes.append(f"{_place(patch)} stays: {error.message}")
        return not self.patches

    def adopt(self, patches: Sequence[Patch]) -> None:
        """Take over patches that another ptwprobe has left, to undo them; they go even if we are killed meanwhile."""
        none: list[tuple[int, int]] = []
        sites = [(p.site.runtime_addr, p.new, p.old, len(p.window.displaced), none) for p in patches]
        with native_errors(self._pid):
            self._tracer.adopt(self._pid, sites)
        self.patches += patches

    def forget(self) -> None:
        """There is nothing to undo any more."""
        self.patches.clear()

    def drop_ended(self) -> list[str]:
        """Forget the patches that the tracer had to take out; a line about each."""
        with native_errors(self._pid):
            ended = self._tracer.take_ended(self._pid)
        gone = [p for p in self.patches if p.site.runtime_addr in ended]
        self.patches = [p for p in self.patches if p not in gone]
        return [
            f"process {self._pid}: {_place(p)} ended: an instruction that it displaced faulted, and the program may go"
            " on in the middle of the patch"
            for p in gone
        ]

    def _drop_unloaded(self, notes: list[str]) -> None:
        """A patch whose object was unloaded is undone already, also when it was loaded again to the same place."""
        for patch in list(self.patches):
            addr = patch.site.runtime_addr
            try:
                with Path(f"/proc/{self._pid}/mem").open("rb", buffering=0) as memory:
                    found = os.pread(memory.fileno(), len(patch.old), addr)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise os_error(self._pid, f"reading {addr:#x}", error) from error
                found = patch.old
            if found == patch.old:
                self.patches.remove(patch)
                notes.append(f"process {self._pid}: {_place(patch)} ended when its object was unloaded")


def _place(patch: Patch) -> str:
    return f"the probe in {patch.site.object.path} at {patch.site.runtime_addr:#x}"


@contextlib.contextmanager
def _changing(pid: int, patches: Sequence[Patch]) -> Iterator[None]:
    """As ``native_errors``; names the object that is not mapped any more."""
    try:
        yield
    except _native.NativeError as error:
        kind, _, addr = error.args
        gone = next((p for p in patches if kind == "unmapped" and p.site.runtime_addr == addr), None)
        if gone is None:
            raise error_of(error, pid) from error
        raise UnmappedError(
            f"process {pid} unloaded {gone.site.object.path} with the site at {addr:#x}",
            "probe it while it stays loaded",
        ) from error
