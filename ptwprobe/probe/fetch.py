"""The ARG part of the probe language: ``[NAME=]FETCH[:TYPE]`` → :class:`~ptwprobe.model.Argument`, and back.

FETCH is that of tracefs (Documentation/trace/uprobetracer.rst in the kernel): ``%reg``, ``$stack``, ``$stackN``,
``\\imm``, ``+off(FETCH)``, plus perf-probe's ``$argN``. Where a probe goes is ``spec.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ptwprobe.errors import ProbeSyntaxError
from ptwprobe.model import Argument, Constant, Fetch, Memory, Register, TypeKind, ValueType

MAX_ARGUMENTS = 255
"""What the wire format's count of argument words can say."""
MAX_DEPTH = 16

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DEFAULT_TYPE = ValueType(TypeKind.HEX, 64)
_SYSV_INTEGER_ARGUMENTS = ("rdi", "rsi", "rdx", "rcx", "r8", "r9")
_NUMBERED = tuple(f"r{i}" for i in range(8, 16))
_KERNEL_NAMES = {name: f"r{name}" for name in ("ax", "bx", "cx", "dx", "si", "di", "bp", "sp", "ip")}
REGISTERS = {**_KERNEL_NAMES, **{r: r for r in _KERNEL_NAMES.values()}, **{r: r for r in _NUMBERED}}
"""Every accepted spelling → the 64-bit register. As in tracefs, ``%ax`` is all of rax."""


def _sub_registers() -> dict[str, str]:
    """Names of parts of registers → what to write for them."""
    parts = {}
    for short, full in _KERNEL_NAMES.items():
        parts[f"e{short}"] = f"%{full}:u32"
        if short[1] == "x":
            parts[f"{short[0]}l"] = f"%{full}:u8"
        elif short != "ip":
            parts[f"{short}l"] = f"%{full}:u8"
    for full in _NUMBERED:
        parts |= {f"{full}d": f"%{full}:u32", f"{full}w": f"%{full}:u16", f"{full}b": f"%{full}:u8"}
    return parts


_SUB_REGISTERS = _sub_registers()
_TYPES = {str(t): t for t in (ValueType(kind, bits) for kind in TypeKind for bits in (8, 16, 32, 64))}
_LATER_TYPES = re.compile(r"char|string|ustring|symbol|symstr|f32|f64|b\d+@.*|[A-Za-z0-9]+\[.*")
_VARIABLE_HINT = "name a register (%rdi), an argument ($arg1) or memory (+8(%rdi))"
_NOT_YET = "is not supported by this version"


@dataclass
class _Cursor:
    """A position in ``text``; the argument that is read ends before column ``end``."""

    text: str
    pos: int
    end: int

    def peek(self) -> str:
        return self.text[self.pos] if self.pos < self.end else ""

    def take(self, pattern: str) -> str:
        found = re.compile(pattern).match(self.text, self.pos, self.end)
        if found is None:
            return ""
        self.pos = found.end()
        return found.group()

    def error(self, message: str, hint: str, column: int | None = None) -> ProbeSyntaxError:
        return ProbeSyntaxError(self.text, self.pos if column is None else column, message, hint)


@dataclass(frozen=True)
class _Parsed:
    argument: Argument
    column: int
    named: bool


def check_identifier(text: str, start: int, end: int, what: str) -> str:
    """``text[start:end]`` if it is a C identifier, else the error at its first character that is none."""
    found = _IDENTIFIER.match(text, start, end)
    if found is None or found.end() != end:
        column = start if found is None else found.end()
        bad = repr(text[column]) if column < end else "nothing"
        hint = "use letters, digits and underscores, no digit first"
        raise ProbeSyntaxError(text, column, f"{what} is a C identifier, {bad} is not part of one", hint)
    return found.group()


def parse_arguments(text: str, spans: Sequence[tuple[int, int]]) -> tuple[Argument, ...]:
    """The arguments in ``text``, one per ``(start, end)`` span of columns.

    Unnamed ones are called ``argN`` after their ``$argN``, else after their position, as tracefs does.
    """
    if len(spans) > MAX_ARGUMENTS:
        column = spans[MAX_ARGUMENTS][0]
        raise ProbeSyntaxError(text, column, f"more than {MAX_ARGUMENTS} arguments", "split the probe in two")
    parsed = [_parse_argument(text, start, end) for start, end in spans]
    taken: set[str] = set()
    for item in parsed:
        if item.named:
            if item.argument.name in taken:
                message = f"the name {item.argument.name!r} is used twice"
                raise ProbeSyntaxError(text, item.column, message, "give one of the arguments another name")
            taken.add(item.argument.name)
    out = []
    for position, item in enumerate(parsed, 1):
        if item.named:
            out.append(item.argument)
            continue
        plain = item.argument.text
        wanted = plain[1:] if re.fullmatch(r"\$arg\d+", plain) else f"arg{position}"
        name = unique(wanted, taken)
        taken.add(name)
        out.append(replace(item.argument, name=name))
    return tuple(out)


def unique(wanted: str, taken: set[str]) -> str:
    """``wanted``, or the first of ``wanted_1``, ``wanted_2``, … that is not in ``taken``."""
    name, count = wanted, 0
    while name in taken:
        count += 1
        name = f"{wanted}_{count}"
    return name


def _parse_argument(text: str, start: int, end: int) -> _Parsed:
    cursor = _Cursor(text, start, end)
    name = ""
    equals = text.find("=", start, end)
    if equals >= 0:
        name = check_identifier(text, start, equals, "the name of an argument")
        cursor.pos = equals + 1
    fetch_start = cursor.pos
    fetch, entry_only = _fetch(cursor, 0)
    fetch_text = text[fetch_start : cursor.pos]
    value_type = _DEFAULT_TYPE
    if cursor.peek() == ":":
        cursor.pos += 1
        value_type = _type(cursor)
    if cursor.peek():
        raise cursor.error(
            f"{cursor.peek()!r} does not belong here", "an argument is [NAME=]FETCH[:TYPE]; separate them by spaces"
        )
    return _Parsed(Argument(name, fetch, value_type, fetch_text, entry_only), start, bool(name))


def _type(cursor: _Cursor) -> ValueType:
    start = cursor.pos
    word = cursor.text[start : cursor.end]
    value_type = _TYPES.get(word)
    if value_type is None:
        message = f"type {word!r} {_NOT_YET}" if _LATER_TYPES.fullmatch(word) else f"no such type: {word!r}"
        raise cursor.error(message, "types are u8 u16 u32 u64, s8 … s64, x8 … x64")
    cursor.pos = cursor.end
    return value_type


def _fetch(cursor: _Cursor, depth: int) -> tuple[Fetch, bool]:
    """One FETCH and whether it holds a ``$argN``."""
    first = cursor.peek()
    if first == "%":
        return _register(cursor), False
    if first == "$":
        return _dollar(cursor)
    if first == "\\":
        return _immediate(cursor), False
    if first and first in "+-":
        return _memory(cursor, depth)
    if first == "@":
        raise cursor.error(f"a symbol (@…) {_NOT_YET}", "write its address as a constant: +0(\\0x1234)")
    if not first:
        raise cursor.error("a value is missing", _VARIABLE_HINT)
    if re.match(r"[A-Za-z_*&]", first):
        raise cursor.error(f"a variable {_NOT_YET}", _VARIABLE_HINT)
    raise cursor.error(f"no value starts with {first!r}", _VARIABLE_HINT)


def _register(cursor: _Cursor) -> Register:
    start = cursor.pos
    cursor.pos += 1
    name = cursor.take(r"[A-Za-z0-9_]*")
    full = REGISTERS.get(name)
    if full is not None:
        return Register(full)
    if name in _SUB_REGISTERS:
        raise cursor.error(f"%{name} is a part of a register", f"write {_SUB_REGISTERS[name]}", start)
    if re.fullmatch(r"[abcd]h", name):
        raise cursor.error(f"%{name} is a part of a register", f"write %r{name[0]}x and take bits 8 to 15", start)
    if re.fullmatch(r"([xyz]mm|st|mm|k)\d*", name):
        raise cursor.error(f"the vector register %{name} {_NOT_YET}", "integer registers are", start)
    hint = "registers are %rax %rbx %rcx %rdx %rsi %rdi %rbp %rsp %rip %r8 … %r15 (or %ax, %bx, … as in tracefs)"
    raise cursor.error(f"no such register: %{name}", hint, start)


def _dollar(cursor: _Cursor) -> tuple[Fetch, bool]:
    start = cursor.pos
    cursor.pos += 1
    word = cursor.take(r"[A-Za-z_]*")
    digits = cursor.take(r"[0-9]*")
    number = int(digits[:10]) if digits else 0
    if word == "arg" and digits:
        if not 1 <= number <= MAX_ARGUMENTS:
            raise cursor.error(f"there is no $arg{digits[:12]}", f"write $arg1 … $arg{MAX_ARGUMENTS}", start)
        if number <= len(_SYSV_INTEGER_ARGUMENTS):
            return Register(_SYSV_INTEGER_ARGUMENTS[number - 1]), True
        return Memory(Register("rsp"), 8 * (number - len(_SYSV_INTEGER_ARGUMENTS))), True
    if word == "stack" and digits:
        if number >= 1 << 24:
            raise cursor.error(
                f"$stack{digits[:12]} is too far away", "count 8-byte words from the stack pointer", start
            )
        return Memory(Register("rsp"), 8 * number), False
    if word == "stack":
        return Register("rsp"), False
    if word == "arg":
        raise cursor.error("$arg needs its number", "write $arg1, $arg2, …", start)
    if word in ("retval", "comm"):
        raise cursor.error(f"${word} {_NOT_YET}", _VARIABLE_HINT, start)
    raise cursor.error(f"no such value: ${word}{digits[:12]}", "write $arg1, $stack or $stack0", start)


def _immediate(cursor: _Cursor) -> Constant:
    cursor.pos += 1
    start = cursor.pos
    if cursor.peek() == '"':
        raise cursor.error(f"a string constant {_NOT_YET}", "write a number")
    value = _number(cursor, cursor.take("[+-]"))
    if not -(1 << 63) <= value < 1 << 64:
        raise cursor.error("the constant does not fit in 64 bits", "take a smaller one", start)
    return Constant(value & 0xFFFF_FFFF_FFFF_FFFF)


def _number(cursor: _Cursor, sign: str) -> int:
    if cursor.take("0[xX]"):
        digits, base = cursor.take("[0-9A-Fa-f]*"), 16
    else:
        digits, base = cursor.take("[0-9]*"), 10
    if not digits:
        raise cursor.error("a number is missing", "write a decimal (16) or hexadecimal (0x10) number")
    value = int(digits[:40], base)
    return -value if sign == "-" else value


def _memory(cursor: _Cursor, depth: int) -> tuple[Memory, bool]:
    start = cursor.pos
    if depth >= MAX_DEPTH:
        raise cursor.error(f"more than {MAX_DEPTH} dereferences in one another", "read a pointer closer to the value")
    sign = cursor.take("[+-]")
    cursor.take("u")  # tracefs: "+u8(...)" says user memory, which all of it is here
    offset = _number(cursor, sign)
    if not -(1 << 31) <= offset < 1 << 31:
        raise cursor.error("the offset does not fit in 32 bits", "add the rest to the base", start)
    if cursor.peek() != "(":
        raise cursor.error("'(' is missing", "memory is +OFF(FETCH), such as +8(%rdi)")
    cursor.pos += 1
    base, entry_only = _fetch(cursor, depth + 1)
    if cursor.peek() != ")":
        raise cursor.error("')' is missing", "memory is +OFF(FETCH), such as +8(%rdi)")
    cursor.pos += 1
    return Memory(base, offset), entry_only


def format_argument(argument: Argument) -> str:
    """``NAME=FETCH:TYPE`` with everything said; the FETCH as it was written."""
    return f"{argument.name}={argument.text}:{argument.type}"
