"""Opens a trace: a session folder, or a perf.data by itself."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ptwprobe import _native
from ptwprobe.errors import InputError
from ptwprobe.model import Hit, Totals
from ptwprobe.trace.events import Branch, Loss, Lost, Stray, Torn, TraceError, TraceEvent
from ptwprobe.trace.native import input_errors
from ptwprobe.trace.session import NativeEvent, SessionInfo, read_session

_BATCH = 4096
_SKIP = 1 << 20


@dataclass(frozen=True)
class CodePlaces:
    """Where the code that ran is looked for, besides the session's own ``images/`` and the files that are named.

    ``root``: put in front of every path; ``caches``: folders of files by build id (perf's ``~/.debug``, debuginfod's
    cache); ``live``: processes that still run are asked for their files. ``jobs``: threads that follow the control
    flow, 0 for all CPUs.
    """

    root: Path | None = None
    caches: tuple[Path, ...] = ()
    live: bool = False
    jobs: int = 0


class Trace:
    """A recorded trace. Every iteration reads the file anew, in bounded memory.

    ``path``: the perf.data; ``session``: what ``session.json`` tells, None where there is none: then events are named
    ``id/N`` and their arguments ``arg1`` ... of type x64, and ``ip`` is the address of the stub's first word.
    """

    def __init__(self, path: Path, session: SessionInfo | None, places: CodePlaces = CodePlaces()) -> None:
        self.path = path
        self.session = session
        self.places = places
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

    def merged_reader(self) -> _native.MergedReader:
        """The native reader of everything, control flow included."""
        with input_errors(self.path):
            return _native.MergedReader(
                os.fspath(self.path),
                self.native_events,
                images=None if self.session is None else self.path.parent / "images",
                root=self.places.root,
                caches=self.places.caches,
                live=self.places.live,
                stubs=[] if self.session is None else self.session.native_stubs(),
                jobs=self.places.jobs,
            )

    def branches(self) -> Iterator[Branch]:
        """The taken branches of all threads in the order of time, those of one thread in the program's.

        InputError where the session was recorded without control flow.
        """
        self._check_flow()
        for entry in self._merged(branches=True):
            if entry[0] == "branch":
                _, ns, pid, tid, cpu, start, to, kind = entry
                yield Branch(ns, _known(pid), _known(tid), _known(cpu), start or None, to or None, kind)

    def branches_arrow(self) -> _native.ArrowStream:
        """:meth:`branches` as a stream of Arrow record batches: give it to ``pyarrow.table``, or to whatever else
        takes an object with ``__arrow_c_stream__``.

        Columns ns, pid, tid, cpu, from_addr, to_addr, kind; null is not known.
        """
        self._check_flow()
        return _native.ArrowStream.branches(self.merged_reader())

    def hits_arrow(self) -> _native.ArrowStream:
        """:meth:`hits` as a stream of Arrow record batches.

        Columns ns, pid, tid, cpu, comm, event, ip; then one for each argument, null in hits of events that do not have
        it, called ``group/name.argument`` where events have it in different types; then ``words``: the values that no
        session names.
        """
        with input_errors(self.path):
            return _native.ArrowStream.hits(os.fspath(self.path), self.native_events)

    def losses(self) -> Iterator[Loss]:
        """What is not known: hits, branches, parts of the file."""
        for entry in self._merged(branches=False):
            if entry[0] == "error":
                _, ns, _, tid, _, offset, message, word = entry
                yield Loss(ns, _known(tid), word, offset, message)
            elif entry[0] == "lost":
                yield Loss(entry[1], -1, "lost", None, f"{entry[3]} hits found no room")
            elif entry[0] == "torn":
                yield Loss(entry[1], -1, "torn", None, f"{entry[3]} hits were begun and never finished")

    def _merged(self, *, branches: bool) -> Iterator[_native._TraceEntry]:
        reader = self.merged_reader()
        while True:
            with input_errors(self.path):
                batch = reader.next_batch(_BATCH, branches)
            if not batch:
                return
            yield from batch

    def _check_flow(self) -> None:
        if self.session is not None and not self.session.has_flow:
            raise InputError(
                f"{self.path}: no control flow in it, it was recorded through channel {self.session.channel}",
                "control flow needs Intel PT: record with it, or with perf record -e intel_pt//u",
            )

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
    if entry[0] != "error":
        raise ValueError(f"no event without control flow: {entry[0]}")
    _, ns, _, tid, _, offset, message, _ = entry
    return TraceError(ns, _known(tid), offset, message)


def _known(value: int | None) -> int:
    return -1 if value is None else value


def open(
    path: str | os.PathLike[str],
    *,
    root: str | os.PathLike[str] | None = None,
    caches: Sequence[str | os.PathLike[str]] = (),
    live: bool = False,
    jobs: int = 0,
) -> Trace:
    """Opens ``path``: a session folder (``NAME.ptw``), its perf.data, or a perf.data that stands alone.

    The rest is for control flow: see :class:`CodePlaces`.
    """
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
    places = CodePlaces(Path(root) if root else None, tuple(Path(cache) for cache in caches), live, jobs)
    return Trace(perf_data, session, places)
