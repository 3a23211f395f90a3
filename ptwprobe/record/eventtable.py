"""Gives every probed site of a session its event id and its name."""

from __future__ import annotations

from ptwprobe.errors import UsageError
from ptwprobe.model import Event, EventField, Probe, Site
from ptwprobe.probe.elf import event_name

FIRST_EVENT_ID = 0x8000
"""User-space probes take ids from here up; ids of the kernel's tracefs start low."""
LAST_EVENT_ID = 0xFFFF

_Key = tuple[str, str, int, int, int]


class EventTable:
    """Events of one session; the same site in several processes is one event."""

    def __init__(self) -> None:
        self._by_key: dict[_Key, Event] = {}
        self._site_of: dict[int, Site] = {}
        self._taken: set[str] = set()

    def event_for(self, probe: Probe, site: Site) -> Event:
        """The event of ``probe`` at ``site``; made when it is new. Raises UsageError when 32,768 ids are used up."""
        obj = site.object
        key = (probe.text, obj.build_id or obj.path, obj.inode if not obj.build_id else 0, site.vaddr, obj.device)
        event = self._by_key.get(key)
        if event is None:
            event_id = FIRST_EVENT_ID + len(self._by_key)
            if event_id > LAST_EVENT_ID:
                raise UsageError(
                    f"more than {LAST_EVENT_ID - FIRST_EVENT_ID + 1} sites in one session",
                    "narrow the globs or record in several sessions",
                )
            name = event_name(probe, site, self._taken)
            self._taken.add(name)
            fields = tuple(EventField(a.name, str(a.type)) for a in probe.arguments)
            event = Event(event_id, name, probe.text, fields, {})
            self._by_key[key] = event
            self._site_of[event_id] = site
        return event

    def site_of(self, event: Event) -> Site:
        """The site (in the first process that had it) of ``event``."""
        return self._site_of[event.event_id]

    def events(self) -> list[Event]:
        """All events, by id."""
        return list(self._by_key.values())
