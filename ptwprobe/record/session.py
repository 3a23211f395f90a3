"""The life of a session: plan, instrument, record, end, and always leave the targets as they were.

Responsible for the order of things and for every way in which a session ends. How one process is instrumented is in
``record.instrument``, how a command is started in ``record.launch``, the folder in ``record.folder``.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from enum import Enum
from mmap import MAP_PRIVATE, PROT_EXEC, PROT_READ
from pathlib import Path
from types import TracebackType
from typing import Any

from ptwprobe import _native
from ptwprobe.errors import NotYetError, PtwprobeError, ResolveError, TargetError, TargetGoneError, UsageError
from ptwprobe.model import Patch, Probe, Totals
from ptwprobe.patch.remote import native_errors
from ptwprobe.probe import elf
from ptwprobe.probe.spec import parse
from ptwprobe.process import Process
from ptwprobe.record import folder
from ptwprobe.record.channel import ChannelChoice, choose
from ptwprobe.record.eventtable import EventTable
from ptwprobe.record.instrument import (
    DEFAULT_RING_BITS,
    Instrumented,
    Plan,
    RefusedSite,
    describe_refusals,
    plan_sites,
)
from ptwprobe.record.launch import Launching
from ptwprobe.record.live import Live
from ptwprobe.record.metadata import session_document

TOTALS = ("hits", "lost", "torn", "faults", "filtered", "stray")
POLL_SECONDS = 0.02
HOLE_PATIENCE_NS = 100_000_000
"""How long a record may stay unfinished before the threads are looked at."""


class End(Enum):
    """Why a session ended; the value stands in session.json."""

    DURATION = "duration"
    INTERRUPT = "interrupt"
    STOPPED = "stopped"
    EXIT = "exit"
    EXEC = "exec"
    DISK_FULL = "disk-full"
    WRITE_ERROR = "write-error"
    FAILED = "failed"


class Session:
    """Records probes in running processes, or in a command that it starts, into a session folder.

        with ptwprobe.Session(pid=1234, output="malloc.ptw") as session:
            session.add("libc:malloc size=$arg1")
            totals = session.run(seconds=5)

    ``pid``: one or several; ``command``: started and stopped before its first instruction (one of the two is needed).
    ``threads``: keep only these threads' hits. ``ring_bits``: log2 of the bytes of ring for each CPU and process.
    ``on_note`` gets one line for everything a user should know and that is not an error.
    Raises the errors of ``ptwprobe.errors``; after one, no target is changed.
    """

    def __init__(
        self,
        *,
        pid: int | Sequence[int] | None = None,
        command: Sequence[str] | None = None,
        output: str | os.PathLike[str] = "ptwprobe.ptw",
        channel: str = "auto",
        threads: Sequence[int] | None = None,
        ring_bits: int = DEFAULT_RING_BITS,
        on_note: Callable[[str], None] | None = None,
    ) -> None:
        pids = [] if pid is None else [pid] if isinstance(pid, int) else list(pid)
        if not pids and not command:
            raise UsageError("nothing to record", "give -p PID, or a command after --")
        if pids and command:
            raise UsageError("both processes and a command were given", "give either -p PID or a command after --")
        if len(set(pids)) != len(pids):
            raise UsageError("a process was given twice")
        if not 16 <= ring_bits <= 30:
            raise UsageError(f"a ring of 2^{ring_bits} bytes", "the ring takes 64 KiB to 1 GiB for each CPU")
        self.output = Path(output)
        self.choice: ChannelChoice = choose(channel)
        self.command = list(command or [])
        self.notes: list[str] = []
        self.probes: list[Probe] = []
        self.events = EventTable()
        self.refused: list[RefusedSite] = []
        self.end: End | None = None
        self.recorder: _native.Recorder | None = None
        self._processes = [Process(p) for p in pids]
        self._threads = list(threads) if threads else None
        self._ring_bits = ring_bits
        self._on_note = on_note
        self._tracer: _native.Tracer | None = None
        self._live: list[Live] = []
        self._launching: Launching | None = None
        self._installed: dict[int, list[Patch]] = {}
        self._described: list[dict[str, object]] = []
        self._folder: folder.SessionFolder | None = None
        self._stop_requested: End | None = None
        self._stats: dict[str, Any] = dict.fromkeys(TOTALS, 0)
        self._started_ns = 0
        self.exit_status: int | None = None
        for process in self._processes:
            process.check_architecture()

    # ------------------------------------------------------------ what the user calls

    def add(self, probe: str | Probe) -> None:
        """Add a probe. In running processes it is resolved and planned at once, so that errors come here."""
        parsed = parse(probe) if isinstance(probe, str) else probe
        if self.recorder is not None:
            raise UsageError("a probe was added to a session that is recording", "add all probes before start()")
        for process in self._processes:
            plan_sites(process, [parsed], EventTable())
        self.probes.append(parsed)

    def run(self, seconds: float | None = None) -> Totals:
        """Start, record for ``seconds`` (or until the targets end, or ``request_stop``), stop."""
        self.start()
        try:
            self.wait(seconds)
        except KeyboardInterrupt:
            self._stop_requested = End.INTERRUPT
            self.stop()
            raise
        return self.stop()

    def start(self) -> None:
        """Instrument the targets and begin to record. When this raises, nothing was changed that is not undone.

        A command is only started here; its probes go in while ``wait`` or ``poll`` is called.
        """
        if not self.probes:
            raise UsageError("no probe was given", "add one, such as -e 'libc:malloc size=$arg1'")
        plans = [(p, plan_sites(p, self.probes, self.events)) for p in self._processes]
        self._started_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self._folder = folder.SessionFolder.create(self.output)
        try:
            self._tracer = _native.Tracer()
            self.recorder = _native.Recorder(str(self._folder.perf_data), sys.argv)
            self.recorder.keep_threads(self._threads)
            self.recorder.start()
            if self.command:
                self._launching = Launching(self._tracer, self.command, self.probes)
            lives = [self._open(process) for process, _plan in plans]
            for live, (_process, plan) in zip(lives, plans, strict=True):
                self._put_in(live, plan)
            for live in lives:
                self._settle(live)
            self._write_document()
        except BaseException:
            self._abandon()
            raise

    def wait(self, seconds: float | None = None) -> End:
        """Wait for the end of the session, at most ``seconds``; keeps the rings flowing meanwhile."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            left = POLL_SECONDS if deadline is None else min(POLL_SECONDS, deadline - time.monotonic())
            end = self.poll(left)
            if end is None and left <= 0:
                end = End.DURATION
            if end is not None:
                self.end = end
                return end

    def poll(self, seconds: float = 0.0) -> End | None:
        """Look after targets, rings and disk for up to ``seconds``; the reason if the session has come to its end."""
        if self.recorder is None:
            return self.end
        if self._launching is not None:
            self._step_launch(self._launching, max(1, int(seconds * 1000)))
        elif seconds > 0:
            select.select([live.pidfd for live in self._live], [], [], seconds)
        for live in list(self._live):
            if live.exited():
                self._lose(live, End.EXIT)
            elif live.replaced():
                self._lose(live, End.EXEC)
        self._look_at_holes(self.recorder)
        error = self.recorder.stats()["error"]
        if error is not None:
            self.end = End.DISK_FULL if error[0] == "disk-full" else End.WRITE_ERROR
            self.note(f"{self.output}: {error[1]}; recording ends here")
            return self.end
        if self._stop_requested is not None or self._live or self._launching is not None:
            return self._stop_requested
        return self.end

    def request_stop(self, end: End = End.INTERRUPT) -> None:
        """Let ``wait`` come to an end; may be called from a signal handler."""
        self._stop_requested = end

    def stop(self) -> Totals:
        """Take the probes out, let the targets go, finish the files; the totals of the session."""
        if self.recorder is None:
            return self.totals
        if self.end is None:
            self.end = self._stop_requested or End.STOPPED
        failures = self._take_out(self.recorder)
        self._stats = self.recorder.stop()
        self._write_document(time.clock_gettime_ns(time.CLOCK_MONOTONIC))
        self._close()
        if failures:
            raise failures[0]
        return self.totals

    @property
    def totals(self) -> Totals:
        """What was recorded up to now."""
        stats = self._stats if self.recorder is None else self.recorder.stats()
        return Totals(stats["hits"], stats["lost"], stats["torn"], stats["stray"], 0)

    def summary(self) -> dict[str, Any]:
        """The result for ``record --json``."""
        return {
            "output": str(self.output),
            "channel": self.choice.name,
            "channel_reason": self.choice.reason,
            "end": self.end.value if self.end else None,
            "exit_status": self.exit_status,
            "events": [{"event": e.event, "probe": e.probe, "sites": e.sites} for e in self.events.events()],
            "refused": len(self.refused),
            "totals": {key: self._stats[key] for key in TOTALS},
            "notes": self.notes,
        }

    def note(self, text: str) -> None:
        """Keep a line for session.json and show it."""
        self.notes.append(text)
        if self._on_note is not None:
            self._on_note(text)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if kind is not None and self.end is None:
            self.end = End.FAILED
        self.stop()

    # ------------------------------------------------------------ steps

    def _open(self, process: Process) -> Live:
        """Attach to ``process``, give it a ring and make it known to the recorder."""
        assert self._tracer is not None and self.recorder is not None
        live = Live(Instrumented(self._tracer, process))
        self._live.append(live)
        self._described.append(
            {"pid": process.pid, "comm": process.comm, "exe": process.exe, "cmdline": list(process.cmdline)}
        )
        ring = live.instrumented.map_ring(rings_needed(), self._ring_bits)
        self.recorder.add_target(process.pid, ring, process.comm)
        return live

    def _put_in(self, live: Live, plan: Plan) -> None:
        """Build and install the patches of ``plan``."""
        assert self.recorder is not None
        patches = live.instrumented.build(plan.sites)
        for item, patch in zip(plan.sites, patches, strict=True):
            self.recorder.add_event(item.event.event_id, len(item.event.fields))
            self.recorder.add_stub(live.pid, item.event.event_id, list(patch.stub.slot_addrs))
            item.event.sites[live.pid] = item.site.runtime_addr
        live.instrumented.install(patches)
        self._installed.setdefault(live.pid, []).extend(patches)
        self.refused += plan.refused
        describe_refusals(plan.refused, self.note)

    def _settle(self, live: Live) -> bool:
        """All probes are in: describe the code that runs, and stay attached only while a stub's loads need it."""
        assert self.recorder is not None
        objects = elf.objects(live.instrumented.process)
        build_ids = {(o.device, o.inode): o.build_id for o in objects}
        for m in live.instrumented.process.maps():
            if m.executable and m.is_file:
                self.recorder.add_mapping(
                    live.pid,
                    m.start,
                    m.end - m.start,
                    m.offset,
                    os.major(m.device),
                    os.minor(m.device),
                    m.inode,
                    PROT_READ | PROT_EXEC,
                    MAP_PRIVATE,
                    m.path,
                    build_ids.get((m.device, m.inode), ""),
                )
        return live.instrumented.release()

    def _step_launch(self, launching: Launching, timeout_ms: int) -> None:
        """Put in the probes whose objects the command has mapped by now."""
        try:
            for probe in launching.step(timeout_ms):
                if not self._live:
                    self._open(launching.process)
                live = self._live[0]
                try:
                    plan = plan_sites(launching.process, [probe], self.events, live.instrumented.windows)
                except NotYetError:
                    continue
                self._put_in(live, plan)
                launching.arrived(probe)
        except PtwprobeError:
            launching.kill()
            raise
        if not launching.pending:
            self._launching = None
            if self._settle(self._live[0]):
                launching.run()
            self._write_document()
        elif launching.gone:
            self._launching = None
            self._command_ended(launching)

    def _command_ended(self, launching: Launching) -> None:
        """The command ended while probes were still waiting for their objects."""
        self.end = End.EXIT
        for probe in launching.pending:
            self.note(f"never mapped while the command ran: {probe.text}")
        if len(launching.pending) == len(self.probes):
            raise ResolveError(
                f"{self.command[0]} never mapped what '{launching.pending[0].text}' names",
                f"it had mapped: {', '.join(sorted(launching.seen)) or 'nothing that could be probed'}",
            )

    def _look_at_holes(self, recorder: _native.Recorder) -> None:
        """Pass holes in the rings once no thread can finish what it began there."""
        old = [(pid, ring) for pid, ring, ns in recorder.holes() if ns >= HOLE_PATIENCE_NS]
        for live in self._live:
            rings = [ring for pid, ring in old if pid == live.pid]
            with contextlib.suppress(TargetError):
                if rings and live.instrumented.stubs_are_empty():
                    for ring in rings:
                        recorder.pass_hole(live.pid, ring)

    def _lose(self, live: Live, end: End) -> None:
        """The target's address space is gone: read what is left in its rings."""
        assert self.recorder is not None and self._tracer is not None
        self._live.remove(live)
        live.instrumented.forget()
        if end is End.EXIT and self.command:
            self.exit_status = self._command_status(self._tracer, live.pid)
        self.recorder.drop_target(live.pid)
        live.close()
        self.end = end
        if end is End.EXEC:
            self.note(f"process {live.pid} replaced its program (exec): its probes ended there")

    @staticmethod
    def _command_status(tracer: _native.Tracer, pid: int) -> int | None:
        """The command's exit status as a shell shows it: 128 + signal for one that was killed."""
        with native_errors(pid):
            status = tracer.exit_status(pid)
        return 128 - status if status is not None and status < 0 else status

    def _take_out(self, recorder: _native.Recorder) -> list[PtwprobeError]:
        """Unpatch every target; errors are returned so that each target gets its turn."""
        failures: list[PtwprobeError] = []
        for live in self._live:
            try:
                if not live.instrumented.remove():
                    self.note(f"process {live.pid}: a thread is still inside a stub; stubs and ring stay mapped there")
            except TargetGoneError:
                live.instrumented.forget()
            except PtwprobeError as error:
                failures.append(error)
            recorder.drop_target(live.pid)
            live.close()
        self._live = []
        if self._launching is not None:
            with contextlib.suppress(TargetError):
                self._launching.run()
            self._launching = None
        return failures

    def _abandon(self) -> None:
        """Undo a start that failed; the session folder goes, too."""
        self.end = End.FAILED
        if self.recorder is not None:
            self._take_out(self.recorder)
            self._stats = self.recorder.stop()
        if self._folder is not None:
            self._folder.remove()
        self._close()

    def _close(self) -> None:
        if self._tracer is not None:
            self._tracer.close()
        self._tracer = None
        self.recorder = None

    def _write_document(self, ended_ns: int | None = None) -> None:
        assert self._folder is not None and self.recorder is not None
        document = session_document(
            choice=self.choice,
            started_ns=self._started_ns,
            ended_ns=ended_ns,
            end=self.end.value if self.end else None,
            clock=self.recorder.clock(),
            events=self.events,
            installed=self._installed,
            processes=self._described,
            threads=self._threads,
            refused=self.refused,
            stats=self._stats,
            notes=self.notes,
        )
        self._folder.write_document(document)


def rings_needed() -> int:
    """One ring for every CPU up to the highest that is online."""
    text = Path("/sys/devices/system/cpu/online").read_text()
    return max(int(part.split("-")[-1]) for part in text.strip().split(",")) + 1
