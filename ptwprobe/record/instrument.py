"""One target under instrumentation: plan its sites, map ring and stubs, put the patches in, take them out.

Responsible for the order of these steps. Which bytes to patch is decided in ``patch.plan``, how a change is carried
out in ``patch.install``, what becomes of the hits in ``record.session``.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from ptwprobe import _native
from ptwprobe.errors import NotYetError, RefusalReason, RefusedError
from ptwprobe.model import Event, Patch, Probe, RingLayout, Site, StubForm, Window
from ptwprobe.patch import build, plan
from ptwprobe.patch.codemaps import code_map
from ptwprobe.patch.install import Target
from ptwprobe.patch.journal import Claim
from ptwprobe.patch.mapped import STUB_NAME
from ptwprobe.patch.pages import CodePages
from ptwprobe.patch.place import (
    AddressSpace,
    Allocator,
    lowest_mappable,
    mappings_left,
    read_brk_start,
    stub_mappings,
)
from ptwprobe.patch.remote import RemoteCallError
from ptwprobe.patch.runtimes import check_runtime
from ptwprobe.probe import elf
from ptwprobe.process import Mapping, Process
from ptwprobe.record.eventtable import EventTable
from ptwprobe.stub.assemble import assemble
from ptwprobe.stub.operands import has_load

DEFAULT_RING_BITS = 24
"""16 MiB for each CPU: a third of a second at a million two-argument hits a second."""
MAPPINGS_FACTOR = 8
"""A target must have left so many times the mappings that the ring takes."""
BUSY_SECONDS = 1.0
"""How long a target that does not come to a stand is tried."""
BUSY_PAUSE = 0.02
MAP_ATTEMPTS = 4
"""A running target may map memory where a stub was about to go."""


_T = TypeVar("_T")


@dataclass(frozen=True)
class PlannedSite:
    """A site that can be patched, with the window that was found for it."""

    probe: Probe
    site: Site
    window: Window
    event: Event


@dataclass(frozen=True)
class RefusedSite:
    """A site that will not be patched, and why."""

    probe: Probe
    site: Site
    error: RefusedError


@dataclass
class Plan:
    """What would go into one process."""

    sites: list[PlannedSite] = field(default_factory=list)
    refused: list[RefusedSite] = field(default_factory=list)


def plan_sites(
    process: Process,
    probes: Sequence[Probe],
    events: EventTable,
    taken: Sequence[Window] = (),
    traced: bool = False,
    form: StubForm = StubForm.RING,
) -> Plan:
    """Resolve and plan ``probes`` in ``process`` without touching it.

    ``taken`` are the windows already patched; ``traced``: the process stays traced even if none of ``probes`` needs it.

    Raises ResolveError for a probe that names nothing (NotYetError where that may change), and the site's RefusedError
    for a probe of which every site is refused.
    """
    result = Plan()
    code = [m for m in process.maps() if m.executable]
    pages = CodePages(process)
    patched = plan.Taken(taken)
    traced = traced or any(map(reads_memory, probes))
    for probe in probes:
        planned, refused = [], []
        for site in elf.resolve(probe, process):
            try:
                _check_mapped(site, code)
                window = plan.plan_window(site, process.read, code_map(site.object), pages.can_switch)
                check_runtime(site, window, probe.arguments, form, [m.path for m in code], traced)
                patched.take(site, window)
            except RefusedError as error:
                refused.append(RefusedSite(probe, site, with_owner(error, site, process)))
                continue
            planned.append(PlannedSite(probe, site, window, events.event_for(probe, site)))
        if not planned and refused:
            raise refused[0].error
        result.sites += planned
        result.refused += refused
    return result


def reads_memory(probe: Probe) -> bool:
    """Whether stubs of ``probe`` load through pointers, so that its processes stay traced."""
    return any(map(has_load, probe.arguments))


def _check_mapped(site: Site, code: Sequence[Mapping]) -> None:
    """Raises NotYetError unless the site's own bytes of its file are mapped as code where the site is.

    While an object is being loaded, its addresses may show bytes that are about to be mapped over.
    """
    for m in code:
        here = m.start <= site.runtime_addr < m.end and m.inode == site.object.inode
        if here and m.offset + site.runtime_addr - m.start == site.file_offset:
            return
    raise NotYetError(f"{site.object.path} is not mapped as code at {site.runtime_addr:#x}")


def with_owner(error: RefusedError, site: Site, process: Process) -> RefusedError:
    """``error`` with a better hint where the foreign jump leads into stubs of another ptwprobe."""
    if error.reason is RefusalReason.FOREIGN_PROBE:
        jump = process.read(site.runtime_addr, 5)
        target = site.runtime_addr + 5 + int.from_bytes(jump[1:], "little", signed=True)
        ours = (m for m in process.maps() if STUB_NAME in m.path)
        if jump[:1] == b"\xe9" and any(m.start <= target < m.end for m in ours):
            hint = (
                f"it is a ptwprobe's: `ptwprobe status -p {process.pid}` says whose, and unless that still records, "
                f"`ptwprobe detach -p {process.pid}` takes it out"
            )
            return RefusedError(error.reason, error.message, hint)
    return error


class Instrumented:
    """A process with a ring and, between ``install`` and ``remove``, with patches."""

    def __init__(self, tracer: _native.Tracer, process: Process, claim: Claim | None = None) -> None:
        self.process = process
        self.claim = claim
        self.target = Target(tracer, process.pid, claim)
        self.patches: list[Patch] = []
        self.ring: _native.RingMemory | None = None
        self.layout: RingLayout | None = None
        self.allocator: Allocator | None = None
        self.paused_ns = 0

    @property
    def windows(self) -> list[Window]:
        """The windows that are patched now."""
        return [p.window for p in self.patches]

    @property
    def has_loads(self) -> bool:
        """Whether a stub loads through a pointer, so that the target must stay traced."""
        return any(p.stub.loads for p in self.patches)

    def map_ring(self, rings: int, ring_bits: int) -> _native.RingMemory:
        """Give the target its ring; it runs on.

        Raises RefusedError (no-stub-space) where the process has so many mappings that ours could keep it from more.
        """
        needed = 2 * rings + 3
        left = mappings_left(len(self.process.maps()))
        if left < MAPPINGS_FACTOR * needed:
            raise RefusedError(
                RefusalReason.NO_STUB_SPACE,
                f"process {self.process.pid} may have only {left} more mappings, and the ring alone takes {needed}",
                "raise vm.max_map_count (sysctl)",
            )
        self.ring = patiently(lambda: self.target.map_ring(rings, ring_bits))
        return self.ring

    def build(self, plan: Plan, form: StubForm = StubForm.RING) -> list[tuple[PlannedSite, Patch]]:
        """Place and assemble the stubs of ``plan``, map their space and write them; no site is changed yet.

        A site for whose stub there is no room goes from ``plan.sites`` to ``plan.refused``. Raises its RefusedError if
        no site is left, and NotYetError where a site is not there any more.
        """
        # The plan was made before the process was attached to: it may have unloaded an object or executed a program.
        code = [m for m in self.process.maps() if m.executable]
        for item in plan.sites:
            _check_mapped(item.site, code)
        for attempt in range(MAP_ATTEMPTS):
            if self.allocator is None or attempt:
                self.allocator = self._fresh_allocator()
            before = set(self.allocator.ranges())
            built, refused = self._build_once(plan, self.allocator, form)
            try:
                new = [r for r in self.allocator.ranges() if r not in before]
                patiently(partial(self.target.map_stub_space, new))
                break
            except RemoteCallError as error:
                # The target has mapped something there since its maps were read.
                if error.number != errno.EEXIST or attempt == MAP_ATTEMPTS - 1:
                    raise
        if refused and not built:
            raise refused[0].error
        for _item, patch in built:
            self.target.write_stub(patch.stub.addr, patch.stub.code)
        plan.sites = [item for item, _patch in built]
        plan.refused += refused
        return built

    def _build_once(
        self, plan: Plan, allocator: Allocator, form: StubForm
    ) -> tuple[list[tuple[PlannedSite, Patch]], list[RefusedSite]]:
        if self.layout is None:
            self.layout = self.target.ring_layout()
        built, refused = [], []
        # Stubs that can lie in few places first, so that those with a choice do not take their room.
        for item in sorted(plan.sites, key=lambda i: i.window.target_max - i.window.target_min):
            try:
                patch = build.build_patch(
                    item.site,
                    item.event.event_id,
                    item.probe.arguments,
                    item.window,
                    allocator,
                    form,
                    self.layout,
                    item.probe.paced,
                    code_map(item.site.object),
                )
            except RefusedError as error:
                refused.append(RefusedSite(item.probe, item.site, error))
            else:
                built.append((item, patch))
        return built, refused

    def _fresh_allocator(self) -> Allocator:
        process = self.process
        maps = process.maps()
        space = AddressSpace.of(maps, read_brk_start(process.pid), process.rlimit_stack, lowest_mappable())
        return Allocator(space, stub_mappings(mappings_left(len(maps))))

    def install(self, patches: Sequence[Patch]) -> None:
        """Patch all sites in one change, for which the target stands still once, and let the stubs emit.

        Faults of loads, and of displaced instructions, are caught from before the first hit on. Raises ThreadIdsError:
        see ``without_thread_ids``.
        """
        loads = [load for p in (*self.patches, *patches) for load in p.stub.loads]
        if loads:
            patiently(lambda: self.target.watch(loads))
        self.paused_ns += patiently(lambda: self.target.apply(patches))
        self.patches += patches
        self.target.open_gate()

    def without_thread_ids(self, patches: Sequence[Patch]) -> list[Patch]:
        """The same patches, which are not in yet, with stubs in the same places that do not read a thread's id."""
        self.target.tell_threads_by_base()
        self.layout = self.target.ring_layout()
        stubs = [assemble(replace(p.stub.request, ring=self.layout)) for p in patches]
        for stub in stubs:
            self.target.write_stub(stub.addr, stub.code)
        return [replace(patch, stub=stub) for patch, stub in zip(patches, stubs, strict=True)]

    def release(self) -> bool:
        """Stop tracing (and let go of a process that stands still), unless a stub's loads need somebody who catches
        their faults; returns whether the process is still traced.
        """
        if not self.has_loads:
            self.target.release()
        return self.has_loads

    def take_ended(self) -> list[str]:
        """A line about each probe that had to end since the last call, for the program's own handling of faults."""
        return self.target.code.drop_ended() if self.has_loads else []

    def stubs_are_empty(self) -> bool:
        """Whether no thread stands in a stub or has a frame that returns into one."""
        return self.target.stubs_are_empty()

    def forget(self) -> None:
        """The process or its address space is gone: there is nothing to undo."""
        self.target.forget()

    def take_notes(self) -> list[str]:
        """What a user should know of what was installed; each is told once."""
        notes, self.target.code.notes = self.target.code.notes, []
        return notes

    @property
    def notes(self) -> list[str]:
        """What a user should know after ``remove``."""
        return self.target.notes

    def remove(self) -> bool:
        """Take every patch out and let the target go; returns whether ring and stubs could be unmapped, too."""
        return self.target.leave()


def patiently(step: Callable[[], _T]) -> _T:
    """Try ``step``, which changes nothing where it is refused as busy, for a second.

    On a loaded machine a thread may get no CPU in the time that it has for coming to a stand.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            return step()
        except RefusedError as error:
            if error.reason is not RefusalReason.BUSY or time.monotonic() > deadline:
                raise
        time.sleep(BUSY_PAUSE)


def describe_refusals(refused: Sequence[RefusedSite], say: Callable[[str], None]) -> None:
    """One line a refused site, at most ten."""
    for item in refused[:10]:
        say(f"{item.site.function}: {item.error}")
    if len(refused) > 10:
        say(f"... and {len(refused) - 10} more sites refused")
