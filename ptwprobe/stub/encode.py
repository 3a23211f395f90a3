"""Encodings of the instructions that keystone 0.9.2 does not know: ``ptwrite``, ``rdpid``, ``endbr64``.

A template writes them like any other instruction; before keystone sees the text, each is given as ``.byte``.
Encodings are those of the Intel SDM, volume 2.
"""

from __future__ import annotations

import re

REGISTERS = (
    *("rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi"),
    *("r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15"),
)
"""The 64-bit registers in the order of their numbers."""

_MEMORY = re.compile(r"qword ptr \[(\w+) ([+-]) (\w+)\]")


def ptwrite(operand: str) -> bytes:
    """``ptwrite r/m64`` (F3 REX.W 0F AE /4).

    ``operand`` is a 64-bit register, ``qword ptr [reg + disp]`` or ``qword ptr [rip + disp]``; the displacement always
    takes four bytes, and counts from the end of the instruction where it is rip-relative.
    """
    if operand in REGISTERS:
        number = REGISTERS.index(operand)
        return bytes([0xF3, 0x48 | number >> 3, 0x0F, 0xAE, 0xE0 | number & 7])
    memory = _MEMORY.fullmatch(operand)
    if memory is None:
        raise ValueError(f"ptwrite takes no operand {operand!r}")
    base, sign, digits = memory.groups()
    displacement = int(digits, 0) * (-1 if sign == "-" else 1)
    tail = displacement.to_bytes(4, "little", signed=True)
    if base == "rip":
        return bytes([0xF3, 0x48, 0x0F, 0xAE, 0x25]) + tail
    number = REGISTERS.index(base)
    # rsp and r12 as a base need an index byte.
    index = b"\x24" if number & 7 == 4 else b""
    return bytes([0xF3, 0x48 | number >> 3, 0x0F, 0xAE, 0xA0 | number & 7]) + index + tail


def rdpid(register: str) -> bytes:
    """``rdpid r64`` (F3 0F C7 /7)."""
    number = REGISTERS.index(register)
    extension = b"\x41" if number >> 3 else b""
    return b"\xf3" + extension + bytes([0x0F, 0xC7, 0xF8 | number & 7])


def endbr64() -> bytes:
    """``endbr64`` (F3 0F 1E FA)."""
    return b"\xf3\x0f\x1e\xfa"


def expand(line: str) -> str:
    """``line`` as keystone takes it: unchanged, or ``.byte`` and the encoding."""
    mnemonic, _, operand = line.partition(" ")
    if mnemonic == "ptwrite":
        code = ptwrite(operand.strip())
    elif mnemonic == "rdpid":
        code = rdpid(operand.strip())
    elif mnemonic == "endbr64":
        code = endbr64()
    else:
        return line
    return ".byte " + ", ".join(f"{byte:#04x}" for byte in code)
