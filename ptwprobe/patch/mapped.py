"""What a target has mapped of ours: ring, gate and room for stubs.

Responsible for the system calls that make these mappings and for the memfds behind them. All calls of a step are made
by one thread of the target in one go, while the others run on. When they come and go is decided in ``patch.install``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ptwprobe import _native
from ptwprobe.errors import TargetError
from ptwprobe.model import RingLayout, ThreadIdSource
from ptwprobe.patch.journal import Area, AreaKind
from ptwprobe.patch.memory import os_error, read
from ptwprobe.patch.remote import (
    MADV_DONTDUMP,
    MADV_WIPEONFORK,
    MAP_ANONYMOUS,
    MAP_FIXED,
    MAP_FIXED_NOREPLACE,
    MAP_PRIVATE,
    MAP_SHARED,
    MFD_ALLOW_SEALING,
    MFD_CLOEXEC,
    PAGE,
    PROT_EXEC,
    PROT_NONE,
    PROT_READ,
    PROT_WRITE,
    SYS_CLOSE,
    SYS_MADVISE,
    SYS_MEMFD_CREATE,
    SYS_MMAP,
    SYS_MUNMAP,
    Argument,
    Call,
    RemoteCallError,
    UnfinishedCallsError,
    call_remotely,
    native_errors,
    result,
    scratch,
)
from ptwprobe.process import Process

RING_NAME = "ptwprobe-ring"
"""In full ``ptwprobe-ring:PID:START``: for which process it was made, as that process sees itself, and when it started
(clock ticks since boot), so that a fork child of it can be told from it."""
STUB_NAME = "[uprobes-ptwrite]"
LOAD_GATE_OFFSET = 0x80
"""Of the load gate in the ring's header page; the layout is told in ``native/src/ring``."""
GATE_MARK = 1 << 40
"""Offset in the ring's file of the page that becomes the gate, while its place is only reserved: far behind all data,
so that the end of a reservation tells whether the gate has come."""
RECORDER_OFFSET = 0xC0
"""Same of the word that tells anybody who sees the ring that its recorder lives; a robust futex of the tracing task."""
INT3 = b"\xcc"


# Numbers of the calls of a batch: the target's new memfd, our descriptor of it, and what is mapped from it.
MEMFD, OPENED, FIRST = range(3)

_Range = tuple[int, int]
"""(address, length in bytes)"""


@dataclass(frozen=True)
class _StubSpace:
    """``length`` bytes at ``addr`` in the target, backed by ``fd`` (ours) from ``file_offset``."""

    addr: int
    length: int
    fd: int
    file_offset: int


def ring_name(made_for: tuple[int, int]) -> str:
    """The name of the ring of a process: (pid as it sees itself, start time)."""
    return f"{RING_NAME}:{made_for[0]}:{made_for[1]}"


_NO_FD = -1
"""Of stubs that another ptwprobe has written."""


def _mmap(addr: Argument, length: int, prot: int, flags: int, fd: Argument = -1, offset: int = 0) -> Call:
    return SYS_MMAP, [addr, length, prot, flags, fd, offset]


class Mapped:
    """The mappings of one target. Raises as ``patch.install.Target`` does."""

    def __init__(self, tracer: _native.Tracer, pid: int) -> None:
        self.tracer = tracer
        self.pid = pid
        self.mappings: list[tuple[int, int]] = []
        """(address, length) of everything, stubs among it."""
        self.has_files = False
        """Whether the target may have a descriptor of ours that could not be closed."""
        self.ring: _native.RingMemory | None = None
        self.ring_of: tuple[int, int] | None = None
        """For which process, as the name of the ring says it."""
        self._spaces: list[_StubSpace] = []
        self._ring_shape = (0, 0, 0)
        self._control_addr = 0
        self._data_addr = 0
        self._gate_addr = 0

    @property
    def stub_ranges(self) -> list[tuple[int, int]]:
        """[start, end) of the room for stubs."""
        return [(s.addr, s.addr + s.length) for s in self._spaces]

    def map_ring(self, rings: int, ring_bits: int) -> _native.RingMemory:
        """Give the target ``rings`` rings of ``1 << ring_bits`` bytes, and the gate page."""
        control_len, _ = _native.RingMemory.layout(rings, ring_bits)
        size = 1 << ring_bits
        span = control_len + rings * 2 * size
        process = Process(self.pid)
        self.ring_of = process.namespace_tid(self.pid), process.start_time
        read_write, in_place = PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED
        base, gate, memfd = result(FIRST), result(FIRST, span), result(MEMFD)
        # The gate's page has no name, and at first nothing else by which it is known. It is next to the ring, which has
        # a name from the first moment and tells by its offset whether the gate is there: so it goes whenever we die.
        calls = [
            ("mmap of the ring", _mmap(0, span + PAGE, PROT_NONE, MAP_PRIVATE, memfd, GATE_MARK - span)),
            ("mmap of the gate", _mmap(gate, PAGE, read_write, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED)),
            ("madvise of the gate", (SYS_MADVISE, [gate, PAGE, MADV_WIPEONFORK])),
            ("mmap of the ring", _mmap(base, control_len, read_write, in_place, memfd)),
        ]
        for i in range(rings):
            for copy in range(2):
                at = result(FIRST, control_len + (2 * i + copy) * size)
                part = _mmap(at, size, read_write, in_place, memfd, control_len + i * size)
                calls.append(("mmap of the ring", part))
        calls.append(("madvise of the ring", (SYS_MADVISE, [base, span, MADV_DONTDUMP])))
        fd, made = self._map(ring_name(self.ring_of), calls, {FIRST: span + PAGE})
        try:
            ring = _native.RingMemory(fd, rings, ring_bits)
        except _native.NativeError as error:
            self._undo(made)
            raise TargetError(f"process {self.pid}: {error.args[1]}") from error
        finally:
            os.close(fd)
        self.ring, self._ring_shape = ring, (rings, ring_bits, control_len)
        self._control_addr = made[0][0]
        self._data_addr, self._gate_addr = self._control_addr + control_len, self._control_addr + span
        self._keep([(self._control_addr, span), (self._gate_addr, PAGE)])
        with native_errors(self.pid):
            self.tracer.hold_gate(ring.recorder_ptr)
        return ring

    def ring_layout(self, thread_id: tuple[ThreadIdSource, int]) -> RingLayout:
        """The ring as stubs address it. ``map_ring`` comes before."""
        if self.ring is None:
            raise TargetError(f"process {self.pid} has no ring yet")
        rings, ring_bits, _ = self._ring_shape
        return RingLayout(
            control_addr=self._control_addr,
            data_addr=self._data_addr,
            rings=rings,
            ring_bits=ring_bits,
            gate_addr=self._gate_addr,
            load_gate_addr=self._control_addr + LOAD_GATE_OFFSET,
            load_gate_value=self.tracer.pid,
            thread_id=thread_id[0],
            thread_id_offset=thread_id[1],
            use_rdpid=_native.cpu_features()["rdpid"],
        )

    def map_stub_space(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Map page-aligned (address, length) ranges for stubs, filled with ``int3``.

        They are shared with us: we write through the file, the target can only read and execute.
        """
        if not ranges:
            return
        if any(addr % PAGE or length % PAGE or length <= 0 for addr, length in ranges):
            raise ValueError("stub ranges are whole pages")
        offsets = [sum(length for _, length in ranges[:i]) for i in range(len(ranges))]
        prot, flags = PROT_READ | PROT_EXEC, MAP_SHARED | MAP_FIXED_NOREPLACE
        calls = [
            (f"mmap of stubs at {addr:#x}", _mmap(addr, length, prot, flags, result(MEMFD), offset))
            for (addr, length), offset in zip(ranges, offsets, strict=True)
        ]
        fd, made = self._map(STUB_NAME, calls, {FIRST + i: length for i, (_, length) in enumerate(ranges)})
        try:
            _write_all(fd, INT3 * sum(length for _, length in ranges), 0)
        except BaseException:
            os.close(fd)
            self._undo(made)
            raise
        for (addr, length), offset in zip(ranges, offsets, strict=True):
            self._spaces.append(_StubSpace(addr, length, fd, offset))
        self._keep(made)

    def write_stub(self, addr: int, code: bytes) -> None:
        """Write ``code`` into mapped stub space and compare it with what the target has there."""
        inside = (s for s in self._spaces if s.addr <= addr and addr + len(code) <= s.addr + s.length)
        space = next(inside, None)
        if space is None:
            raise ValueError(f"no stub space at {addr:#x}")
        _write_all(space.fd, code, space.file_offset + addr - space.addr)
        if read(self.pid, addr, len(code)) != code:
            raise TargetError(f"process {self.pid}: the stub at {addr:#x} did not arrive")

    def write_gate(self, value: int) -> None:
        """1: stubs of this process (not those of its fork children) emit; 0: they do not."""
        if not self._gate_addr:
            return
        try:
            with Path(f"/proc/{self.pid}/mem").open("r+b", buffering=0) as memory:
                os.pwrite(memory.fileno(), value.to_bytes(4, "little"), self._gate_addr)
        except OSError as error:
            raise os_error(self.pid, "writing the gate", error) from error

    def adopt(self, areas: Sequence[Area]) -> None:
        """Take over what another ptwprobe has mapped here, to unmap it."""
        for area in areas:
            if area.kind in (AreaKind.CODE, AreaKind.ASIDE):
                continue  # what is switched comes out with the patches
            self.mappings.append((area.start, area.length))
            if area.kind is AreaKind.STUBS:
                self._spaces.append(_StubSpace(area.start, area.length, _NO_FD, 0))
            elif area.kind is AreaKind.GATE:
                self._gate_addr = area.start
        self._tell_mapped(fresh=False)

    @property
    def areas(self) -> list[Area]:
        """All of it, for the journal."""
        stubs = {(s.addr, s.length) for s in self._spaces}
        kind = {self._gate_addr: AreaKind.GATE, self._control_addr: AreaKind.RING}
        return [
            Area(AreaKind.STUBS if (addr, length) in stubs else kind.get(addr, AreaKind.RING), addr, length)
            for addr, length in self.mappings
        ]

    def unmap(self) -> list[int]:
        """Unmap everything unless a thread is in a stub or returns into one: the tids of those."""
        with native_errors(self.pid):
            return self.tracer.unmap(self.pid)

    def close_files(self) -> None:
        """Close what could not be closed before. To be called when all is unmapped."""
        if self.has_files:
            with native_errors(self.pid):
                self.tracer.close_files(self.pid)
            self.has_files = False

    def tell(self) -> None:
        """There is nothing else of ours: what was mapped for the time of a change is gone, or has found its place."""
        self._tell_mapped(fresh=True)

    def forget(self) -> None:
        """It is gone, or somebody else's now: let go of what we hold on our side."""
        with contextlib.suppress(TargetError), native_errors(self.pid):
            self.tracer.set_mapped(self.pid, [], [])
        if self.ring is not None:
            with contextlib.suppress(TargetError), native_errors(self.pid):
                self.tracer.release_gate(self.ring.recorder_ptr)
        for fd in {s.fd for s in self._spaces} - {_NO_FD}:
            os.close(fd)
        self._spaces.clear()
        self.mappings.clear()
        self.ring = None
        self._gate_addr = 0

    def _map(self, name: str, calls: list[tuple[str, Call]], lengths: dict[int, int]) -> tuple[int, list[_Range]]:
        """Execute ``calls``, of which the first has the number FIRST, over a new memfd, by one thread of the target.

        ``lengths``: bytes of the mappings that the calls of these numbers make. All of them stay, or none. Returns our
        descriptor of the memfd (the target keeps none), and the mappings.
        """
        create: Call = (SYS_MEMFD_CREATE, [scratch(), MFD_CLOEXEC | MFD_ALLOW_SEALING])
        opened: Call = (_native.OPEN_HERE, [result(MEMFD)])
        close: Call = (SYS_CLOSE, [result(MEMFD)])
        batch = [("memfd_create", create), ("opening the new memfd", opened), *calls, ("close", close)]
        try:
            results = call_remotely(self.tracer, self.pid, batch, name.encode() + b"\0")
        except (RemoteCallError, UnfinishedCallsError) as error:
            done = error.results
            if len(done) > OPENED:
                os.close(done[OPENED])
            undo = [(done[i], length) for i, length in lengths.items() if i < len(done)]
            self._undo(undo, done[:OPENED])
            raise
        return results[OPENED], [(results[i], length) for i, length in lengths.items()]

    def _undo(self, made: list[_Range], files: Sequence[int] = ()) -> None:
        """Unmap what was mapped, and close the target's ``files``, on the way out of an error."""
        undo: list[tuple[str, Call]] = [("close", (SYS_CLOSE, [fd])) for fd in files]
        undo += [("munmap", (SYS_MUNMAP, [addr, length])) for addr, length in made]
        if undo:
            try:
                call_remotely(self.tracer, self.pid, undo)
            except TargetError as error:
                self.remember_left(error, made, len(files))

    def remember_left(self, error: TargetError, places: Sequence[_Range], files: int) -> None:
        """``files`` were to be closed, then ``places`` unmapped, when ``error`` came: the rest of it goes later."""
        done = len(error.results) if isinstance(error, (RemoteCallError, UnfinishedCallsError)) else 0
        self.has_files |= done < files
        self.mappings += places[max(done - files, 0) :]
        with contextlib.suppress(TargetError):
            self.tell()

    def _keep(self, made: list[_Range]) -> None:
        self.mappings += made
        self._tell_mapped(fresh=True)

    def _tell_mapped(self, fresh: bool) -> None:
        """Let the tracer know what there is, so that it goes even if we are killed."""
        stubs = [(s.addr, s.length) for s in self._spaces]
        with native_errors(self.pid):
            self.tracer.set_mapped(self.pid, stubs, [m for m in self.mappings if m not in stubs], fresh)


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
