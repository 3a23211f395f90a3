"""A program of thirty bytes, the trace of a run of it and what the run did: all three made by hand.

They show that the peers and their drivers read a trace as Intel's manual has it, before they are asked about traces
that a program of ours made.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

BASE = 0x401000
CODE = bytes.fromhex(
    "90"  # 401000  nop
    "7505"  # 401001  jne 401008
    "90"  # 401003  nop
    "eb0a"  # 401004  jmp 401010
    "9090"  # 401006
    "e813000000"  # 401008  call 401020
    "ebf1"  # 40100d  jmp 401000
    "90"  # 40100f
    "ffd0"  # 401010  call *%rax
    "f3480faee0"  # 401012  ptwrite %rax
    "ebe7"  # 401017  jmp 401000
    "90909090909090"  # 401019
    "c3"  # 401020  ret
    "0f05"  # 401021  syscall
    "ebdb"  # 401023  jmp 401000
)
VALUE = 0x1122334455667788
COND, JUMP, CALL, INDIRECT_CALL, RETURN, SYSCALL, INTERRUPT, TRACE_START = 0, 1, 3, 4, 5, 6, 8, 9
PMU_TYPE, TID = 8, 100


def _ip(opcode: int, ip: int | None) -> bytes:
    """With the whole address as 48 bits, or with none."""
    return bytes([opcode]) if ip is None else bytes([opcode | 3 << 5]) + ip.to_bytes(6, "little")


def tip(ip: int) -> bytes:
    return _ip(0x0D, ip)


def pge(ip: int) -> bytes:
    return _ip(0x11, ip)


def pgd(ip: int | None = None) -> bytes:
    return _ip(0x01, ip)


def fup(ip: int) -> bytes:
    return _ip(0x1D, ip)


def tnt(bits: str) -> bytes:
    """At most six, ``T`` or ``N``, the oldest first."""
    return bytes([int("1" + bits.replace("T", "1").replace("N", "0"), 2) << 1])


def psb(tsc: int, ip: int | None = None) -> bytes:
    """PSB+, with the address at which the program is, while tracing is on."""
    mode = bytes.fromhex("9901")
    return b"\x02\x82" * 8 + b"\x19" + tsc.to_bytes(7, "little") + (mode + fup(ip) if ip else b"") + b"\x02\x23"


def ptw(value: int, ip: int) -> bytes:
    return b"\x02\xb2" + value.to_bytes(8, "little") + fup(ip)


_ROUND = [
    (0x401001, 0x401008, COND),
    (0x401008, 0x401020, CALL),
    (0x401020, 0x40100D, RETURN),
    (0x40100D, 0x401000, JUMP),
    (0x401004, 0x401010, JUMP),
    (0x401010, 0x401020, INDIRECT_CALL),
    (0x401020, 0x401012, RETURN),
    (0x401017, 0x401000, JUMP),
]


@dataclass(frozen=True)
class Handmade:
    trace: bytes
    branches: list[tuple[int, int, int]]
    hits: list[tuple[int, int, int]]
    """Branches before it, value, address."""


def handmade() -> Handmade:
    # Two rounds: a call and its compressed return, a call through a register, a PTWRITE.
    rounds = [tnt("TTN"), tip(0x401020), tnt("T"), ptw(VALUE, 0x401012)]
    rounds += [psb(2000, 0x401012 + 5), tnt("TTN"), tip(0x401020), tnt("T"), ptw(VALUE + 1, 0x401012)]
    # Interrupted before the jump at 401017, and resumed there.
    interrupted = [fup(0x401017), pgd(), pge(0x401017)]
    # The call through the register goes to a system call, behind which tracing goes on; then it ends at 401008.
    left = [tnt("N"), tip(0x401021), pgd(), pge(0x401023), tnt("T"), fup(0x401008), pgd()]
    branches = [
        (0, BASE, TRACE_START),
        *_ROUND,
        *_ROUND[:-1],
        (0x401017, 0, INTERRUPT),
        (0, 0x401017, TRACE_START),
        _ROUND[-1],
        (0x401004, 0x401010, JUMP),
        (0x401010, 0x401021, INDIRECT_CALL),
        (0x401021, 0, SYSCALL),
        (0, 0x401023, TRACE_START),
        (0x401023, 0x401000, JUMP),
        (0x401001, 0x401008, COND),
        (0x401008, 0, INTERRUPT),
    ]
    trace = b"".join([psb(1000), bytes.fromhex("9901"), pge(BASE), *rounds, *interrupted, *left])
    return Handmade(trace, branches, [(8, VALUE, 0x401012), (16, VALUE + 1, 0x401012)])


def _record(kind: int, body: bytes, misc: int = 0) -> bytes:
    return struct.pack("<IHH", kind, misc, 8 + len(body)) + body


def _named(name: str) -> bytes:
    text = name.encode() + b"\0"
    return text + b"\0" * (-len(text) % 8)


_PT, _TSC, _FUP_ON_PTW, _PTW, _BRANCH = 1, 1 << 10, 1 << 5, 1 << 12, 1 << 13
_IDENTIFIED = 1 << 16 | 1 << 1 | 1 << 2 | 1 << 7
"""sample_type: identifier, tid, time, CPU."""
_USER = 2
"""misc of records about user space."""
_SAMPLE_ID = struct.pack("<2I3Q", TID, TID, 1, 0xFFFFFFFF, 2)


def _attr(kind: int, config: int, sample_type: int, flags: int) -> bytes:
    return struct.pack("<IIQQQQQ", kind, 128, config, 1, sample_type, 0, flags).ljust(128, b"\0")


def perf_data(trace: bytes, code: Path, size: int) -> bytes:
    """One thread's trace, as ``perf record`` of one thread leaves it; ``code`` is mapped at :data:`BASE`."""
    config = _PT | _TSC | _FUP_ON_PTW | _PTW | _BRANCH
    sampled, mmap_comm = 1 << 18, 1 << 8 | 1 << 9 | 1 << 23
    attrs = [
        _attr(PMU_TYPE, config, _IDENTIFIED | 1, sampled | 1 << 5),
        _attr(1, 9, _IDENTIFIED, sampled | mmap_comm | 1 << 5),
    ]
    ids = struct.pack("<2Q", 1, 2)
    info = [PMU_TYPE, 0, 1, 0, 1, _TSC, 1 << 11, 0, 0, 0, 1 << 9, 0xF << 14, 0, 0, 1 << 1, 20, 0]
    mapped = struct.pack("<2I3Q2I2Q2I", TID, TID, BASE, size, 0, 0, 0, 0, 0, 5, 2) + _named(str(code))
    data = b"".join(
        [
            _record(70, struct.pack(f"<2I{len(info)}Q", 1, 0, *info)),
            _record(3, struct.pack("<2I", TID, TID) + _named("handmade") + _SAMPLE_ID, _USER),
            _record(10, mapped + _SAMPLE_ID, _USER),
            _record(71, struct.pack("<3Q4I", len(trace), 0, 1, 0, TID, 0xFFFFFFFF, 0)) + trace,
        ]
    )
    ids_at = 104
    attrs_at = ids_at + len(ids)
    entries = b"".join(attr + struct.pack("<2Q", ids_at + 8 * index, 8) for index, attr in enumerate(attrs))
    data_at = attrs_at + len(entries)
    header = struct.pack("<8s8Q32x", b"PERFILE2", 104, 144, attrs_at, len(entries), data_at, len(data), 0, 0)
    return header + ids + entries + data


def write(folder: Path) -> tuple[Path, Path]:
    """The perf.data and the raw trace."""
    code = folder / "code"
    page = CODE.ljust(4096, b"\x90")
    code.write_bytes(page)
    trace = handmade().trace
    (folder / "perf.data").write_bytes(perf_data(trace, code, len(page)))
    (folder / "aux").write_bytes(trace)
    return folder / "perf.data", folder / "aux"
