"""Opens a trace: a session folder, or a perf.data by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ptwprobe import _native
from ptwprobe.errors import InputError
from ptwprobe.model import Hit, Totals
from ptwprobe.trace.events import Lost, Stray, Torn, TraceError, TraceEvent
from ptwprobe.trace.native import input_errors
from ptwprobe.trace.session import NativeEvent, SessionInfo, read_session

_BATCH = 4096
_SKIP = 1 << 20


class Trace:
    """A recorded trace. Every iteration reads the file anew, in bounded memory.

    ``path``: the perf.data; ``session``: what ``session.json`` tells, None where there is none: then events are named
    ``id/N`` and their arguments ``arg1`` ... of type x64, and ``ip`` is the address of the stub's first word.
    """

    def __init__(self, path: Path, session: SessionInfo | None) -> None:
        self.path = path
        self.session = session
        self._live: _native.TraceReader | None = None

    @property
    def native_events(self) -> list[NativeEvent]:
        """What the native readers need to know of the session."""
        return [] if self.session is None else self.session.native_events()

    def hits(self) -> Iterator[Hit]:
        """The hits in the order of time."""
        for event in self.events():
            if isinstance(event, Hit):
                yield event

    def events(self) -> Iterator[TraceEvent]:
        """Hits, and in their place what was lost, stray or wrong."""
        with input_errors(self.path):
            reader = _native.TraceReader(os.fspath(self.path), self.native_events)
        while True:
            with input_errors(self.path):
                batch = reader.next_batch(_BATCH)
            if not batch:
                return
            for entry in batch:
                yield to_event(entry)

    def new_events(self, maximum: int = _BATCH) -> list[TraceEvent]:
        """For a session that is still being recorded: up to ``maximum`` events since the last call, or since the start.

        Empty where there are none yet; what the recorder has begun comes once it is finished.
        """
        with input_errors(self.path):
            if self._live is None:
                self._live = _native.TraceReader(os.fspath(self.path), self.native_events, follow=True)
            return [to_event(entry) for entry in self._live.next_batch(maximum)]

    def new_hits(self, maximum: int = _BATCH) -> list[Hit]:
        """The hits of :meth:`new_events`, without the rest."""
        while events := self.new_events(maximum):
            hits = [event for event in events if isinstance(event, Hit)]
            if hits:
                return hits
        return []

    def totals(self) -> Totals:
        """Counts the whole trace."""
        with input_errors(self.path):
            reader = _native.TraceReader(os.fspath(self.path), self.native_events)
            while reader.skip(_SKIP):
                pass
            return Totals(*reader.totals())


def to_event(entry: _native._TraceEntry) -> TraceEvent:
    """A native entry as its type."""
    if entry[0] == "hit":
        _, ns, pid, tid, cpu, comm, event, ip, args = entry
        return Hit(_known(ns), _known(pid), _known(tid), _known(cpu), comm, event, ip, args)
    if entry[0] == "stray":
        _, ns, pid, tid, cpu, comm, stray_ip, value = entry
        return Stray(ns, _known(pid), _known(tid), _known(cpu), comm, stray_ip, value)
    if entry[0] == "lost":
        return Lost(entry[1], _known(entry[2]), entry[3])
    if entry[0] == "torn":
        return Torn(entry[1], _known(entry[2]), entry[3])
    _, ns, _, tid, _, offset, message = entry
    return TraceError(ns, _known(tid), offset, message)


def _known(value: int | None) -> int:
    return -1 if value is None else value


def open(path: str | os.PathLike[str]) -> Trace:
    """Opens ``path``: a session folder (``NAME.ptw``), its perf.data, or a perf.data that stands alone."""
    given = Path(path)
    perf_data = given / "perf.data" if given.is_dir() else given
    if not perf_data.exists():
        hint = "a session folder holds a perf.data" if given.is_dir() else ""
        raise InputError(f"{perf_data}: no such file", hint)
    described = perf_data.parent / "session.json"
    # A perf.data of another name beside a session.json is not that session's.
    session = read_session(described) if perf_data.name == "perf.data" and described.exists() else None
    with input_errors(perf_data):
        _native.TraceReader(os.fspath(perf_data), [])
    return Trace(perf_data, session)
