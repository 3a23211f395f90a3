"""The changes of one target's code: patches in, patches out, all of a change or none of it.

Responsible for what of the code is changed now, and how: pages are switched for a copy of ours wherever that can be
done (``patch.pages``), else bytes are written in place. Which bytes change is decided in ``patch.plan``; stopping
threads, switching and writing is native (``_native.Tracer``).
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from ptwprobe import _native
from ptwprobe.errors import PtwprobeError, RefusalReason, RefusedError
from ptwprobe.model import CodeRange, Patch
from ptwprobe.patch.mapped import Mapped
from ptwprobe.patch.memory import os_error
from ptwprobe.patch.pages import CodePages, crosses_page
from ptwprobe.patch.refusals import MAY_NOT_CROSS, refused
from ptwprobe.patch.remote import PAGE, RemoteCallError, UnmappedError, error_of, native_errors
from ptwprobe.patch.switch import Exchange, Prepared
from ptwprobe.process import Process

Announce: TypeAlias = "Callable[[Sequence[Patch], Sequence[Exchange]], None]"
INT3 = 0xCC
ATTEMPTS = 4
"""How often a change is planned anew since somebody else changed the code meanwhile."""


class Code:
    """What is patched in a process. Methods raise as those of ``install.Target``."""

    def __init__(self, tracer: _native.Tracer, pid: int, mapped: Mapped, announce: Announce) -> None:
        """``announce`` is called before each change, when all is ready for it: with the patches that come and the
        exchanges of pages."""
        self.patches: list[Patch] = []
        self.ranges: list[CodeRange] = []
        """What is switched."""
        self.notes: list[str] = []
        """What a user should know of the changes that were made."""
        self._tracer = tracer
        self._pid = pid
        self._mapped = mapped
        self._announce = announce
        self._why_in_place = ""

    def apply(self, patches: Sequence[Patch], thread_id_offset: int | None = None) -> int:
        """Put all patches in, or none; returns the ns that the target stood still.

        ``thread_id_offset``: where, from its fs base, every thread must have its id, else ThreadIdsError. Raises
        UnmappedError where an object was unloaded, as ``undo`` does; RefusedError (crosses-page).
        """
        if not patches:
            return 0
        stood = self._change(patches, (), thread_id_offset=thread_id_offset)
        self.patches += patches
        return stood

    def undo(self, patches: Sequence[Patch], release: bool = False) -> int:
        """Take all patches out, or none; returns the ns that the target stood still. The stubs stay.

        ``release``: the target is not traced any more afterwards.
        """
        if not patches:
            return 0
        stood = self._change((), patches, release=release)
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
            foreign = self._sort_out(notes)
            try:
                self._take_out(foreign)
                break
            except (RefusedError, UnmappedError) as error:
                # What somebody changed at this moment is sorted out by the next look.
                if time.monotonic() > deadline:
                    if not isinstance(error, RefusedError) or error.reason is not RefusalReason.FOREIGN_PROBE:
                        raise
                    notes.append(f"{len(self.patches)} probes stay: {error.message}")
                    return False
        notes += [f"{_place(p)} stays: another tool has changed the code there" for p in foreign]
        return not self.patches

    def _take_out(self, foreign: Sequence[Patch]) -> None:
        """All but ``foreign``, whose places somebody else has changed: what is there now stays there."""
        removed = [p for p in self.patches if p not in foreign]
        if removed or self.ranges:
            self._change((), removed, foreign, release=True)
            self.patches = list(foreign)

    def adopt(self, patches: Sequence[Patch]) -> None:
        """Take over patches that another ptwprobe has left, to undo them; they go even if we are killed meanwhile."""
        ranges = CodePages(Process(self._pid)).switched()
        with native_errors(self._pid):
            self._tracer.adopt(self._pid, _sites((), patches), [(r.aside, r.start, r.length) for r in ranges])
        self.patches += patches
        self.ranges += ranges

    def forget(self) -> None:
        """There is nothing to undo any more."""
        self.patches.clear()
        self.ranges.clear()

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

    # ------------------------------------------------------------ one change

    def _change(
        self,
        added: Sequence[Patch],
        removed: Sequence[Patch],
        foreign: Sequence[Patch] = (),
        thread_id_offset: int | None = None,
        release: bool = False,
    ) -> int:
        for attempt in range(ATTEMPTS):
            exchanges = self._plan(added, removed, foreign)
            in_place = [p for p in added if not any(_holds(e, p) for e in exchanges)]
            if crossing := next((p for p in in_place if crosses_page(p.window)), None):
                raise refused(crossing.site, crossing.old, MAY_NOT_CROSS.reason, MAY_NOT_CROSS.detail)
            try:
                with Prepared(self._mapped, exchanges):
                    self._announce(added, exchanges)
                    stood = self._tracer.apply(
                        self._pid,
                        _sites(added, removed),
                        [e.native for e in exchanges],
                        [piece for e in exchanges for piece in e.carried],
                        thread_id_offset=thread_id_offset,
                        release=release,
                    )
            except RemoteCallError as error:
                if not added or self._why_in_place:
                    raise
                self._why_in_place = error.message
            except _native.NativeError as error:
                kind, message, _ = error.args
                if kind == "unswitchable" and added and not self._why_in_place:
                    self._why_in_place = message
                elif kind != "changed" or attempt == ATTEMPTS - 1:
                    raise _error(self._pid, error, [*added, *removed]) from error
            else:
                self._keep(exchanges)
                self._note(in_place)
                return stood
        raise AssertionError("the last attempt returns or raises")

    def _plan(self, added: Sequence[Patch], removed: Sequence[Patch], foreign: Sequence[Patch]) -> list[Exchange]:
        """The exchanges of pages that make the change; patches in none of them are written in place."""
        pages = CodePages(Process(self._pid))
        switched = added if not self._why_in_place else ()
        going = {id(p) for p in (*removed, *foreign)}
        staying = [p for p in self.patches if id(p) not in going]
        out: list[Exchange] = []
        for r in self.ranges:
            coming, leaving = [p for p in switched if _holds(r, p)], [p for p in removed if _holds(r, p)]
            needed = coming or any(_holds(r, p) for p in staying)
            ours = pages.is_switched(r)
            if ours is False:
                out.append(Exchange("abandon", r.start, r.length, aside=r.aside))
            elif (needed and not coming and not leaving) or (added and not coming):
                continue
            elif ours is None:
                raise RefusedError(
                    RefusalReason.FOREIGN_PROBE,
                    f"process {self._pid} has something else in a part of {r.start:#x}-{r.end:#x}, which is switched",
                )
            else:
                e = Exchange("renew" if needed else "restore", r.start, r.length, aside=r.aside)
                wanted = self._patched(e, coming, leaving)
                e.carried = self._carried(e, wanted, [*coming, *(p for p in staying if _holds(r, p))], pages)
                if needed:
                    e.file, e.file_offset, e.scratch = pages.code_at(r.start), r.file_offset, 0
                    e.copy = self._without(wanted, e)
                out.append(e)
        for span in pages.spans(switched, self.ranges):
            e = Exchange("replace", span.start, span.end - span.start, span.mapping, span.file_offset)
            e.copy = self._patched(e, switched, ())
            out.append(e)
        if len(out) > 1 or any(not any(_holds(e, p) for e in out) for p in removed):
            # What comes later may fail: then our copy has to come back.
            for e in out:
                if e.what == "restore":
                    e.scratch = 0
        return out

    def _patched(self, exchange: Exchange, added: Sequence[Patch], removed: Sequence[Patch]) -> bytes:
        """Read the content of the pages; what it is to be after the change.

        Raises RefusedError (foreign-probe) where it is not what the patches are for.
        """
        exchange.content = self._read(exchange.start, exchange.length)
        out = bytearray(exchange.content)
        for patches, new in ((added, True), (removed, False)):
            for patch in patches:
                if _holds(exchange, patch):
                    at = patch.site.runtime_addr - exchange.start
                    here = slice(at, at + len(patch.new))
                    expected, wanted = (patch.old, patch.new) if new else (patch.new, patch.old)
                    if out[here] != expected:
                        raise RefusedError(
                            RefusalReason.FOREIGN_PROBE,
                            f"process {self._pid} has {out[here].hex(' ')} at {patch.site.runtime_addr:#x} where"
                            f" {expected.hex(' ')} is expected",
                            "remove the other tool's probe first",
                        )
                    out[here] = wanted
        return bytes(out)

    def _carried(
        self, exchange: Exchange, wanted: bytes, patches: Sequence[Patch], pages: CodePages
    ) -> tuple[tuple[int, bytes], ...]:
        """What somebody else (a debugger, say) has written into our copy: how ``wanted``, its content after the change,
        differs from the file's pages with ``patches``.
        """
        out: list[tuple[int, bytes]] = []
        for page in pages.written_to(exchange.start, exchange.end):
            at = page - exchange.start
            theirs, files = wanted[at : at + PAGE], bytearray(self._read(exchange.aside + at, PAGE))
            for patch in patches:
                for i, byte in enumerate(patch.new, patch.site.runtime_addr - page):
                    if 0 <= i < PAGE:
                        files[i] = byte
            # A breakpoint that the file got meanwhile is right, too.
            for i in (i for i in range(PAGE) if theirs[i] != files[i] != INT3):
                addr, before = out[-1] if out else (0, b"")
                if addr + len(before) == page + i:
                    out[-1] = (addr, before + theirs[i : i + 1])
                else:
                    out.append((page + i, theirs[i : i + 1]))
        return tuple(out)

    def _without(self, content: bytes, exchange: Exchange) -> bytes:
        """``content`` with the file's bytes where somebody else's are carried over."""
        out = bytearray(content)
        for addr, theirs in exchange.carried:
            at = addr - exchange.start
            out[at : at + len(theirs)] = self._read(exchange.aside + at, len(theirs))
        return bytes(out)

    def _keep(self, exchanges: Sequence[Exchange]) -> None:
        """Remember what is switched now."""
        gone = {e.aside for e in exchanges if e.what in ("restore", "abandon")}
        self.ranges = [r for r in self.ranges if r.aside not in gone]
        for e in exchanges:
            if e.what == "replace" and e.file is not None:
                file = e.file
                self.ranges.append(CodeRange(e.start, e.length, e.aside, file.device, file.inode, e.file_offset))

    def _note(self, in_place: Sequence[Patch]) -> None:
        if in_place:
            why = self._why_in_place or (
                "their pages are not as in the file (another tool has a breakpoint on them, say), or the program may"
                " write to them or has locked them in memory"
            )
            places = ", ".join(f"{p.site.runtime_addr:#x}" for p in in_place[:3]) + (", ..." if in_place[3:] else "")
            self.notes.append(
                f"process {self._pid}: {len(in_place)} probes ({places}) are written in place, since {why}; until they"
                " are out again, a breakpoint that another tool sets right there can kill the process"
            )

    def _sort_out(self, notes: list[str]) -> list[Patch]:
        """Those of the patches that somebody else has changed.

        A patch whose object was unloaded is undone already, also when it was loaded again to the same place.
        """
        foreign = []
        for patch in list(self.patches):
            try:
                found = self._read(patch.site.runtime_addr, len(patch.old))
            except UnmappedError:
                found = patch.old
            if found == patch.old:
                self.patches.remove(patch)
                notes.append(f"process {self._pid}: {_place(patch)} ended when its object was unloaded")
            elif found != patch.new:
                foreign.append(patch)
        return foreign

    def _read(self, addr: int, size: int) -> bytes:
        """Raises UnmappedError where there is nothing."""
        try:
            with Path(f"/proc/{self._pid}/mem").open("rb", buffering=0) as memory:
                found = os.pread(memory.fileno(), size, addr)
        except OSError as error:
            if error.errno != errno.EIO:
                raise os_error(self._pid, f"reading {addr:#x}", error) from error
            found = b""
        if len(found) != size:
            raise UnmappedError(f"process {self._pid} has nothing mapped at {addr:#x}", "probe it while it is loaded")
        return found


def _holds(place: CodeRange | Exchange, patch: Patch) -> bool:
    addr = patch.site.runtime_addr
    return place.start <= addr and addr + len(patch.new) <= place.end


def _sites(
    added: Sequence[Patch], removed: Sequence[Patch]
) -> list[tuple[int, bytes, bytes, int, list[tuple[int, int]]]]:
    """As ``Tracer.apply`` takes them."""
    put_in = [(p.site.runtime_addr, p.old, p.new, len(p.window.displaced), list(p.stub.displaced_map)) for p in added]
    none: list[tuple[int, int]] = []
    return put_in + [(p.site.runtime_addr, p.new, p.old, len(p.window.displaced), none) for p in removed]


def _place(patch: Patch) -> str:
    return f"the probe in {patch.site.object.path} at {patch.site.runtime_addr:#x}"


def _error(pid: int, error: _native.NativeError, patches: Sequence[Patch]) -> PtwprobeError:
    """As ``error_of``; names the object that is not mapped any more."""
    kind, _, addr = error.args
    gone = next((p for p in patches if kind == "unmapped" and p.site.runtime_addr == addr), None)
    if gone is None:
        return error_of(error, pid)
    return UnmappedError(
        f"process {pid} unloaded {gone.site.object.path} with the site at {addr:#x}", "probe it while it stays loaded"
    )
