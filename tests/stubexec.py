"""Executes stubs in a child process of the test: ``tests/progs/libstubhost.c`` with Python around it.

A stub that goes wrong kills the child, not the tests. :func:`isolated` runs a test's body there.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import resource
import struct
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ptwprobe import _native
from ptwprobe.model import Argument, Fetch, RingLayout, Stub, StubForm, StubRequest, ThreadIdSource, TypeKind, ValueType
from ptwprobe.stub.assemble import assemble
from ptwprobe.stub.encode import REGISTERS

EVENT_ID = 0x8001
NOP5 = b"\x0f\x1f\x44\x00\x00"
CPU_SECONDS = 20
"""What a test's child may use before it counts as hung."""

STATUS_FLAGS = 0x8D5
"""CF, PF, AF, ZF, SF, OF."""
DIRECTION_FLAG = 0x400


def isolated(body: Callable[..., None]) -> Callable[..., None]:
    """Runs the test in a forked child and fails with what it wrote, or with the signal that killed it."""

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> None:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 0
            os.close(reading)
            resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
            try:
                body(*args, **kwargs)
            except BaseException:
                os.write(writing, traceback.format_exc().encode()[-60000:])
                code = 1
            os._exit(code)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            report = pipe.read()
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0, report or f"the child ended with {status:#x}"

    return run


def argument(fetch: Fetch, type: str = "u64") -> Argument:
    return Argument("value", fetch, ValueType(TypeKind(type[0]), int(type[1:])), "")


class State(ctypes.Structure):
    """``struct state``: what a thread has in its registers and in the 128 bytes below its stack pointer."""

    _fields_ = (
        ("gpr", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_uint64),
        ("unused", ctypes.c_uint64),
        ("xmm", ctypes.c_uint8 * 256),
        ("red", ctypes.c_uint8 * 128),
    )

    def __getitem__(self, register: str) -> int:
        return int(self.gpr[REGISTERS.index(register)])

    def __setitem__(self, register: str, value: int) -> None:
        self.gpr[REGISTERS.index(register)] = value


class CRing(ctypes.Structure):
    _fields_ = (
        ("control", ctypes.c_uint64),
        ("data", ctypes.c_uint64),
        ("gate", ctypes.c_uint64),
        ("rings", ctypes.c_uint32),
        ("bits", ctypes.c_uint32),
    )


@dataclass(frozen=True)
class Record:
    stamp: int
    tsc: int
    thread: int
    event_id: int
    faults: int
    words: tuple[int, ...]


class Ring:
    """A ring that this process writes and reads."""

    def __init__(self, host: Host, rings: int, bits: int, start_mark: int) -> None:
        self.host = host
        self.c = CRing()
        self.start_mark = start_mark
        assert host.lib.ring_new(ctypes.byref(self.c), rings, bits, ctypes.c_uint64(start_mark)) == 0

    def layout(self, **changes: Any) -> RingLayout:
        features = _native.cpu_features()
        values: dict[str, Any] = {
            "control_addr": self.c.control,
            "data_addr": self.c.data,
            "rings": self.c.rings,
            "ring_bits": self.c.bits,
            "gate_addr": self.c.gate,
            "load_gate_addr": self.c.control + 0x80,
            "load_gate_value": 0x1234,
            "thread_id": ThreadIdSource.TLS_FIELD,
            "thread_id_offset": self.host.lib.tid_offset(),
            "use_rdpid": features["rdpid"],
        }
        return RingLayout(**{**values, **changes})

    def open_gate(self, is_open: bool) -> None:
        ctypes.c_uint32.from_address(self.c.gate).value = is_open

    def open_load_gate(self, value: int = 0x1234) -> None:
        ctypes.c_uint32.from_address(self.c.control + 0x80).value = value

    @property
    def lost(self) -> int:
        return int(self.host.lib.ring_lost(ctypes.byref(self.c)))

    @property
    def lost_no_ring(self) -> int:
        return ctypes.c_uint64.from_address(self.c.control + 0x40).value

    def head(self, ring: int) -> int:
        return ctypes.c_uint64.from_address(self.c.control + 0x1000 + ring * 0x100).value

    def records(self) -> list[Record]:
        """All records of all rings since the start; checks every stamp and that they fill the ring up to its head."""
        found = []
        for ring in range(self.c.rings):
            mark = self.start_mark
            while mark != self.head(ring):
                place = self.c.data + (ring << self.c.bits + 1) + (mark & (1 << self.c.bits) - 1)
                stamp, tsc, thread, event, faults = struct.unpack("<QQQII", ctypes.string_at(place, 32))
                count = event >> 16
                words = struct.unpack(f"<{count}Q", ctypes.string_at(place + 32, 8 * count))
                assert stamp == mark, (hex(stamp), hex(mark))
                found.append(Record(stamp, tsc, thread, event & 0xFFFF, faults, words))
                mark = (mark + (1 << 40) + 32 + 8 * count) % (1 << 64)
        return found


class Host:
    """The child's code pages and the C functions that run what is in them."""

    def __init__(self, library: Path) -> None:
        self.lib = ctypes.CDLL(str(library), use_errno=False)
        for name in ("ring_lost", "hammer", "hammer_signals", "timed", "stub_entry_rsp", "tsc_now"):
            getattr(self.lib, name).restype = ctypes.c_uint64
        self.lib.tid_offset.restype = ctypes.c_long
        self.lib.reader_start.restype = ctypes.c_void_p
        self.pages = mmap.mmap(-1, 1 << 20, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self.addr = ctypes.addressof(ctypes.c_char.from_buffer(self.pages))
        self.landing = ctypes.cast(self.lib.stub_landing, ctypes.c_void_p).value
        self._next = 0

    def ring(self, rings: int = os.cpu_count() or 1, bits: int = 16, start_mark: int = 0xABCD << 48 | 5 << 20) -> Ring:
        return Ring(self, rings, bits, start_mark)

    def write(self, code: bytes) -> int:
        """Puts code into the next free place and returns its address."""
        start = self._next
        self.pages[start : start + len(code)] = code
        self._next = (start + len(code) + 63) & ~63
        return self.addr + start

    def install(
        self,
        arguments: tuple[Argument, ...],
        ring: RingLayout | None,
        *,
        form: StubForm = StubForm.RING,
        displaced: bytes = NOP5,
        behind: bytes | None = None,
        paced: bool = True,
    ) -> Stub:
        """A site that starts with ``displaced`` and goes on with ``behind`` (else back to the caller), probed."""
        if behind is None:
            behind = b"\xff\x25\x00\x00\x00\x00" + struct.pack("<Q", self.landing)
        site = self.write(displaced + behind)
        stub_addr = self.addr + self._next
        request = StubRequest(
            form, EVENT_ID, arguments, stub_addr, site, displaced, site + len(displaced), paced=paced, ring=ring
        )
        stub = assemble(request)
        assert self.write(stub.code) == stub_addr
        self.patch(stub, True)
        return stub

    def patch(self, stub: Stub, is_patched: bool) -> None:
        """Puts the jump to the stub into the site, or the original bytes."""
        site = stub.request.site_addr
        jump = b"\xe9" + struct.pack("<i", stub.addr - site - 5)
        self.pages[site - self.addr : site - self.addr + 5] = jump if is_patched else stub.request.displaced[:5]

    def run(self, stub: Stub, state: State) -> State:
        """Enters the site with ``state``; the state at the landing."""
        out = State()
        self.lib.stub_run(ctypes.c_void_p(stub.request.site_addr), ctypes.byref(state), ctypes.byref(out))
        return out

    @property
    def entry_rsp(self) -> int:
        """The stack pointer at the site of the last run."""
        return int(self.lib.stub_entry_rsp())

    def catch_faults(self, stub: Stub) -> None:
        """From now on a fault in a load of ``stub`` goes on at its fix-up, as the tracer would do it."""
        words = [word for load in stub.loads for word in load]
        self._loads = (ctypes.c_uint64 * len(words))(*words)
        self.lib.catch_faults(self._loads, len(stub.loads))


class Reader:
    """A thread that drains a ring all the time; ``stop`` gives (records read, records that were wrong)."""

    def __init__(self, ring: Ring, pause_us: int = 0, cpu: int = -1) -> None:
        self._lib = ring.host.lib
        self._reader = self._lib.reader_start(ctypes.byref(ring.c), pause_us, cpu)

    def stop(self) -> tuple[int, int]:
        read, wrong = ctypes.c_uint64(), ctypes.c_uint64()
        self._lib.reader_stop(ctypes.c_void_p(self._reader), ctypes.byref(read), ctypes.byref(wrong))
        return read.value, wrong.value
