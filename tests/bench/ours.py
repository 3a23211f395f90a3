"""ptwprobe as a participant of the benches, in each form that a stub can have."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ptwprobe import _native
from ptwprobe.model import StubForm
from ptwprobe.probe.spec import parse
from ptwprobe.process import Process
from ptwprobe.record.eventtable import EventTable
from ptwprobe.record.instrument import Instrumented, plan_sites
from tests.cli import Recording
from tests.peers import Hits, Peer, change_of
from tests.targets import Target

ARGUMENTS = "a=$arg1 b=$arg2"


class Ring:
    """The whole way, as a user has it: stubs, ring, recorder, session on disk. Hits that were lost do not count."""

    name = "ptwprobe/ring"

    def missing(self) -> str:
        return ""

    @contextmanager
    def attached(self, target: Target, binary: Path, functions: list[str]) -> Iterator[Hits]:
        with tempfile.TemporaryDirectory() as folder:
            probes = [word for name in functions for word in ("-e", f"{name} {ARGUMENTS}")]
            changed = change_of(target, binary, functions)
            options = ["--channel", "ring", "-o", f"{folder}/hits.ptw", "--json"]
            with Recording("-p", str(target.pid), *probes, *options) as recording:
                changed()
                yield lambda: int(recording.stop().good().summary["totals"]["hits"])


class PtStub:
    """The pt form of the stub and nothing else: ``ptwrite`` runs, and no hardware takes its words."""

    def __init__(self, paced: bool) -> None:
        self.name = f"ptwprobe/pt-{'paced' if paced else 'unpaced'}"
        self._paced = paced

    def missing(self) -> str:
        return "" if _native.ptwrite_executes() else "ptwrite raises #UD on this CPU"

    @contextmanager
    def attached(self, target: Target, binary: Path, functions: list[str]) -> Iterator[Hits]:
        probes = [replace(parse(f"{name} {ARGUMENTS}"), paced=self._paced) for name in functions]
        process = Process(target.pid)
        tracer = _native.Tracer()
        instrumented = Instrumented(tracer, process)
        changed = change_of(target, binary, functions)
        try:
            plan = plan_sites(process, probes, EventTable())
            instrumented.map_ring(rings=1, ring_bits=16)
            instrumented.install([patch for _, patch in instrumented.build(plan, StubForm.PT)])
            instrumented.release()
            changed()
            yield lambda: None
            instrumented.remove()
        finally:
            tracer.close()


def variants() -> list[Peer]:
    return [Ring(), PtStub(paced=True), PtStub(paced=False)]
