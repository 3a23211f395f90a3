"""perf.data files record by record, by the layout of ``linux/perf_event.h``: written by Python on its own, so that the
reader is not tested against our writer. Stock perf reads them as well."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

from tests.synth import MULT, SHIFT, ZERO, ns_of

PMU_TYPE = 8
TRACEPOINT_TYPE = 2
SAMPLE_IP, SAMPLE_TID, SAMPLE_TIME, SAMPLE_CPU, SAMPLE_RAW = 1, 1 << 1, 1 << 2, 1 << 7, 1 << 10
SAMPLE_IDENTIFIER, SAMPLE_AUX = 1 << 16, 1 << 20
SAMPLE_ID = SAMPLE_IP | SAMPLE_TID | SAMPLE_TIME | SAMPLE_CPU | SAMPLE_IDENTIFIER
MMAP, COMM, SAMPLE, MMAP2, ITRACE_START, SWITCH, SWITCH_CPU_WIDE = 1, 3, 9, 10, 12, 14, 15
HEADER_ATTR, FINISHED_ROUND, AUXTRACE_INFO, AUXTRACE, COMPRESSED = 64, 68, 70, 71, 81
OUT = 1 << 13
NONE = 0xFFFFFFFF

PT_ID, DUMMY_ID, EXTRA_ID = 1, 2, 3


def attr(kind: int, config: int, sample_type: int, flags: int) -> bytes:
    """A ``perf_event_attr`` of 128 bytes."""
    return struct.pack("<IIQQQQQ", kind, 128, config, 1, sample_type, 0, flags).ljust(128, b"\0")


def record(kind: int, payload: bytes, misc: int = 0) -> bytes:
    return struct.pack("<IHH", kind, misc, 8 + len(payload)) + payload


@dataclass
class PerfBuild:
    """A file with the PT event, a dummy event for the sideband, and ``extra`` (an attribute of one more event)."""

    per_cpu: bool = False
    snapshot: bool = False
    switches: int = 0
    extra: bytes | None = None
    parts: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        words = [PMU_TYPE, SHIFT, MULT, ZERO, 1, 1 << 10, 1 << 11, self.switches, self.snapshot, self.per_cpu]
        words += [1 << 9, 0xF << 14, 168, 2, 2, 24, 0, 0]
        self.parts.append(record(AUXTRACE_INFO, struct.pack("<II18Q", 1, 0, *words)))

    def kernel(self, kind: int, payload: bytes, pid: int, tid: int, time: int, cpu: int = 0, misc: int = 0) -> None:
        """A record of the kernel's at TSC ``time``, with the dummy event's sample id."""
        sample_id = struct.pack("<IIQIIQ", pid, tid, ns_of(time), cpu, 0, DUMMY_ID)
        self.parts.append(record(kind, payload + sample_id, misc))

    def comm(self, pid: int, tid: int, name: bytes, time: int) -> None:
        self.kernel(COMM, struct.pack("<II", pid, tid) + name.ljust(16, b"\0"), pid, tid, time)

    def switch_cpu_wide(self, cpu: int, time: int, prev: tuple[int, int], next_: tuple[int, int]) -> None:
        """Out and in; threads are (pid, tid)."""
        self.kernel(SWITCH_CPU_WIDE, struct.pack("<II", *next_), *prev, time, cpu, OUT)
        self.kernel(SWITCH_CPU_WIDE, struct.pack("<II", *prev), *next_, time, cpu)

    def aux(self, data: bytes, time: int, *, tid: int | None = None, cpu: int | None = None, offset: int = 0) -> None:
        key = (cpu if cpu is not None else tid) or 0
        tid, cpu = NONE if tid is None else tid, NONE if cpu is None else cpu
        payload = struct.pack("<QQQIIII", len(data), offset, time, key, tid, cpu, 0)
        self.parts.append(record(AUXTRACE, payload) + data)

    def sample(self, rest: bytes, pid: int, tid: int, time: int, cpu: int) -> None:
        """A sample of the extra event with ``rest`` behind its cpu."""
        head = struct.pack("<QQIIQII", EXTRA_ID, 0x401000, pid, tid, ns_of(time), cpu, 0)
        self.parts.append(record(SAMPLE, head + rest))

    def round(self) -> None:
        self.parts.append(record(FINISHED_ROUND, b""))

    def _attrs(self) -> list[bytes]:
        common = 1 | 1 << 5 | 1 << 6 | 1 << 18
        sideband = 1 << 8 | 1 << 9 | 1 << 13 | 1 << 23 | 1 << 24 | 1 << 26
        attrs = [
            attr(PMU_TYPE, 1 | 1 << 5 | 1 << 10 | 1 << 12, SAMPLE_ID, common),
            attr(1, 9, SAMPLE_ID, common | sideband),
        ]
        return attrs + ([self.extra] if self.extra is not None else [])

    def write(self, path: Path) -> Path:
        """As a file that perf wrote itself."""
        attrs = self._attrs()
        ids_at = 104
        attrs_at = ids_at + 8 * len(attrs)
        data_at = attrs_at + 144 * len(attrs)
        data = b"".join(self.parts)
        head = struct.pack("<8sQQQQQQ", b"PERFILE2", 104, 144, attrs_at, 144 * len(attrs), data_at, len(data))
        ids = b"".join(struct.pack("<Q", 1 + index) for index in range(len(attrs)))
        entries = b"".join(each + struct.pack("<QQ", ids_at + 8 * index, 8) for index, each in enumerate(attrs))
        path.write_bytes(head.ljust(104, b"\0") + ids + entries + data)
        return path

    def write_pipe(self, path: Path) -> Path:
        """As ``perf record -o - > path`` leaves it."""
        attrs = [record(HEADER_ATTR, each + struct.pack("<Q", 1 + index)) for index, each in enumerate(self._attrs())]
        path.write_bytes(struct.pack("<8sQ", b"PERFILE2", 16) + b"".join(attrs) + b"".join(self.parts))
        return path
