"""Templates: the encodings that keystone lacks, filling, matching, and the check of what came out."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from ptwprobe import _native
from ptwprobe.errors import StubError
from ptwprobe.stub.encode import REGISTERS, expand
from ptwprobe.stub.layout import Layout
from ptwprobe.stub.template import FieldKind, pattern
from ptwprobe.stub.verify import canonical, verified


def text(code: bytes, addr: int = 0x1000) -> list[str]:
    return [line for _, _, line in _native.stub_listing(code, addr)]


def encoded(line: str) -> bytes:
    return bytes(int(byte, 0) for byte in expand(line).removeprefix(".byte ").split(", "))


@pytest.mark.parametrize("register", REGISTERS)
def test_ptwrite_and_rdpid_take_every_register(register: str) -> None:
    assert text(encoded(f"ptwrite {register}")) == [f"ptwrite {register}"]
    assert text(encoded(f"ptwrite qword ptr [{register} + 0x18]")) == [f"ptwrite qword ptr [{register} + 0x18]"]
    assert text(encoded(f"ptwrite qword ptr [{register} - 0x80000000]")) == [
        f"ptwrite qword ptr [{register} - 0x80000000]"
    ]
    assert text(encoded(f"rdpid {register}")) == [f"rdpid {register}"]


def test_rip_relative_ptwrite_counts_from_the_end_of_the_instruction() -> None:
    assert text(encoded("ptwrite qword ptr [rip + 0x10]")) == ["ptwrite qword ptr [0x1019]"]


def test_endbr64() -> None:
    assert text(encoded("endbr64")) == ["endbr64"]


def test_ptwrite_refuses_other_operands() -> None:
    with pytest.raises(ValueError, match="eax"):
        expand("ptwrite eax")


def test_fields_read_back_what_was_filled() -> None:
    values = {"room": 0xFFFF_FF00, "full": 0x40_0000, "increment": 1 << 63 | 5, "again": 0x3F_F000}
    reserve = pattern("ring_reserve")
    code = reserve.fill(0x40_1000, values)
    assert reserve.match(code, 0x40_1000) == values
    assert reserve.match(b"\x90" + code, 0x40_1000, 1) == values
    assert reserve.match(code[:-1], 0x40_1000) is None
    assert {field.kind for field in reserve.fields} == {FieldKind.U32, FieldKind.U64, FieldKind.REL32}


def test_no_match_where_a_fixed_byte_differs() -> None:
    reserve = pattern("ring_reserve")
    code = reserve.fill(0, dict.fromkeys(("room", "full", "increment", "again"), 0))
    free = {i for field in reserve.fields for i in range(field.offset, field.end)}
    for i in range(len(code)):
        changed = code[:i] + bytes([code[i] ^ 1]) + code[i + 1 :]
        assert (reserve.match(changed, 0) is not None) == (i in free)


@pytest.mark.parametrize("distance", [1 << 31, -(1 << 31) - 1])
def test_a_jump_out_of_reach_is_refused(distance: int) -> None:
    jump = pattern("jump_back")
    with pytest.raises(StubError, match="continue_addr"):
        jump.fill(0x1_0000_0000, {"continue_addr": 0x1_0000_0005 + distance})


def test_filling_takes_microseconds() -> None:
    reserve = pattern("ring_reserve")
    values = {"room": 1, "full": 2, "increment": 3, "again": 4}
    start = time.process_time_ns()
    for addr in range(1000):
        reserve.fill(addr, values)
    assert (time.process_time_ns() - start) / 1000 < 50_000


def test_every_template_says_what_it_is_for() -> None:
    for name in _native.stub_template_names():
        source = _native.stub_template(name)
        assert source is not None and source.startswith("# "), name


@pytest.mark.parametrize(
    ("template", "decoder"),
    [
        ("mov qword ptr [rsp + 0], rax", "mov qword ptr [rsp], rax"),
        ("movabs rcx, 0x10", "mov rcx, 0x10"),
        ("mov rax, qword ptr [rax + -0x10]", "mov rax, qword ptr [rax - 0x10]"),
        ("mov eax, dword ptr fs:[0xfffffffffffffff0]", "mov eax, dword ptr fs:[0xfffffffffffffff0]"),
        ("ptwrite qword ptr [rip + 0x1019]", "ptwrite qword ptr [0x1019]"),
    ],
)
def test_two_spellings_of_one_instruction(template: str, decoder: str) -> None:
    assert canonical(template) == canonical(decoder)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("mov rax, qword ptr [rax + 0x10]", "mov rax, qword ptr [rax - 0x10]"),
        ("mov edx, dword ptr fs:[0x2d0]", "mov edx, dword ptr fs:[0x4002d0]"),
        ("je 0x10", "jne 0x10"),
        ("and r11d, 0x10", "and r10d, 0x10"),
    ],
)
def test_different_instructions_stay_different(a: str, b: str) -> None:
    assert canonical(a) != canonical(b)


def test_an_instruction_that_is_not_what_the_template_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(0x1000)
    layout.add("jump_back", continue_addr=0x2000)
    assert verified(layout)[0] == b"\xe9\xfb\x0f\x00\x00"
    monkeypatch.setattr(_native, "stub_listing", lambda code, addr: [(addr, 5, "jmp 0x2001")])
    with pytest.raises(StubError, match="jump_back at 0x1000 came out as 'jmp 0x2001', meant was 'jmp 0x2000'"):
        verified(layout)


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[1] / "stubs").glob("*.s")), ids=lambda path: path.stem)
def test_no_stub_touches_a_shadow_stack(path: Path) -> None:
    """What calls, returns or moves its pointer needs the shadow stack to agree; relocation refuses calls."""
    lines = [line.partition("#")[0].split() for line in path.read_text().splitlines()]
    mnemonics = {words[0] for words in lines if words}
    assert mnemonics and not {m for m in mnemonics if re.match(r"(call|ret|iret|push|pop|incssp|rstorssp|wrss)", m)}
