"""Code that a test writes, and what the walk makes of packets over it."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ptwprobe import _native

KINDS = (
    "cond jump ijump call icall return syscall farreturn interrupt start end abort far".replace("ijump", "indirect")
).split()
BASE = 0x400000
STUB = 0x7F0000001000


@dataclass(frozen=True)
class Program:
    """Assembled code; its labels are attributes."""

    start: int
    code: bytes
    labels: dict[str, int]

    def __getattr__(self, name: str) -> int:
        try:
            return self.labels[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def region(self) -> tuple[int, bytes]:
        return self.start, self.code


Assemble = Callable[..., Program]


def assembled(folder: Path, source: str, start: int = BASE) -> Program:
    """``source``: Intel syntax with labels."""
    text = f".intel_syntax noprefix\n.globl _start\n_start:\n{source}\n"
    commands = (
        ["as", "-o", "code.o"],
        ["ld", "-e", "_start", f"-Ttext={start:#x}", "-o", "code.elf", "code.o"],
        ["objcopy", "-O", "binary", "-j", ".text", "code.elf", "code.bin"],
    )
    for command in commands:
        subprocess.run(command, cwd=folder, input=text, text=True, check=True, capture_output=True)
    names = subprocess.run(["nm", "code.elf"], cwd=folder, text=True, check=True, capture_output=True).stdout
    labels = {name: int(address, 16) for address, _, name in map(str.split, names.splitlines())}
    return Program(start, (folder / "code.bin").read_bytes(), labels)


@dataclass(frozen=True)
class Walked:
    branches: list[tuple[int, int, str]]
    marks: list[tuple[int, int, int, str, str, int | None]]

    @property
    def words(self) -> list[tuple[int, int, int | None]]:
        """(branches before it, value, address)"""
        return [(at, int(value), ip) for at, _, _, kind, value, ip in self.marks if kind == "word"]

    @property
    def errors(self) -> list[str]:
        return [value for _, _, _, kind, value, _ in self.marks if kind in ("error", "overflow", "missing")]

    @property
    def soft(self) -> list[str]:
        return [value for _, _, _, kind, value, _ in self.marks if kind == "soft"]


def walk(
    packets: bytes,
    *programs: Program,
    stubs: Sequence[tuple[int, int, int, int]] = (),
    compressed_returns: bool = True,
    cpu: str = "",
) -> Walked:
    regions = [program.region for program in programs]
    data, marks = _native.walk(packets, regions, list(stubs), compressed_returns=compressed_returns, cpu=cpu)
    branches = [(source, to, KINDS[kind]) for source, to, kind in struct.iter_unpack("<QQQ", data)]
    return Walked(branches, marks)


LOOP = """
top:    dec eax
again:  jnz top
        jmp out
        nop
out:    call f
back:   test eax, eax
either: je  first
        nop
first:  jmp rax
f:      nop
leave:  ret
other:  nop
done:   syscall
after:  nop
"""

SITE = """
f:      push rbx
        dec eax
again:  jnz f
        jmp site
        int3
site:   nop dword ptr [rax+rax*1+0]
on:     test eax, eax
last:   jz f
        ret
"""
