"""The session's own description, ``session.json``: parsed and checked. A trace is hostile input, this file included."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from ptwprobe.errors import InputError
from ptwprobe.model import EventField, Totals

VERSION = 1
_MAX_BYTES = 1 << 26
_U16 = (1 << 16) - 1
_U32 = (1 << 32) - 1
_U64 = (1 << 64) - 1
_TYPES = frozenset(f"{kind}{bits}" for kind in "usx" for bits in (8, 16, 32, 64))

NativeStub: TypeAlias = tuple[int, int, int, int, int]
NativeEvent: TypeAlias = tuple[int, str, list[tuple[str, str]], list[tuple[int, int, list[int]]]]


@dataclass(frozen=True)
class SessionSite:
    """Where an event was installed in process ``pid``; all but the numbers of bytes are runtime addresses.

    ``resume_addr``: where flow goes on behind a stub whose code is not known; 0: branches of the stub have a say in it.
    ``slots``: the address that stands for each word on the wire, header first.
    """

    pid: int
    addr: int
    stub: int
    stub_end: int
    continue_addr: int
    resume_addr: int
    tactic: str
    slots: tuple[int, ...]


@dataclass(frozen=True)
class SessionEvent:
    """One probe's event. ``event`` is ``group/name``, ``probe`` the text the user gave."""

    event_id: int
    event: str
    probe: str
    fields: tuple[EventField, ...]
    object_path: str
    build_id: str
    function: str
    vaddr: int
    file_offset: int
    sites: tuple[SessionSite, ...]


@dataclass(frozen=True)
class SessionProcess:
    pid: int
    comm: str
    exe: str
    cmdline: tuple[str, ...]


@dataclass(frozen=True)
class SessionInfo:
    """What the recorder knew. Times in ns of CLOCK_MONOTONIC; ``end`` says why the session ended ("" where it did not).

    ``threads``: the tids whose hits were kept, None for all. ``faults``: values that could not be loaded.
    """

    tool: str
    channel: str
    channel_reason: str
    started_ns: int
    ended_ns: int
    end: str
    host: str
    kernel: str
    cpu: str
    tsc_hz: int
    events: tuple[SessionEvent, ...]
    processes: tuple[SessionProcess, ...]
    threads: tuple[int, ...] | None
    totals: Totals
    faults: int
    notes: tuple[str, ...]

    def native_events(self) -> list[NativeEvent]:
        """The events as the native reader takes them."""
        return [
            (
                event.event_id,
                event.event,
                [(field.name, field.type) for field in event.fields],
                [(site.pid, site.addr, list(site.slots)) for site in event.sites],
            )
            for event in self.events
        ]

    @property
    def has_flow(self) -> bool:
        """Whether control flow was recorded, as far as the channel tells."""
        return self.channel not in ("ring", "uprobe")

    def native_stubs(self) -> list[NativeStub]:
        """Process, start, end, site and where flow goes on (0: unknown), of every stub."""
        sites = (site for event in self.events for site in event.sites)
        return [(site.pid, site.stub, site.stub_end, site.addr, site.resume_addr) for site in sites]


class _Object:
    """A JSON object whose members are asked for by type; ``place`` names it in errors."""

    def __init__(self, value: object, path: Path, place: str) -> None:
        if not isinstance(value, dict):
            raise InputError(f"{path}: {place or 'the file'} is not an object")
        self._members: dict[str, Any] = value
        self._path = path
        self._place = place

    def _at(self, name: str) -> str:
        return f"{self._place}.{name}" if self._place else name

    def text(self, name: str) -> str:
        value = self._members.get(name)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise InputError(f"{self._path}: {self._at(name)} is not a string")
        # A lone surrogate is no text that any output could write.
        return value.encode("utf-8", "backslashreplace").decode("utf-8")

    def number(self, name: str, maximum: int = _U64, *, required: bool = False) -> int:
        value = self._members.get(name)
        if value is None and not required:
            return 0
        return self._checked(value, self._at(name), maximum)

    def _checked(self, value: object, place: str, maximum: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= maximum:
            raise InputError(f"{self._path}: {place} is not an integer from 0 to {maximum}")
        return value

    def numbers(self, name: str, maximum: int) -> tuple[int, ...]:
        items = self._list(name)
        return tuple(self._checked(item, f"{self._at(name)}[{i}]", maximum) for i, item in enumerate(items))

    def texts(self, name: str) -> tuple[str, ...]:
        items = self._list(name)
        return tuple(_Object({"": item}, self._path, f"{self._at(name)}[{i}]").text("") for i, item in enumerate(items))

    def object(self, name: str) -> _Object:
        value = self._members.get(name)
        return _Object({} if value is None else value, self._path, self._at(name))

    def objects(self, name: str) -> list[_Object]:
        return [_Object(item, self._path, f"{self._at(name)}[{i}]") for i, item in enumerate(self._list(name))]

    def _list(self, name: str) -> list[Any]:
        value = self._members.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise InputError(f"{self._path}: {self._at(name)} is not a list")
        return value

    def has(self, name: str) -> bool:
        return self._members.get(name) is not None

    def fail(self, name: str, message: str) -> InputError:
        return InputError(f"{self._path}: {self._at(name)} {message}")


def read_session(path: Path) -> SessionInfo:
    """Parses ``session.json`` at ``path``; InputError with the place where it is not what it should be."""
    try:
        # A pipe that nobody writes to must not be waited for.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as e:
        raise InputError(f"{path}: {e.strerror}") from e
    if len(data) > _MAX_BYTES:
        raise InputError(f"{path}: larger than {_MAX_BYTES} bytes")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise InputError(f"{path}: not JSON: {e}", "perf.data beside it can be opened by itself") from e
    root = _Object(value, path, "")
    version = root.number("version", required=True)
    if version != VERSION:
        raise InputError(
            f"{path}: version {version}, this ptwprobe reads {VERSION}", "use the ptwprobe that recorded it"
        )
    totals = root.object("totals")
    return SessionInfo(
        tool=root.text("tool"),
        channel=root.text("channel"),
        channel_reason=root.text("channel_reason"),
        started_ns=root.number("started_ns"),
        ended_ns=root.number("ended_ns"),
        end=root.text("end"),
        host=root.text("host"),
        kernel=root.text("kernel"),
        cpu=root.text("cpu"),
        tsc_hz=root.object("clock").number("tsc_hz"),
        events=_unique(tuple(_event(item) for item in root.objects("events")), root),
        processes=tuple(
            SessionProcess(item.number("pid", _U32), item.text("comm"), item.text("exe"), item.texts("cmdline"))
            for item in root.objects("processes")
        ),
        threads=root.numbers("threads", _U32) if root.has("threads") else None,
        totals=Totals(hits=totals.number("hits"), lost=totals.number("lost"), torn=totals.number("torn")),
        faults=totals.number("faults"),
        notes=root.texts("notes"),
    )


def _unique(events: tuple[SessionEvent, ...], root: _Object) -> tuple[SessionEvent, ...]:
    seen: set[int] = set()
    for event in events:
        if event.event_id in seen:
            raise root.fail("events", f"has the id {event.event_id} twice")
        seen.add(event.event_id)
    return events


def _event(item: _Object) -> SessionEvent:
    name = item.text("event")
    if not name:
        raise item.fail("event", "is missing")
    obj = item.object("object")
    fields = tuple(_field(field) for field in item.objects("fields"))
    if len({field.name for field in fields}) != len(fields):
        raise item.fail("fields", "has a name twice")
    return SessionEvent(
        event_id=item.number("id", _U16, required=True),
        event=name,
        probe=item.text("probe"),
        fields=fields,
        object_path=obj.text("path"),
        build_id=obj.text("build_id"),
        function=item.text("function"),
        vaddr=item.number("vaddr"),
        file_offset=item.number("file_offset"),
        sites=tuple(_site(site) for site in item.objects("sites")),
    )


def _field(item: _Object) -> EventField:
    field = EventField(item.text("name"), item.text("type"))
    if not field.name:
        raise item.fail("name", "is missing")
    if field.type not in _TYPES:
        raise item.fail("type", f"is not an integer type: {field.type!r}")
    return field


def _site(item: _Object) -> SessionSite:
    return SessionSite(
        pid=item.number("pid", _U32, required=True),
        addr=item.number("addr", required=True),
        stub=item.number("stub"),
        stub_end=item.number("stub_end"),
        continue_addr=item.number("continue"),
        resume_addr=item.number("resume" if item.has("resume") else "continue"),
        tactic=item.text("tactic"),
        slots=item.numbers("slots", _U64),
    )
