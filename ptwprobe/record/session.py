"""The life of a session: plan, instrument, record, end, and always leave the targets as they were.

Responsible for the order of things and for when a session ends. The processes are in ``record.targets``, how one is
instrumented in ``record.instrument``, how a command is started in ``record.launch``, the folder in ``record.folder``.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

from ptwprobe.errors import (
    NotYetError,
    PtwprobeError,
    ResolveError,
    TargetError,
    UsageError,
)
from ptwprobe.model import Probe, Totals
from ptwprobe.patch.recover import has_ours, restore, sweep
from ptwprobe.probe.spec import parse
from ptwprobe.process import Process, process_of_thread
from ptwprobe.record import folder
from ptwprobe.record.channel import ChannelChoice, choose
from ptwprobe.record.eventtable import EventTable
from ptwprobe.record.instrument import (
    DEFAULT_RING_BITS,
    Plan,
    RefusedSite,
    describe_refusals,
    plan_sites,
    reads_memory,
)
from ptwprobe.record.launch import Launching
from ptwprobe.record.live import Live
from ptwprobe.record.metadata import session_document
from ptwprobe.record.targets import Targets

TOTALS = ("hits", "lost", "torn", "faults", "filtered", "stray")
POLL_SECONDS = 0.02
MIN_RING_BITS, MAX_RING_BITS = 16, 30
WAITING_SECONDS = 1.0
"""How long a command's probes may wait for their objects before the user is told what that costs."""


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
            raise UsageError(
                "both processes and a command were given",
                "give either -p PID or a command after --; each probe needs a -e of its own",
            )
        for p in set(pids):
            if pids.count(p) > 1:
                raise UsageError(f"process {p} was given twice", "give each process once")
        if command and threads:
            raise UsageError("threads of a command are not known before it runs", "leave out -t, and select in script")
        for tid in threads or ():
            if process_of_thread(tid) not in pids:
                given = ", ".join(map(str, pids))
                raise UsageError(f"thread {tid} is not of process {given}", "look up the thread ids with ps -L -p PID")
        if not MIN_RING_BITS <= ring_bits <= MAX_RING_BITS:
            raise UsageError(f"a ring of {1 << ring_bits:,} bytes", "the ring takes 64 KiB to 1 GiB for each CPU")
        self.output = Path(output)
        self.choice: ChannelChoice = choose(channel)
        self.command = list(command or [])
        self.notes: list[str] = []
        self.probes: list[Probe] = []
        self.events = EventTable()
        self.refused: list[RefusedSite] = []
        self.end: End | None = None
        self._processes = [Process(p) for p in pids]
        self._threads = list(threads) if threads else None
        self._ring_bits = ring_bits
        self._on_note = on_note
        self._targets: Targets | None = None
        self._launching: Launching | None = None
        self._command: Live | None = None
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
        if self._targets is not None:
            raise UsageError("a probe was added to a session that is recording", "add all probes before start()")
        for process in self._processes:
            self._restore(process)
            plan_sites(process, [parsed], EventTable(), traced=any(map(reads_memory, self.probes)))
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
        sweep()
        plans = [(p, plan_sites(p, self.probes, self.events)) for p in self._processes]
        self._started_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        self._folder = folder.SessionFolder.create(self.output)
        try:
            targets = Targets(self._folder, sys.argv, self._ring_bits, self.note)
            self._targets = targets
            targets.recorder.keep_threads(self._threads)
            targets.recorder.start()
            if self.command:
                self._launching = Launching(targets.tracer, self.command, self.probes)
            lives = [targets.open(process) for process, _plan in plans]
            for live, (_process, plan) in zip(lives, plans, strict=True):
                self._put_in(targets, live, plan)
            for live in lives:
                targets.settle(live)
            self._write_document(targets)
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
        targets = self._targets
        if targets is None or targets.closed:
            return self.end
        if self._launching is not None:
            self._step_launch(targets, self._launching, max(1, int(seconds * 1000)))
        elif seconds > 0:
            ends = [live.pidfd for live in (*targets.live, self._command) if live is not None]
            select.select(ends, [], [], seconds)
        for live in list(targets.live):
            if live.exited():
                self._lose(targets, live, End.EXIT)
            elif live.replaced():
                self._lose(targets, live, End.EXEC)
        targets.look_at_holes()
        targets.look_at_ended()
        error = targets.recorder.stats()["error"]
        if error is not None:
            self.end = End.DISK_FULL if error[0] == "disk-full" else End.WRITE_ERROR
            self.note(f"{self.output}: {error[1]}; recording ends here")
            return self.end
        if self._command is not None and not self._command_has_ended(targets, self._command):
            return self._stop_requested
        if self._stop_requested is not None or targets.live or self._launching is not None:
            return self._stop_requested
        return self.end

    def request_stop(self, end: End = End.INTERRUPT) -> None:
        """Let ``wait`` come to an end; may be called from a signal handler."""
        self._stop_requested = end

    def stop(self) -> Totals:
        """Take the probes out, let the targets go, finish the files; the totals of the session."""
        targets = self._targets
        if targets is None or targets.closed:
            return self.totals
        if self.end is None:
            self.end = self._stop_requested or End.STOPPED
        failures = self._take_out(targets)
        if self._command is not None:
            self._command.close()
            self._command = None
        self._stats = targets.close()
        self._write_document(targets, time.clock_gettime_ns(time.CLOCK_MONOTONIC))
        if failures:
            raise failures[0]
        return self.totals

    @property
    def totals(self) -> Totals:
        """What was recorded up to now."""
        targets = self._targets
        stats = self._stats if targets is None or targets.closed else targets.recorder.stats()
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

    def _restore(self, process: Process) -> None:
        """Take out what an earlier recorder, or that of the parent before a fork, has left in ``process``."""
        if not has_ours(process):
            return
        done = restore(process)
        if done.sites or done.areas:
            self.note(f"process {process.pid} still had {done.sites} patched sites of an earlier recording: restored")
        for text in done.left:
            self.note(f"process {process.pid}: {text}")

    def _step_launch(self, targets: Targets, launching: Launching, timeout_ms: int) -> None:
        """Put in the probes whose objects the command has mapped by now."""
        try:
            for probe in launching.step(timeout_ms):
                live = targets.live[0] if targets.live else targets.open(launching.process)
                try:
                    instrumented = live.instrumented
                    windows, traced = instrumented.windows, instrumented.has_loads
                    plan = plan_sites(launching.process, [probe], self.events, windows, traced)
                except NotYetError:
                    continue
                self._put_in(targets, live, plan)
                launching.arrived(probe)
        except PtwprobeError:
            launching.kill()
            self._launching = None
            if not targets.installed:
                self._abandon()
            raise
        if launching.pending and not launching.told and launching.age() > WAITING_SECONDS:
            launching.told = True
            texts = ", ".join(f"'{probe.text}'" for probe in launching.pending)
            self.note(f"{texts} still waits for its object to be mapped; until then each system call is slower")
        if not launching.pending:
            self._launching = None
            if targets.settle(targets.live[0]):
                launching.run()
            self._write_document(targets)
        elif launching.gone:
            self._launching = None
            self._command_ended(launching)

    def _put_in(self, targets: Targets, live: Live, plan: Plan) -> None:
        targets.put_in(live, plan)
        self.refused += plan.refused
        describe_refusals(plan.refused, self.note)

    def _command_ended(self, launching: Launching) -> None:
        """The command ended while probes were still waiting for their objects."""
        self.end = End.EXIT
        for probe in launching.pending:
            self.note(f"never mapped while the command ran: {probe.text}")
        if len(launching.pending) == len(self.probes):
            self._abandon()
            raise ResolveError(
                f"{self.command[0]} never mapped what '{launching.pending[0].text}' names",
                f"it had mapped: {', '.join(sorted(launching.seen)) or 'nothing that could be probed'}",
            )

    def _lose(self, targets: Targets, live: Live, end: End) -> None:
        """The address space of ``live`` is gone."""
        self.end = end
        targets.lose(live)
        if end is End.EXEC:
            self.note(f"process {live.pid} replaced its program (exec): its probes ended there")
        if self.command:
            self._command = live
        else:
            live.close()

    def _command_has_ended(self, targets: Targets, command: Live) -> bool:
        """Whether the command, which has no probes any more, has come to its end."""
        if not command.exited():
            return False
        self.exit_status = targets.command_status(command.pid)
        command.close()
        self._command = None
        return True

    def _abandon(self) -> None:
        """Undo a session that failed before anything was recorded; its folder goes, too."""
        self.end = End.FAILED
        if self._targets is not None:
            self._take_out(self._targets)
            self._targets.close()
        if self._folder is not None:
            self._folder.remove()

    def _take_out(self, targets: Targets) -> list[PtwprobeError]:
        failures = targets.take_out()
        if self._launching is not None:
            with contextlib.suppress(TargetError):
                self._launching.run()
            self._launching = None
        return failures

    def _write_document(self, targets: Targets, ended_ns: int | None = None) -> None:
        assert self._folder is not None
        document = session_document(
            choice=self.choice,
            started_ns=self._started_ns,
            ended_ns=ended_ns,
            end=self.end.value if self.end else None,
            clock=targets.recorder.clock(),
            events=self.events,
            installed=targets.installed,
            processes=targets.described,
            threads=self._threads,
            refused=self.refused,
            stats=self._stats,
            notes=self.notes,
        )
        self._folder.write_document(document)
