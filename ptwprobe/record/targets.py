"""The processes of one session: taken under probe, watched while they run, let go again.

Responsible for every way in which a target leaves a session. When a session begins and ends is decided in
``record.session``.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from mmap import MAP_PRIVATE, PROT_EXEC, PROT_READ
from pathlib import Path
from typing import Any

from ptwprobe import _native
from ptwprobe.errors import PtwprobeError, TargetError, TargetGoneError, UnsupportedError
from ptwprobe.model import Patch
from ptwprobe.patch import recover
from ptwprobe.patch.journal import Claim
from ptwprobe.patch.remote import ThreadIdsError, native_errors
from ptwprobe.process import Process
from ptwprobe.record.folder import SessionFolder
from ptwprobe.record.images import Images
from ptwprobe.record.instrument import Instrumented, Plan
from ptwprobe.record.live import Live

REMOVE_SECONDS = 5.0
"""How long a target that cannot be stopped is tried before its patches are left in."""
RETRY_SECONDS = 0.02
COLLECT_SECONDS = 2.0
"""How long the exit status of a command that has ended is waited for."""
HOLE_PATIENCE_NS = 100_000_000
"""How long a record may stay unfinished before the threads are looked at."""


class Targets:
    """All targets of a session, with the tracer that stops them and the recorder that drains their rings."""

    def __init__(
        self, folder: SessionFolder, command_line: Sequence[str], ring_bits: int, note: Callable[[str], None]
    ) -> None:
        """Make the perf.data in ``folder`` and start to drain (nothing yet)."""
        self.tracer = _native.Tracer()
        # Words that are no UTF-8 come as surrogates, which only Python knows.
        printable = [word.encode(errors="replace").decode() for word in command_line]
        self.recorder = _native.Recorder(str(folder.perf_data), printable)
        self.live: list[Live] = []
        self.installed: dict[int, list[Patch]] = {}
        """Every patch that went in, by pid; they stay here when the target is gone."""
        self.described: list[dict[str, Any]] = []
        """Who the targets are, for session.json."""
        self.closed = False
        self._images = Images(folder, note)
        self._claims: list[Claim] = []
        self._ring_bits = ring_bits
        self._note = note

    # ------------------------------------------------------------ going in

    def open(self, process: Process) -> Live:
        """Give ``process`` a ring and make it known to the recorder."""
        claim = Claim.take(process)
        self._claims.append(claim)
        live = Live(Instrumented(self.tracer, process, claim))
        try:
            ring = live.instrumented.map_ring(rings_needed(), self._ring_bits)
        except BaseException:
            with contextlib.suppress(PtwprobeError):
                self._leave(live)
            live.close()
            raise
        self.recorder.add_target(process.pid, ring, process.comm)
        self.live.append(live)
        self.described.append(
            {"pid": process.pid, "comm": process.comm, "exe": process.exe, "cmdline": process.cmdline}
        )
        return live

    def put_in(self, live: Live, plan: Plan) -> None:
        """Build and install the patches of ``plan``; sites without room for a stub become refused ones."""
        built = live.instrumented.build(plan)
        for item, _patch in built:
            self.recorder.add_event(item.event.event_id, len(item.event.fields))
            item.event.sites[live.pid] = item.site.runtime_addr
        patches = [patch for _item, patch in built]
        self._tell_stubs(live, patches)
        try:
            live.instrumented.install(patches)
        except ThreadIdsError:
            patches = live.instrumented.without_thread_ids(patches)
            self._tell_stubs(live, patches)
            live.instrumented.install(patches)
        for text in live.instrumented.take_notes():
            self._note(text)
        self.installed.setdefault(live.pid, []).extend(patches)
        self._tell_code(live)

    def _tell_stubs(self, live: Live, patches: Sequence[Patch]) -> None:
        for patch in patches:
            self.recorder.add_stub(live.pid, patch.event_id, list(patch.stub.slot_addrs))

    def settle(self, live: Live) -> bool:
        """All probes of ``live`` are in: stop tracing if no stub needs it.

        Returns whether the process is still traced.
        """
        return live.instrumented.release()

    def _tell_code(self, live: Live) -> None:
        """Write down which code runs from the last change on."""
        changed_ns = self.tracer.changed_ns()
        for piece in self._images.changes(live.instrumented.process, live.instrumented.patches):
            self.recorder.add_mapping(
                live.pid,
                piece.start,
                piece.end - piece.start,
                piece.file_offset,
                os.major(piece.device),
                os.minor(piece.device),
                piece.inode,
                PROT_READ | PROT_EXEC,
                MAP_PRIVATE,
                piece.path,
                piece.build_id,
                changed_ns,
            )

    # ------------------------------------------------------------ watching

    def look_at_holes(self) -> None:
        """Pass holes in the rings once no thread can finish what it began there."""
        old = [(pid, ring) for pid, ring, ns in self.recorder.holes() if ns >= HOLE_PATIENCE_NS]
        for live in self.live:
            rings = [ring for pid, ring in old if pid == live.pid]
            # A target that cannot be looked at now, since it is busy or traced by somebody else, is looked at later.
            with contextlib.suppress(TargetError, UnsupportedError):
                if rings and live.instrumented.stubs_are_empty():
                    for ring in rings:
                        self.recorder.pass_hole(live.pid, ring)

    def look_at_ended(self) -> None:
        """Tell of probes that ended while their program runs on."""
        for live in self.live:
            with contextlib.suppress(TargetError):
                for text in live.instrumented.take_ended():
                    self._note(text)

    def lose(self, live: Live) -> None:
        """The address space of ``live`` is gone (exit or exec): read what is left in its rings.

        The caller closes ``live``.
        """
        self.live.remove(live)
        live.instrumented.forget()
        self.recorder.drop_target(live.pid)
        self._tell_children(live)

    def command_status(self, pid: int) -> int | None:
        """Exit status of a command that we started, as a shell shows it: 128 + signal for one that was killed."""
        deadline = time.monotonic() + COLLECT_SECONDS
        with native_errors(pid):
            # An end shows on the pidfd before the tracer has collected the status.
            while (status := self.tracer.exit_status(pid)) is None and time.monotonic() < deadline:
                time.sleep(0.001)
        return 128 - status if status is not None and status < 0 else status

    # ------------------------------------------------------------ coming out

    def take_out(self) -> list[PtwprobeError]:
        """Unpatch every target and let it go; errors are returned so that each target gets its turn."""
        failures: list[PtwprobeError] = []
        for live in self.live:
            try:
                self._remove(live)
            except TargetGoneError:
                live.instrumented.forget()
                self._tell_children(live)
            except PtwprobeError as error:
                failures.append(error)
            self.recorder.drop_target(live.pid)
            live.close()
        self.live = []
        return failures

    def _remove(self, live: Live) -> None:
        """Take the patches of one target out."""
        try:
            clean = self._leave(live)
        except TargetGoneError:
            raise
        except (TargetError, UnsupportedError) as error:
            if live.replaced():
                raise TargetGoneError(f"process {live.pid} executes another program") from error
            self._note(_kept(live))
            raise
        if clean:
            self._remove_older(live)
        # What stays mapped is the file's again.
        self._tell_code(live)
        for text in live.instrumented.notes:
            self._note(text)
        self._tell_children(live)

    def _leave(self, live: Live) -> bool:
        """As ``Instrumented.remove``; who is in the way (a debugger, a vfork) gets some time to go."""
        deadline = time.monotonic() + REMOVE_SECONDS
        while True:
            try:
                return live.instrumented.remove()
            except TargetGoneError:
                raise
            except (TargetError, UnsupportedError):
                if live.replaced() or time.monotonic() >= deadline:
                    raise
            time.sleep(RETRY_SECONDS)

    def _remove_older(self, live: Live) -> None:
        """What an earlier recording had to leave mapped, since a thread was in a stub, may go now."""
        process = live.instrumented.process
        with contextlib.suppress(PtwprobeError):
            if recover.has_ours(process):
                recover.restore(process, live.instrumented.claim)

    def _tell_children(self, live: Live) -> None:
        """Name the processes that were forked meanwhile and have the patches, too."""
        with contextlib.suppress(PtwprobeError):
            origin = live.instrumented.target.mapped.ring_of
            children = recover.forked_from(origin) if origin else []
            if children:
                pids = ", ".join(str(child.pid) for child in children[:8]) + (", ..." if len(children) > 8 else "")
                self._note(
                    f"forked from process {live.pid} while it was recorded, with the same patches, which emit nothing "
                    f"there: {pids}; `ptwprobe detach -p {live.pid} --all` takes them out"
                )

    def close(self) -> dict[str, Any]:
        """End the recording and the tracing; the recorder's final counts."""
        stats: dict[str, Any] = self.recorder.stop()
        # What could not be restored is tried once more as the tracing ends.
        self.tracer.close()
        for claim in self._claims:
            claim.end()
        self.closed = True
        return stats


def _kept(live: Live) -> str:
    """What is left in a target that could not be left as it was."""
    patches = live.instrumented.target.code.patches
    sites = ", ".join(f"{p.site.runtime_addr:#x}" for p in patches[:8]) + (", ..." if patches[8:] else "")
    what = f"its patches at {sites}; they emit nothing and do no harm" if patches else "what was mapped into it"
    return f"process {live.pid} keeps {what}; `ptwprobe detach -p {live.pid}` takes it out later"


def rings_needed() -> int:
    """One ring for every CPU up to the highest that is online."""
    text = Path("/sys/devices/system/cpu/online").read_text()
    return max(int(part.split("-")[-1]) for part in text.strip().split(",")) + 1
