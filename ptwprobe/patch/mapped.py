"""What a target has mapped of ours: ring, gate and room for stubs.

Responsible for the system calls that make these mappings, all of a step in one stop, and for the memfds behind them.
When they come and go is decided in ``patch.install``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ptwprobe import _native
from ptwprobe.errors import RefusedError, TargetError
from ptwprobe.model import RingLayout, ThreadIdSource
from ptwprobe.patch import timestamp
from ptwprobe.patch.journal import Area, AreaKind
from ptwprobe.patch.memory import os_error, read
from ptwprobe.patch.remote import (
    MADV_DONTDUMP,
    MADV_WIPEONFORK,
    MAP_ANONYMOUS,
    MAP_FIXED,
    MAP_FIXED_NOREPLACE,
    MAP_NORESERVE,
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
RECORDER_OFFSET = 0xC0
"""Same of the word that tells anybody who sees the ring that its recorder lives; a robust futex of the tracing task."""
INT3 = b"\xcc"


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


def _mmap(addr: Argument, length: int, prot: int, flags: int, fd: int = -1, offset: int = 0) -> Call:
    return SYS_MMAP, [addr, length, prot, flags, fd, offset]


class Mapped:
    """The mappings of one target. Raises as ``patch.install.Target`` does."""

    def __init__(self, tracer: _native.Tracer, pid: int) -> None:
        self.tracer = tracer
        self.pid = pid
        self.mappings: list[tuple[int, int]] = []
        """(address, length) of everything, stubs among it."""
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

    def create_memfd(self, name: str) -> tuple[int, int]:
        """A memfd of the target, sealable, closed on exec: (our descriptor, the target's). The caller closes both."""
        flags = MFD_CLOEXEC | MFD_ALLOW_SEALING
        call: Call = (SYS_MEMFD_CREATE, [scratch(), flags])
        remote_fd = call_remotely(self.tracer, self.pid, [("memfd_create", call)], name.encode() + b"\0")[0]
        try:
            return os.open(f"/proc/{self.pid}/fd/{remote_fd}", os.O_RDWR | os.O_CLOEXEC), remote_fd
        except OSError as error:
            self._close_remote(remote_fd)
            raise os_error(self.pid, "opening the new memfd", error) from error

    def map_ring(self, rings: int, ring_bits: int) -> _native.RingMemory:
        """Give the target ``rings`` rings of ``1 << ring_bits`` bytes, and the gate page; all in one stop.

        Raises RefusedError (seccomp, tsc-disabled), before anything is mapped, for a target that may not read the time
        stamp counter.
        """
        timestamp.require(self.tracer, self.pid)
        control_len, _ = _native.RingMemory.layout(rings, ring_bits)
        size = 1 << ring_bits
        span = control_len + rings * 2 * size
        process = Process(self.pid)
        self.ring_of = process.namespace_tid(self.pid), process.start_time
        fd, remote_fd = self.create_memfd(ring_name(self.ring_of))
        read_write = PROT_READ | PROT_WRITE
        try:
            ring = _native.RingMemory(fd, rings, ring_bits)
            calls = [
                ("mmap of the ring", _mmap(0, span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)),
                ("mmap of the gate", _mmap(0, PAGE, read_write, MAP_PRIVATE | MAP_ANONYMOUS)),
                ("madvise of the gate", (SYS_MADVISE, [result(1), PAGE, MADV_WIPEONFORK])),
                ("mmap of the ring", _mmap(result(0), control_len, read_write, MAP_SHARED | MAP_FIXED, remote_fd)),
            ]
            for i in range(rings):
                for copy in range(2):
                    at = result(0, control_len + (2 * i + copy) * size)
                    part = _mmap(at, size, read_write, MAP_SHARED | MAP_FIXED, remote_fd, control_len + i * size)
                    calls.append(("mmap of the ring", part))
            calls.append(("madvise of the ring", (SYS_MADVISE, [result(0), span, MADV_DONTDUMP])))
            base, gate, *_ = self._map_or_undo(calls, {0: span, 1: PAGE}, remote_fd)
        except _native.NativeError as error:
            self._close_remote(remote_fd)
            raise TargetError(f"process {self.pid}: {error.args[1]}") from error
        finally:
            os.close(fd)
        self.ring, self._ring_shape = ring, (rings, ring_bits, control_len)
        self._control_addr, self._data_addr, self._gate_addr = base, base + control_len, gate
        self._tell_mapped()
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
        """Map page-aligned (address, length) ranges for stubs, all in one stop, filled with ``int3``.

        They are shared with us: we write through the file, the target can only read and execute.
        """
        if not ranges:
            return
        if any(addr % PAGE or length % PAGE or length <= 0 for addr, length in ranges):
            raise ValueError("stub ranges are whole pages")
        fd, remote_fd = self.create_memfd(STUB_NAME)
        try:
            offsets = [sum(length for _, length in ranges[:i]) for i in range(len(ranges))]
            total = sum(length for _, length in ranges)
            _write_all(fd, INT3 * total, 0)
            flags = MAP_SHARED | MAP_FIXED_NOREPLACE
            calls = [
                (f"mmap of stubs at {addr:#x}", _mmap(addr, length, PROT_READ | PROT_EXEC, flags, remote_fd, offset))
                for (addr, length), offset in zip(ranges, offsets, strict=True)
            ]
            self._map_or_undo(calls, {i: length for i, (_, length) in enumerate(ranges)}, remote_fd)
        except BaseException:
            os.close(fd)
            raise
        for (addr, length), offset in zip(ranges, offsets, strict=True):
            self._spaces.append(_StubSpace(addr, length, fd, offset))
        self._tell_mapped()

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
            self.mappings.append((area.start, area.length))
            if area.kind is AreaKind.STUBS:
                self._spaces.append(_StubSpace(area.start, area.length, _NO_FD, 0))
            elif area.kind is AreaKind.GATE:
                self._gate_addr = area.start
        self._tell_mapped()

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

    def _tell_mapped(self) -> None:
        """Let the tracer know what there is, so that it goes even if we are killed."""
        stubs = [(s.addr, s.length) for s in self._spaces]
        with native_errors(self.pid):
            self.tracer.set_mapped(self.pid, stubs, [m for m in self.mappings if m not in stubs])

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

    def _map_or_undo(self, calls: list[tuple[str, Call]], lengths: dict[int, int], remote_fd: int) -> list[int]:
        """Execute ``calls`` and close ``remote_fd``, all in one stop.

        ``lengths``: bytes of the mappings that the calls of these indices make. All of them stay, or none.
        """
        try:
            results = call_remotely(self.tracer, self.pid, [*calls, ("close", (SYS_CLOSE, [remote_fd]))])
        except RemoteCallError as error:
            made = [(error.results[i], n) for i, n in lengths.items() if i < len(error.results)]
            undo: list[tuple[str, Call]] = [("munmap", (SYS_MUNMAP, [addr, length])) for addr, length in made]
            call_remotely(self.tracer, self.pid, [*undo, ("close", (SYS_CLOSE, [remote_fd]))])
            raise
        except RefusedError:
            self._close_remote(remote_fd)
            raise
        self.mappings += [(results[i], n) for i, n in lengths.items()]
        return results

    def _close_remote(self, remote_fd: int) -> None:
        """Close a descriptor in the target, if that can be done; it is on the way out of an error."""
        with contextlib.suppress(TargetError):
            call_remotely(self.tracer, self.pid, [("close", (SYS_CLOSE, [remote_fd]))])


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
