"""The contents of session.json: what a reader needs to know that perf.data has no place for."""

from __future__ import annotations

import platform
import socket
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ptwprobe.model import Event, Patch, Site
from ptwprobe.record.channel import ChannelChoice
from ptwprobe.record.eventtable import EventTable
from ptwprobe.record.instrument import RefusedSite
from ptwprobe.stub.straight import straight_end

FORMAT_VERSION = 1


def tool_version() -> str:
    """``ptwprobe X.Y.Z``."""
    try:
        return f"ptwprobe {version('ptwprobe')}"
    except PackageNotFoundError:
        return "ptwprobe (not installed)"


def cpu_model() -> str:
    """The CPU's name as the kernel shows it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def session_document(
    *,
    choice: ChannelChoice,
    started_ns: int,
    ended_ns: int | None,
    end: str | None,
    clock: tuple[int, int, int, int],
    events: EventTable,
    installed: Mapping[int, Sequence[Patch]],
    processes: Sequence[Mapping[str, Any]],
    threads: Sequence[int] | None,
    refused: Sequence[RefusedSite],
    stats: Mapping[str, Any],
    notes: Sequence[str],
) -> dict[str, Any]:
    """The document for ``session.json``.

    ``installed``: the patches by pid; ``clock``: (shift, mult, zero, tsc_hz) as in perf's TIME_CONV; times in ns.
    """
    shift, mult, zero, tsc_hz = clock
    patches_of: dict[int, list[tuple[int, Patch]]] = defaultdict(list)
    for pid, patches in installed.items():
        for patch in patches:
            patches_of[patch.event_id].append((pid, patch))
    return {
        "version": FORMAT_VERSION,
        "tool": tool_version(),
        "channel": choice.name,
        "channel_reason": choice.reason,
        "started_ns": started_ns,
        "ended_ns": ended_ns,
        "end": end,
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "cpu": cpu_model(),
        "clock": {"shift": shift, "mult": mult, "zero": zero, "tsc_hz": tsc_hz},
        "events": [_event(event, events.site_of(event), patches_of[event.event_id]) for event in events.events()],
        "processes": list(processes),
        "threads": list(threads) if threads else None,
        "refused": [
            {
                "probe": r.probe.text,
                "function": r.site.function,
                "vaddr": r.site.vaddr,
                "reason": r.error.reason.value,
                "message": r.error.message,
            }
            for r in refused
        ],
        "totals": {key: stats[key] for key in ("hits", "lost", "torn", "faults", "filtered", "stray")},
        "notes": list(notes),
    }


def _event(event: Event, site: Site, patches: Sequence[tuple[int, Patch]]) -> dict[str, Any]:
    return {
        "id": event.event_id,
        "event": event.event,
        "probe": event.probe,
        "fields": [{"name": f.name, "type": f.type} for f in event.fields],
        "object": {"path": site.object.path, "build_id": site.object.build_id},
        "function": site.function,
        "vaddr": site.vaddr,
        "file_offset": site.file_offset,
        "sites": [
            {
                "pid": pid,
                "addr": patch.site.runtime_addr,
                "stub": patch.stub.addr,
                "stub_end": patch.stub.end,
                "continue": patch.window.continue_addr,
                "resume": straight_end(patch.stub),
                "tactic": patch.window.tactic.value,
                "slots": list(patch.stub.slot_addrs),
            }
            for pid, patch in patches
        ],
    }
