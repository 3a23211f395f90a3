"""How a stub gets at a value: straight from a register, from the stub's own frame, as a constant, or through pointers.

A word is always 64 bits: a narrower value is zero- or sign-extended by its type. A register that the stub uses itself
is read from its slot in the frame, and the stack pointer is what it was at the site.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import StubError
from ..model import Argument, Constant, Fetch, Memory, Register, StubForm, TypeKind, ValueType
from .encode import REGISTERS
from .layout import Layout
from .template import pattern

MASK64 = (1 << 64) - 1

JUMP_SIZE = 5
"""Bytes of a ``jmp rel32``."""
LOWEST_POINTER = 0x10000
"""Nothing is mapped below it (vm.mmap_min_addr), so that no load there is tried."""

PARTS: dict[str, dict[int, str]] = {
    "rax": {64: "rax", 32: "eax", 16: "ax", 8: "al"},
    "rcx": {64: "rcx", 32: "ecx", 16: "cx", 8: "cl"},
    "rdx": {64: "rdx", 32: "edx", 16: "dx", 8: "dl"},
    "rbx": {64: "rbx", 32: "ebx", 16: "bx", 8: "bl"},
    **{f"r{x}": {64: f"r{x}", 32: f"e{x}", 16: x, 8: f"{x}l"} for x in ("sp", "bp", "si", "di")},
    **{f"r{n}": {64: f"r{n}", 32: f"r{n}d", 16: f"r{n}w", 8: f"r{n}b"} for n in range(8, 16)},
}
"""64-bit register → the names of its low parts by width in bits."""

WIDTHS = {8: "byte", 16: "word", 32: "dword", 64: "qword"}


@dataclass(frozen=True)
class Frame:
    """Where a form's enter template puts the registers that it uses.

    ``size``: bytes by which the stack pointer is lower than at the site (red zone included); ``slots``: saved register
    → its offset from the stack pointer; ``scratch``: holds addresses while rax holds the value.
    """

    size: int
    slots: dict[str, int]
    scratch: str


FRAMES = {
    StubForm.RING: Frame(168, {"rax": 0, "rdx": 8, "r10": 16, "r11": 24}, "rdx"),
    StubForm.PT: Frame(144, {"rax": 0, "rcx": 8}, "rcx"),
}

U64 = ValueType(TypeKind.UNSIGNED, 64)


def move_texts(type: ValueType) -> dict[str, str]:
    """The move that extends a value of ``type`` into rax: mnemonic and destination."""
    if type.bits == 64:
        return {"move": "mov", "to": "rax"}
    if type.kind is TypeKind.SIGNED:
        return {"move": "movsxd" if type.bits == 32 else "movsx", "to": "rax"}
    return {"move": "mov" if type.bits == 32 else "movzx", "to": "eax"}


def load_texts(type: ValueType, base: str) -> dict[str, str]:
    return {**move_texts(type), "width": WIDTHS[type.bits], "base": base}


def extend(value: int, type: ValueType) -> int:
    """``value`` cut to ``type`` and extended to 64 bits, unsigned."""
    value &= (1 << type.bits) - 1
    if type.kind is TypeKind.SIGNED and value >> (type.bits - 1):
        value |= MASK64 ^ ((1 << type.bits) - 1)
    return value


def known(fetch: Fetch, site_addr: int) -> int | None:
    """The value of a fetch that is the same at every hit, else None."""
    if isinstance(fetch, Constant):
        return fetch.value & MASK64
    if fetch == Register("rip"):
        return site_addr
    return None


def check(argument: Argument) -> None:
    """Refuses what no stub can fetch."""
    fetch = argument.fetch
    while isinstance(fetch, Memory):
        fetch = fetch.base
    if isinstance(fetch, Register) and fetch.name not in (*REGISTERS, "rip"):
        raise StubError(f"argument {argument.name}: no register %{fetch.name}", "use a 64-bit general register")
    if argument.type.bits not in WIDTHS:
        raise StubError(f"argument {argument.name}: no type of {argument.type.bits} bits")


def has_load(argument: Argument) -> bool:
    return isinstance(argument.fetch, Memory)


class ValueCode:
    """Writes the code that fetches values into a layout.

    ``loads`` collects what may fault: start, end, label of the fix-up.

    ``load_gate``: the values of the test that stands before each load.
    """

    def __init__(self, layout: Layout, form: StubForm, site_addr: int, load_gate: dict[str, int]) -> None:
        self.loads: list[tuple[int, int, str]] = []
        self._layout = layout
        self._form = form
        self._frame = FRAMES[form]
        self._site_addr = site_addr
        self._load_gate = load_gate

    def fetch(self, argument: Argument, fault_label: str) -> str:
        """Code that leaves the argument's word in the register that is returned."""
        fetch, type = argument.fetch, argument.type
        value = known(fetch, self._site_addr)
        if value is not None:
            self._layout.add("value_constant", value=extend(value, type))
        elif isinstance(fetch, Memory):
            self._load(fetch, type, fault_label)
        elif isinstance(fetch, Register):
            return self._register(fetch.name, type)
        return "rax"

    def _register(self, name: str, type: ValueType) -> str:
        slot = self._frame.slots.get(name)
        if slot is not None:
            self._layout.add("load", load_texts(type, "rsp"), offset=slot)
            return "rax"
        if name == "rsp":
            self._layout.add("value_stack", frame=self._frame.size)
            name = "rax"
        if type.bits == 64:
            return name
        self._layout.add("value_narrow", {**move_texts(type), "part": PARTS[name][type.bits]})
        return "rax"

    def _load(self, memory: Memory, type: ValueType, fault_label: str) -> None:
        base, offset = self._pointer(memory.base, memory.offset, fault_label)
        if not -(1 << 31) <= offset < 1 << 31:
            self._layout.add("far_address", {"base": base, "scratch": self._frame.scratch}, offset=offset & MASK64)
            base, offset = "rax", 0
        load_label = f"load {len(self.loads)}"
        if self._form is StubForm.RING:
            if base != "rsp" and offset - LOWEST_POINTER >= -(1 << 31):
                self._layout.add("ring_pointer", {"base": base}, below=offset - LOWEST_POINTER, fault=fault_label)
            self._layout.add("ring_load_gate", fault=fault_label, **self._load_gate)
        else:
            # The last of the gate's instructions jumps to the fix-up: that is where a closed gate goes.
            closed = self._layout.next_addr + pattern("pt_load_gate").size - JUMP_SIZE
            self._layout.add("pt_load_gate", closed=closed, load=load_label, fault=fault_label, **self._load_gate)
        self._layout.label(load_label)
        start = self._layout.next_addr
        self._layout.add("load", load_texts(type, base), offset=offset)
        self.loads.append((start, self._layout.next_addr, fault_label))

    def _pointer(self, base: Fetch, offset: int, fault_label: str) -> tuple[str, int]:
        """Register and offset that make the address to load from."""
        value = known(base, self._site_addr)
        if value is not None:
            self._layout.add("value_constant", value=value)
            return "rax", offset
        if isinstance(base, Memory):
            self._load(base, U64, fault_label)
            return "rax", offset
        if base == Register("rsp"):
            return "rsp", offset + self._frame.size
        assert isinstance(base, Register)
        return self._register(base.name, U64), offset
