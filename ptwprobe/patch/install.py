"""One target process: what we map into it, the changes of its code, and leaving it as it was.

Responsible for the order map → write stubs → patch → open the gate, and back. Which bytes change is decided in
``patch.plan``; stopping threads and writing is native (``_native.Tracer``). Every call leaves the target running.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ptwprobe import _native
from ptwprobe.errors import RefusalReason, RefusedError, TargetError, TargetGoneError
from ptwprobe.model import Patch, RingLayout, ThreadIdSource
from ptwprobe.patch import threadid, timestamp
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
    UnmappedError,
    call_remotely,
    error_of,
    native_errors,
    result,
    scratch,
)
from ptwprobe.process import Process

RING_NAME = "ptwprobe-ring"
STUB_NAME = "[uprobes-ptwrite]"
LOAD_GATE_OFFSET = 0x80
"""Of the load gate in the ring's header page; the layout is told in ``native/src/ring``."""
INT3 = b"\xcc"
LEAVE_SECONDS = 1.0
"""How long ``leave`` tries to stop a busy target, and waits for threads to come out of the stubs."""


@dataclass(frozen=True)
class _StubSpace:
    """``length`` bytes at ``addr`` in the target, backed by ``fd`` (ours) from ``file_offset``."""

    addr: int
    length: int
    fd: int
    file_offset: int


def _mmap(addr: Argument, length: int, prot: int, flags: int, fd: int = -1, offset: int = 0) -> Call:
    return SYS_MMAP, [addr, length, prot, flags, fd, offset]


class Target:
    """A process with our mappings and patches in it.

    The target runs untraced unless ``attach`` or ``watch`` was called; a change attaches for its own duration. All
    methods raise TargetGoneError when the process is not there any more, PermissionDeniedError, RefusedError (nothing
    was changed), or another TargetError.
    """

    def __init__(self, tracer: _native.Tracer, pid: int) -> None:
        self.tracer = tracer
        self.pid = pid
        self.notes: list[str] = []
        """What a user should know after ``leave``: mappings and patches that had to stay, probes that ended before."""
        self._mappings: list[tuple[int, int]] = []
        self._spaces: list[_StubSpace] = []
        self._ring: _native.RingMemory | None = None
        self._ring_shape = (0, 0, 0)
        self._control_addr = 0
        self._data_addr = 0
        self._gate_addr = 0
        self._load_gate_held = False
        self._thread_id: tuple[ThreadIdSource, int] | None = None
        self._patches: list[Patch] = []

    # ------------------------------------------------------------ tracing

    def attach(self) -> None:
        """Take all threads under trace; they run on. Events of the process are told by the tracer from now on."""
        with native_errors(self.pid):
            self.tracer.attach(self.pid)

    def release(self) -> None:
        """End tracing; what is mapped and patched stays. Loads through pointers are closed before."""
        self._close_load_gate()
        with native_errors(self.pid):
            self.tracer.detach(self.pid)

    def watch(self, loads: Iterable[tuple[int, int, int]]) -> None:
        """Catch faults of the stubs' loads (``Stub.loads``) and open the load gate."""
        with native_errors(self.pid):
            self.tracer.watch(self.pid, list(loads))
            if self._ring is not None:
                self.tracer.hold_gate(self._ring.load_gate_ptr)
                self._load_gate_held = True

    def _close_load_gate(self) -> None:
        if self._load_gate_held and self._ring is not None:
            self._load_gate_held = False
            with native_errors(self.pid):
                self.tracer.release_gate(self._ring.load_gate_ptr)

    # ------------------------------------------------------------ mapping

    def create_memfd(self, name: str) -> tuple[int, int]:
        """A memfd of the target, sealable, closed on exec: (our descriptor, the target's). The caller closes both."""
        flags = MFD_CLOEXEC | MFD_ALLOW_SEALING
        call: Call = (SYS_MEMFD_CREATE, [scratch(), flags])
        remote_fd = call_remotely(self.tracer, self.pid, [("memfd_create", call)], name.encode() + b"\0")[0]
        try:
            return os.open(f"/proc/{self.pid}/fd/{remote_fd}", os.O_RDWR | os.O_CLOEXEC), remote_fd
        except OSError as error:
            self._close_remote(remote_fd)
            raise self._os_error("opening the new memfd", error) from error

    def map_ring(self, rings: int, ring_bits: int) -> _native.RingMemory:
        """Give the target ``rings`` rings of ``1 << ring_bits`` bytes, and the gate page; all in one stop.

        Raises RefusedError (seccomp, tsc-disabled), before anything is mapped, for a target that may not read the time
        stamp counter.
        """
        timestamp.require(self.tracer, self.pid)
        control_len, _ = _native.RingMemory.layout(rings, ring_bits)
        size = 1 << ring_bits
        span = control_len + rings * 2 * size
        fd, remote_fd = self.create_memfd(RING_NAME)
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
        self._ring, self._ring_shape = ring, (rings, ring_bits, control_len)
        self._control_addr, self._data_addr, self._gate_addr = base, base + control_len, gate
        self._tell_mapped()
        return ring

    def ring_layout(self) -> RingLayout:
        """The ring as stubs address it. ``map_ring`` comes before."""
        if self._ring is None:
            raise TargetError(f"process {self.pid} has no ring yet")
        if self._thread_id is None:
            self._thread_id = self.find_thread_id_offset()
        rings, ring_bits, _ = self._ring_shape
        return RingLayout(
            control_addr=self._control_addr,
            data_addr=self._data_addr,
            rings=rings,
            ring_bits=ring_bits,
            gate_addr=self._gate_addr,
            load_gate_addr=self._control_addr + LOAD_GATE_OFFSET,
            load_gate_value=self.tracer.pid,
            thread_id=self._thread_id[0],
            thread_id_offset=self._thread_id[1],
            use_rdpid=_native.cpu_features()["rdpid"],
        )

    def find_thread_id_offset(self) -> tuple[ThreadIdSource, int]:
        """Where every thread's own tid stands in its thread-local storage; FS_BASE where there is no such place."""
        with native_errors(self.pid):
            return threadid.find(self.tracer, self.pid)

    @staticmethod
    def known_thread_id_offset(tracer: _native.Tracer, process: Process) -> int | None:
        """The offset of a libc we know, if every thread of ``process`` has its tid there now."""
        with native_errors(process.pid):
            return threadid.find_known(tracer, process.pid)

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
        if self._read(addr, len(code)) != code:
            raise TargetError(f"process {self.pid}: the stub at {addr:#x} did not arrive")

    # ------------------------------------------------------------ emitting

    def open_gate(self) -> None:
        """Let the stubs of this process (not those of its fork children) emit."""
        self._write_gate(1)

    def close_gate(self) -> None:
        """Stubs only execute the displaced instructions from now on."""
        self._write_gate(0)

    def _write_gate(self, value: int) -> None:
        if not self._gate_addr:
            return
        try:
            with Path(f"/proc/{self.pid}/mem").open("r+b", buffering=0) as memory:
                os.pwrite(memory.fileno(), value.to_bytes(4, "little"), self._gate_addr)
        except OSError as error:
            raise self._os_error("writing the gate", error) from error

    # ------------------------------------------------------------ patching

    def apply(self, patches: Sequence[Patch]) -> int:
        """Put all patches in, or none; returns the ns that the target stood still.

        Raises UnmappedError where an object was unloaded, as ``undo`` does.
        """
        if not patches:
            return 0
        sites = [
            (p.site.runtime_addr, p.old, p.new, len(p.window.displaced), list(p.stub.displaced_map)) for p in patches
        ]
        with _changing(self.pid, patches):
            stood = self.tracer.apply(self.pid, sites)
        self._patches += patches
        return stood

    def undo(self, patches: Sequence[Patch]) -> int:
        """Take all patches out, or none; returns the ns that the target stood still. The stubs stay."""
        if not patches:
            return 0
        none: list[tuple[int, int]] = []
        sites = [(p.site.runtime_addr, p.new, p.old, len(p.window.displaced), none) for p in patches]
        with _changing(self.pid, patches):
            stood = self.tracer.apply(self.pid, sites)
        undone = {id(p) for p in patches}
        self._patches = [p for p in self._patches if id(p) not in undone]
        return stood

    def stubs_are_empty(self) -> bool:
        """Whether no thread is in a stub, nor any stack or signal frame refers to one."""
        ranges = [(s.addr, s.addr + s.length) for s in self._spaces]
        if not ranges:
            return True
        with native_errors(self.pid):
            return not self.tracer.threads_in_ranges(self.pid, ranges)

    # ------------------------------------------------------------ leaving

    def leave(self) -> bool:
        """Take everything out and end tracing. False where mappings (or patches) had to stay; ``notes`` says why."""
        self.notes.clear()
        try:
            self.close_gate()
            self._close_load_gate()
            clean = self._undo_all() and self._unmap_all()
            self.release()
        except TargetGoneError:
            self.forget()
            raise
        self.forget()
        return clean

    def _undo_all(self) -> bool:
        deadline = time.monotonic() + LEAVE_SECONDS
        while True:
            self._drop_unloaded()
            try:
                self.undo(self._patches)
                return True
            except (RefusedError, UnmappedError) as error:
                if isinstance(error, RefusedError) and error.reason is RefusalReason.FOREIGN_PROBE:
                    break
                if time.monotonic() > deadline:
                    raise
        # Somebody changed one of our sites: the others still come out.
        for patch in list(self._patches):
            try:
                self.undo([patch])
            except (RefusedError, UnmappedError) as error:
                self.notes.append(f"{_place(patch)} stays: {error.message}")
        return not self._patches

    def _drop_unloaded(self) -> None:
        """A patch whose object was unloaded is undone already, also when it was loaded again to the same place."""
        for patch in list(self._patches):
            addr = patch.site.runtime_addr
            try:
                with Path(f"/proc/{self.pid}/mem").open("rb", buffering=0) as memory:
                    found = os.pread(memory.fileno(), len(patch.old), addr)
            except OSError as error:
                if error.errno != errno.EIO:
                    raise self._os_error(f"reading {addr:#x}", error) from error
                found = patch.old
            if found == patch.old:
                self._patches.remove(patch)
                self.notes.append(f"process {self.pid}: {_place(patch)} ended when its object was unloaded")

    def _unmap_all(self) -> bool:
        deadline = time.monotonic() + LEAVE_SECONDS
        while inside := self._unmap():
            if time.monotonic() > deadline:
                where = ", ".join(f"{addr:#x}" for addr, _ in self._mappings)
                who = ", ".join(str(tid) for tid in inside)
                self.notes.append(
                    f"process {self.pid}: stubs and ring stay mapped (at {where}), since a thread is still inside a"
                    f" stub or returns into one: {who}"
                )
                return False
            time.sleep(0.01)
        return True

    def _unmap(self) -> list[int]:
        with native_errors(self.pid):
            return self.tracer.unmap(self.pid)

    def _tell_mapped(self) -> None:
        """Let the tracer know what there is, so that it goes even if we are killed."""
        stubs = [(s.addr, s.length) for s in self._spaces]
        with native_errors(self.pid):
            self.tracer.set_mapped(self.pid, stubs, [m for m in self._mappings if m not in stubs])

    def forget(self) -> None:
        """The process, or its address space, is gone, or we are done with it: let go of what we hold on our side."""
        with contextlib.suppress(TargetError):
            self._close_load_gate()
        with contextlib.suppress(TargetError), native_errors(self.pid):
            self.tracer.set_mapped(self.pid, [], [])
        for fd in {s.fd for s in self._spaces}:
            os.close(fd)
        self._spaces.clear()
        self._mappings.clear()
        self._patches.clear()
        self._ring = None
        self._gate_addr = 0

    # ------------------------------------------------------------ helpers

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
        self._mappings += [(results[i], n) for i, n in lengths.items()]
        return results

    def _close_remote(self, remote_fd: int) -> None:
        """Close a descriptor in the target, if that can be done; it is on the way out of an error."""
        with contextlib.suppress(TargetError):
            call_remotely(self.tracer, self.pid, [("close", (SYS_CLOSE, [remote_fd]))])

    def _read(self, addr: int, size: int) -> bytes:
        try:
            with Path(f"/proc/{self.pid}/mem").open("rb", buffering=0) as memory:
                return os.pread(memory.fileno(), size, addr)
        except OSError as error:
            raise self._os_error(f"reading {addr:#x}", error) from error

    def _os_error(self, what: str, error: OSError) -> TargetError:
        if isinstance(error, (FileNotFoundError, ProcessLookupError)) or not Path(f"/proc/{self.pid}").exists():
            return TargetGoneError(f"process {self.pid} is gone")
        return TargetError(f"process {self.pid}: {what}: {error.strerror}")


def _place(patch: Patch) -> str:
    return f"the probe in {patch.site.object.path} at {patch.site.runtime_addr:#x}"


@contextlib.contextmanager
def _changing(pid: int, patches: Sequence[Patch]) -> Iterator[None]:
    """As ``native_errors``; names the object that is not mapped any more."""
    try:
        yield
    except _native.NativeError as error:
        kind, _, addr = error.args
        gone = next((p for p in patches if kind == "unmapped" and p.site.runtime_addr == addr), None)
        if gone is None:
            raise error_of(error, pid) from error
        raise UnmappedError(
            f"process {pid} unloaded {gone.site.object.path} with the site at {addr:#x}",
            "probe it while it stays loaded",
        ) from error


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
