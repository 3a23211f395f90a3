"""Builds sessions as a recorder leaves them, for tests of everything that reads one.

The packets here are written by Python on its own, so that a reader is not tested against its own writer; whole hits
come from the recorder's encoder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ptwprobe._native import TraceWriter

PSB = bytes.fromhex("0282") * 8
PSBEND = bytes.fromhex("0223")
OVF = bytes.fromhex("02f3")
MAGIC = 0x5054525731

SHIFT, MULT, ZERO = 20, 1 << 19, 1_000_000
"""A counter of 2 GHz, with factors that are exact."""


def ns_of(tsc: int) -> int:
    """ns of CLOCK_MONOTONIC at ``tsc`` in every session built here."""
    return ZERO + tsc // 2


def header_word(event_id: int, nargs: int) -> int:
    return event_id << 48 | nargs << 40 | MAGIC


def tsc(value: int) -> bytes:
    return b"\x19" + (value & ((1 << 56) - 1)).to_bytes(7, "little")


def ptw(value: int, ip: int | None = None) -> bytes:
    """An 8-byte PTW and, with ``ip``, its FUP with a full address."""
    if ip is None:
        return b"\x02\x32" + value.to_bytes(8, "little")
    return b"\x02\xb2" + value.to_bytes(8, "little") + b"\xdd" + ip.to_bytes(8, "little")


def chunk(time: int, *packets: bytes) -> bytes:
    """PSB+ at TSC ``time``, then the packets."""
    return PSB + tsc(time) + PSBEND + b"".join(packets)


@dataclass(frozen=True)
class SynthEvent:
    """An event with ``fields`` as (name, type), installed once in process ``pid`` at ``addr``."""

    event_id: int
    event: str
    fields: tuple[tuple[str, str], ...] = ()
    pid: int = 100
    addr: int = 0x401000
    stub: int = 0x7F0000001000

    @property
    def slots(self) -> list[int]:
        """One address per word, header first."""
        return [self.stub + 16 * index for index in range(1 + len(self.fields))]


@dataclass
class Session:
    """A session in ``folder``: hits gather by thread and go into one chunk each at the end of a round."""

    folder: Path
    events: Sequence[SynthEvent] = ()
    describe: bool = True
    _hits: dict[tuple[int, int], list[tuple[int, list[int], int, list[int]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.perf_data = self.folder / "perf.data"
        self.writer = TraceWriter(str(self.perf_data), SHIFT, MULT, ZERO)
        if self.describe:
            (self.folder / "session.json").write_text(json.dumps(self.description()))

    def description(self) -> dict[str, object]:
        """What ``session.json`` says."""
        return {
            "version": 1,
            "tool": "ptwprobe 0.1.0",
            "channel": "ring",
            "channel_reason": "no intel_pt PMU",
            "started_ns": ZERO,
            "ended_ns": None,
            "end": None,
            "clock": {"shift": SHIFT, "mult": MULT, "zero": ZERO, "tsc_hz": 2_000_000_000},
            "events": [
                {
                    "id": event.event_id,
                    "event": event.event,
                    "probe": event.event,
                    "fields": [{"name": name, "type": type_} for name, type_ in event.fields],
                    "object": {"path": "/bin/prog", "build_id": "00"},
                    "function": "f",
                    "vaddr": 0x1000,
                    "file_offset": 0x1000,
                    "sites": [{"pid": event.pid, "addr": event.addr, "tactic": "nop", "slots": event.slots}],
                }
                for event in self.events
            ],
            "processes": [{"pid": 100, "comm": "prog", "exe": "/bin/prog", "cmdline": ["prog", "-x"]}],
            "threads": None,
            "totals": {"hits": 0, "lost": 0, "torn": 0, "faults": 0},
            "notes": [],
        }

    def hit(self, tid: int, event: SynthEvent, time: int, *args: int) -> None:
        """A hit of thread ``tid`` at TSC ``time``; ``args`` are 64-bit words."""
        words = (time, event.slots, header_word(event.event_id, len(args)), list(args))
        self._hits.setdefault((tid, event.pid), []).append(words)

    def raw(self, tid: int, data: bytes, time: int) -> None:
        """A chunk of packets as they are."""
        self.writer.auxtrace(tid, 100, data, time)

    def round(self) -> None:
        """Writes the hits gathered so far and ends the round."""
        for (tid, pid), hits in self._hits.items():
            self.writer.hits(tid, pid, hits)
        self._hits.clear()
        self.writer.finished_round()
        self.writer.flush()

    def finish(self) -> Path:
        """Ends the round and the file; the folder."""
        self.round()
        self.writer.finish(SHIFT, MULT, ZERO, "0.1.0", ["ptwprobe", "record"])
        return self.folder


SIZES = SynthEvent(0x8000, "libc/malloc", (("size", "u64"), ("flags", "x32"), ("delta", "s8")))
BARE = SynthEvent(0x8001, "prog/tick", (), addr=0x402000, stub=0x7F0000002000)


def small_session(folder: Path) -> Path:
    """Two threads, two rounds, and one of everything that can be wrong."""
    session = Session(folder, [SIZES, BARE])
    writer = session.writer
    writer.comm(100, 100, b"prog", ns_of(1_000))
    writer.comm(100, 101, b'wo"rk,\x1b[1m\xff', ns_of(1_000))
    writer.switch_in(100, 100, 0, ns_of(2_000))
    writer.switch_in(100, 101, 1, ns_of(2_000))
    session.hit(100, SIZES, 2_000, 64, 0x1_0000_00FF, 0xFF)
    session.hit(101, SIZES, 2_500, 2**53 + 1, 0, 0x7F)
    session.hit(100, BARE, 3_000)
    writer.lost(5, 1, ns_of(2_800))
    writer.torn(1, 0, ns_of(2_900))
    session.round()
    writer.switch_in(100, 100, 1, ns_of(4_000))
    session.hit(100, SIZES, 4_000, 2**53, 1, 0x80)
    slots = SIZES.slots
    session.raw(
        101,
        chunk(
            5_000,
            ptw(header_word(SIZES.event_id, 3), slots[0]),
            ptw(1, slots[1]),
            ptw(3, slots[3]),
            tsc(5_200),
            ptw(0xDEAD, 0x405000),
            OVF,
            tsc(5_400),
            ptw(header_word(BARE.event_id, 0), BARE.slots[0]),
            b"\x02\xff",
        ),
        5_000,
    )
    return session.finish()
