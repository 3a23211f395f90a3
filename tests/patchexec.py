"""Runs patched code in this process: plans sites, maps stubs, writes jumps, does work, and puts the bytes back.

    python -m tests.patchexec each LIBRARY
    python -m tests.patchexec entries LIBRARY

``each``: every instruction of LIBRARY (``tests/progs/libwork.c``) is probed, one at a time. ``entries``: all functions
of a library that Python uses are probed at once. The stubs' gate is closed; the results have to be those without a
probe. Prints ``probed N refused N wrong N``. A process of its own, as a mistake would end it.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import sqlite3
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from ptwprobe._native import CodeMap, decode
from ptwprobe.errors import RefusedError
from ptwprobe.model import (
    Argument,
    ObjectFile,
    Patch,
    Register,
    RingLayout,
    Site,
    StubForm,
    ThreadIdSource,
    TypeKind,
    ValueType,
)
from ptwprobe.patch.build import build_patch
from ptwprobe.patch.place import PAGE, AddressSpace, Allocator, read_brk_start
from ptwprobe.patch.plan import ENDBR64, entry_after_endbr, footprint, plan_window
from ptwprobe.process import Process

PROT_RWX = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
MAP_FIXED_NOREPLACE = 0x100000
PIECES = 8
ARGUMENTS = tuple(
    Argument(name, Register(name), ValueType(TypeKind.UNSIGNED, 64), f"%{name}") for name in ("rdi", "rsi")
)

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Patcher:
    """Patches one library that this process has loaded."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        process = Process(os.getpid())
        maps = [m for m in process.maps() if m.path == path]
        self.code_map = CodeMap(path)
        self.file = ObjectFile(path, path, "", 0, 0, maps[0].start)
        for mapping in maps:
            if mapping.executable and libc.mprotect(mapping.start, mapping.end - mapping.start, PROT_RWX):
                raise OSError(ctypes.get_errno(), "mprotect")
        space = AddressSpace.of(process.maps(), read_brk_start(os.getpid()), process.rlimit_stack)
        self.allocator = Allocator(space)
        self.mapped: set[int] = set()
        self.gate = mmap.mmap(-1, PAGE)
        gate = ctypes.addressof(ctypes.c_char.from_buffer(self.gate))
        self.ring = RingLayout(gate, gate, 1, 12, gate, gate, 1, ThreadIdSource.TLS_FIELD, 0x2D0, True)

    def site(self, vaddr: int, function: int) -> Site:
        return Site(self.file, "f", "f", function, 0, vaddr, vaddr, vaddr + self.file.bias, vaddr == function)

    def patch(self, vaddr: int, function: int) -> Patch:
        site = self.site(vaddr, function)
        window = plan_window(site, lambda addr, length: ctypes.string_at(addr, length), self.code_map)
        return build_patch(site, 1, ARGUMENTS, window, self.allocator, StubForm.RING, self.ring)

    def map_stub(self, patch: Patch) -> bool:
        """False if this process has mapped something there since its maps were read."""
        for page in range(patch.stub.addr // PAGE * PAGE, patch.stub.end, PAGE):
            if page in self.mapped:
                continue
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED_NOREPLACE
            if libc.mmap(page, PAGE, PROT_RWX, flags, -1, 0) != page:
                return False
            self.mapped.add(page)
        ctypes.memmove(patch.stub.addr, patch.stub.code, len(patch.stub.code))
        return True

    @contextmanager
    def installed(self, patch: Patch) -> Iterator[None]:
        assert self.map_stub(patch)
        addr = patch.window.site_addr
        assert ctypes.string_at(addr, len(patch.old)) == patch.old
        ctypes.memmove(addr, patch.new, len(patch.new))
        try:
            yield
        finally:
            ctypes.memmove(addr, patch.old, len(patch.old))


def each(path: str) -> int:
    """How many instructions changed a result when they were probed."""
    patcher = Patcher(path)
    work = patcher.library.work
    work.restype = ctypes.c_uint64
    work.argtypes = [ctypes.c_uint, ctypes.c_uint64]

    def results() -> list[int]:
        return [work(piece, seed * 0x9E3779B97F4A7C15 % (1 << 64)) for piece in range(PIECES) for seed in range(12)]

    expected = results()
    wrong = 0
    tactics: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    for start, end in patcher.code_map.functions():
        for offset, _, _ in decode(patcher.code_map.bytes(start, end - start), start):
            try:
                patch = patcher.patch(start + offset, start)
            except RefusedError as refusal:
                refusals[refusal.reason.value] += 1
                continue
            with patcher.installed(patch):
                if results() != expected:
                    wrong += 1
                    print(f"wrong: {start + offset:#x} {patch.window} {patch.new.hex()}")
            patcher.allocator.release(patch.stub.addr, len(patch.stub.code))
            tactics[patch.window.tactic.value] += 1
    report(tactics, refusals, wrong)
    return wrong


def entries(path: str) -> int:
    """1 if anything that Python does came out differently with all functions of the library probed, else 0."""
    patcher = Patcher(path)
    expected = chores()
    patches: list[Patch] = []
    tactics: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    end_of_last = 0
    for start, _ in patcher.code_map.functions():
        code = patcher.code_map.bytes(start, len(ENDBR64))
        site = entry_after_endbr(patcher.site(start, start), code)
        try:
            patch = patcher.patch(site.vaddr, start)
        except RefusedError as refusal:
            refusals[refusal.reason.value] += 1
            continue
        first, end = footprint(patch.window)
        if first < end_of_last or not patcher.map_stub(patch):
            refusals["overlap or mapped meanwhile"] += 1
            continue
        end_of_last = end
        patches.append(patch)
        tactics[patch.window.tactic.value] += 1
    for patch in patches:
        ctypes.memmove(patch.window.site_addr, patch.new, len(patch.new))
    results = chores()
    for patch in patches:
        ctypes.memmove(patch.window.site_addr, patch.old, len(patch.old))
    wrong = int(results != expected or chores() != expected)
    report(tactics, refusals, wrong)
    return wrong


def chores() -> list[object]:
    """Work in libc, libcrypto and libsqlite3 with results that are always the same."""
    out: list[object] = [
        hashlib.new(name, b"x" * 10007).hexdigest() for name in ("sha256", "sha1", "sha3_256", "blake2b")
    ]
    out.append(hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 200))
    out.append(hashlib.scrypt(b"password", salt=b"salt", n=64, r=8, p=1))
    with sqlite3.connect(":memory:") as database:
        database.execute("create table t (a, b)")
        database.executemany("insert into t values (?, ?)", [(i, str(i * i)) for i in range(2000)])
        query = "select b, count(*), sum(a) from t where a % 7 = 3 group by substr(b, 1, 2) order by 3 desc"
        out += database.execute(query).fetchall()
    database.close()
    out.append(zlib.crc32(zlib.compress(bytes(range(256)) * 500)))
    out.append([f"{i / 3:.17g} {i**0.5:e}" for i in range(50)])
    out.append(time.strftime("%A %d %B %Y", time.gmtime(86_400 * 300)))
    out.append(subprocess.run(["echo", "hello"], capture_output=True, check=True).stdout)
    return out


def report(tactics: Counter[str], refusals: Counter[str], wrong: int) -> None:
    print(dict(tactics), dict(refusals))
    print(f"probed {tactics.total()} refused {refusals.total()} wrong {wrong}")


if __name__ == "__main__":
    sys.exit({"each": each, "entries": entries}[sys.argv[1]](sys.argv[2]) != 0)
