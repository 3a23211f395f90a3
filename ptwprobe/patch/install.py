"""One target process: what we map into it, the changes of its code, and leaving it as it was.

Responsible for the order map → write stubs → patch → open the gate, and back. Which bytes change is decided in
``patch.plan``; stopping threads and writing is native (``_native.Tracer``). Every call leaves the target running.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence

from ptwprobe import _native
from ptwprobe.errors import PermissionDeniedError, TargetError, TargetGoneError
from ptwprobe.model import Patch, RingLayout, ThreadIdSource
from ptwprobe.patch import threadid, timestamp
from ptwprobe.patch.change import Code
from ptwprobe.patch.journal import Area, AreaKind, Claim, JournalSite
from ptwprobe.patch.mapped import Mapped
from ptwprobe.patch.remote import native_errors
from ptwprobe.patch.switch import Exchange
from ptwprobe.process import Process

LEAVE_SECONDS = 1.0
"""How long ``leave`` tries to stop a busy target, and waits for threads to come out of the stubs."""


NO_THREAD_ID = (ThreadIdSource.FS_BASE, 0)


class Target:
    """A process with our mappings and patches in it.

    The target runs untraced unless ``attach`` or ``watch`` was called; a change attaches for its own duration. All
    methods raise TargetGoneError when the process is not there any more, PermissionDeniedError, RefusedError (nothing
    was changed), or another TargetError.
    """

    def __init__(self, tracer: _native.Tracer, pid: int, claim: Claim | None = None) -> None:
        """``claim``: the right to change the process, whose journal is kept; without it nothing is on disk."""
        self.tracer = tracer
        self.pid = pid
        self._claim = claim
        self.mapped = Mapped(tracer, pid)
        self.code = Code(tracer, pid, self.mapped, self._announce)
        self.notes: list[str] = []
        """What a user should know after ``leave``: mappings and patches that had to stay, probes that ended before."""
        self._load_gate_held = False
        self._thread_id = NO_THREAD_ID

    # ------------------------------------------------------------ tracing

    def attach(self) -> None:
        """Take all threads under trace; they run on. Events of the process are told by the tracer from now on."""
        with native_errors(self.pid):
            self.tracer.attach(self.pid)

    def release(self) -> None:
        """End tracing; what is mapped and patched stays. Loads through pointers are closed before."""
        self._close_load_gate()
        with native_errors(self.pid):
            self.tracer.detach(self.pid)

    def watch(self, loads: Iterable[tuple[int, int, int]]) -> None:
        """Catch faults of the stubs' loads (``Stub.loads``) and open the load gate."""
        with native_errors(self.pid):
            self.tracer.watch(self.pid, list(loads))
            if self.mapped.ring is not None:
                self.tracer.hold_gate(self.mapped.ring.load_gate_ptr)
                self._load_gate_held = True

    def _close_load_gate(self) -> None:
        if self._load_gate_held and self.mapped.ring is not None:
            self._load_gate_held = False
            with native_errors(self.pid):
                self.tracer.release_gate(self.mapped.ring.load_gate_ptr)

    # ------------------------------------------------------------ mapping

    def map_ring(self, rings: int, ring_bits: int) -> _native.RingMemory:
        """Give the target ``rings`` rings of ``1 << ring_bits`` bytes, and the gate page.

        Raises RefusedError (seccomp, tsc-disabled), before anything is mapped, for a target that may not read the time
        stamp counter.
        """
        self._write_journal()
        with native_errors(self.pid):
            tid, fs_base, may_read_tsc = self.tracer.ask(self.pid)
        timestamp.require(self.pid, may_read_tsc)
        self._thread_id = threadid.find(self.pid, tid, fs_base)
        ring = self.mapped.map_ring(rings, ring_bits)
        self._write_journal()
        return ring

    def ring_layout(self) -> RingLayout:
        """The ring as stubs address it. ``map_ring`` comes before."""
        return self.mapped.ring_layout(self._thread_id)

    def tell_threads_by_base(self) -> None:
        """Stubs that are assembled from now on do not read the thread's id but the base of its thread-local storage."""
        self._thread_id = NO_THREAD_ID

    def map_stub_space(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Map page-aligned (address, length) ranges for stubs."""
        self.mapped.map_stub_space(ranges)
        self._write_journal()

    def write_stub(self, addr: int, code: bytes) -> None:
        """Write ``code`` into mapped stub space and compare it with what the target has there."""
        self.mapped.write_stub(addr, code)

    @staticmethod
    def known_thread_id_offset(tracer: _native.Tracer, process: Process) -> int | None:
        """The offset of a libc we know, if every thread of ``process`` has its tid there now."""
        with native_errors(process.pid):
            return threadid.find_known(tracer, process.pid)

    # ------------------------------------------------------------ emitting

    def open_gate(self) -> None:
        """Let the stubs of this process (not those of its fork children) emit."""
        self.mapped.write_gate(1)

    def close_gate(self) -> None:
        """Stubs only execute the displaced instructions from now on."""
        self.mapped.write_gate(0)

    # ------------------------------------------------------------ patching

    def apply(self, patches: Sequence[Patch]) -> int:
        """As ``Code.apply``; first the journal says what will be there. Raises ThreadIdsError, too."""
        source, offset = self._thread_id
        return self.code.apply(patches, offset if source is ThreadIdSource.TLS_FIELD else None)

    def undo(self, patches: Sequence[Patch]) -> int:
        """As ``Code.undo``."""
        return self.code.undo(patches)

    def _announce(self, added: Sequence[Patch], exchanges: Sequence[Exchange]) -> None:
        """Put a change into the journal before it is made: wherever we die from here on, it can be undone."""
        try:
            self._write_journal(added, exchanges)
        except PermissionDeniedError:
            # To take probes out is right on a full disk, too: what the journal says already is enough for that.
            if added:
                raise

    def _write_journal(self, added: Sequence[Patch] = (), exchanges: Sequence[Exchange] = ()) -> None:
        """What is there, and what is about to be. A site or place of it that is not (yet, or any more) does no harm."""
        if self._claim is None:
            return
        areas = list(self.mapped.areas)
        for start, length, aside in [
            *((r.start, r.length, r.aside) for r in self.code.ranges),
            *((e.start, e.length, e.aside) for e in exchanges if e.what == "replace"),
        ]:
            areas += [Area(AreaKind.CODE, start, length), Area(AreaKind.PLACE, aside, length)]
        self._claim.write(areas, [JournalSite.of(patch) for patch in (*self.code.patches, *added)])

    def adopt(self, patches: Sequence[Patch], areas: Sequence[Area]) -> None:
        """Take over what another ptwprobe has left here; ``leave`` takes it out."""
        # First the code: should we be killed in between, the tracer must not take the stubs from under it.
        self.code.adopt(patches)
        self.mapped.adopt(areas)

    def stubs_are_empty(self) -> bool:
        """Whether no thread is in a stub, nor any stack or signal frame refers to one."""
        ranges = self.mapped.stub_ranges
        if not ranges:
            return True
        with native_errors(self.pid):
            return not self.tracer.threads_in_ranges(self.pid, ranges)

    # ------------------------------------------------------------ leaving

    def leave(self) -> bool:
        """Take everything out and end tracing. False where mappings (or patches) had to stay; ``notes`` says why."""
        self.notes.clear()
        try:
            self.close_gate()
            self._close_load_gate()
            # Tracing ends with the stop in which the last patch comes out; to unmap takes one thread.
            clean = self.code.undo_all(LEAVE_SECONDS, self.notes) and self._unmap_all()
            if clean:
                self.mapped.close_files()
            self.release()
        except TargetGoneError:
            self.forget()
            raise
        self.forget(clean)
        return clean

    def _unmap_all(self) -> bool:
        deadline = time.monotonic() + LEAVE_SECONDS
        while inside := self.mapped.unmap():
            if time.monotonic() > deadline:
                where = ", ".join(f"{addr:#x}" for addr, _ in self.mapped.mappings)
                who = ", ".join(str(tid) for tid in inside)
                self.notes.append(
                    f"process {self.pid}: stubs and ring stay mapped (at {where}), since a thread is still inside a"
                    f" stub or returns into one: {who}"
                )
                return False
            time.sleep(0.01)
        return True

    def forget(self, clean: bool = True) -> None:
        """The process, or its address space, is gone, or we are done with it: let go of what we hold on our side.

        ``clean``: nothing of ours is there any more, so the journal goes.
        """
        if clean and self._claim is not None:
            self._claim.clear()
        with contextlib.suppress(TargetError):
            self._close_load_gate()
        self.mapped.forget()
        self.code.forget()
