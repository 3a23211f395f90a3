"""Code moved elsewhere does what it did: relocation compared with the original, over the code of real programs."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from ptwprobe._native import CodeMap, NativeError, decode, disassemble, relative_operands, relocate

LIBRARIES = [
    "/lib/x86_64-linux-gnu/libc.so.6",
    "/lib/x86_64-linux-gnu/libcrypto.so.3",
    "/usr/bin/python3",
]
REFUSED = {
    "call": "call-in-window",
    "system": "syscall-in-window",
    "trap": "syscall-in-window",
    "fixed": "not-relocatable",
}
HERE, THERE = 0x7F00_0000_0000, 0x7F00_1234_5670


def normal(text: str) -> str:
    """An instruction's text without what the longer form of a branch changes."""
    return re.sub(r"^((?:notrack |bnd )*j\w+|loop\w*)(?:,p[nt])? .*0x[0-9a-f]+$", r"\1", text)


def instructions(path: str, count: int) -> list[tuple[int, bytes, str]]:
    """``count`` random instructions of a file: address, bytes, kind."""
    code_map = CodeMap(path)
    chosen = random.Random(path)
    found: list[tuple[int, bytes, str]] = []
    functions = code_map.functions()
    while len(found) < count:
        start, end = chosen.choice(functions)
        code = code_map.bytes(start, end - start)
        body = [(start + at, code[at : at + length], kind) for at, length, kind in decode(code, start)]
        found += chosen.sample(body, min(len(body), 20))
    return found


@pytest.mark.parametrize("path", [p for p in LIBRARIES if Path(p).exists()])
def test_relocated_instructions_mean_the_same(path: str) -> None:
    kinds = set()
    for vaddr, code, kind in instructions(path, 20_000):
        old_addr, new_addr = HERE + vaddr, THERE + vaddr // 2
        kinds.add(kind)
        if kind in REFUSED:
            with pytest.raises(NativeError) as error:
                relocate(code, old_addr, new_addr)
            assert error.value.args[0] == REFUSED[kind]
            continue
        try:
            new, mapping = relocate(code, old_addr, new_addr)
        except NativeError as refusal:
            raise AssertionError(f"{path} {vaddr:#x} {code.hex()}: {refusal}") from refusal
        assert mapping == [(0, 0)]
        old_text, new_text = disassemble(code, old_addr), disassemble(new, new_addr)
        # Same addresses in memory, same destination. (A loop or jrcxz names its own jump first.)
        assert relative_operands(new, new_addr)[-1:] == relative_operands(code, old_addr)
        if len(new_text) == 1:
            assert normal(new_text[0][2]) == normal(old_text[0][2])
            if kind not in ("jump", "branch"):
                assert len(new) == len(code)
        else:
            assert re.match(r"loop|j.?cxz", old_text[0][2])
            assert [t.split()[0] for _, _, t in new_text] == [old_text[0][2].split()[0], "jmp", "jmp"]
    assert {"plain", "call", "branch", "jump", "return", "nop"} <= kinds


@pytest.mark.parametrize("path", [p for p in LIBRARIES if Path(p).exists()])
def test_relocated_runs_of_instructions_are_their_parts(path: str) -> None:
    code_map = CodeMap(path)
    for start, end in random.Random(1).sample(code_map.functions(), 500):
        code = code_map.bytes(start, min(end - start, 40))
        run = []
        for at, length, kind in decode(code, start):
            if kind not in ("nop", "endbr", "plain"):
                break
            run.append((at, code[at : at + length]))
        if not run:
            continue
        size = run[-1][0] + len(run[-1][1])
        new, mapping = relocate(code[:size], HERE + start, THERE)
        assert new == b"".join(relocate(part, HERE + start + at, THERE + at)[0] for at, part in run)
        assert mapping == [(at, at) for at, _ in run]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("e8 00 00 00 00", "call-in-window"),
        ("ff 15 00 00 00 00", "call-in-window"),
        ("0f 05", "syscall-in-window"),
        ("0f 34", "syscall-in-window"),
        ("cd 80", "syscall-in-window"),
        ("cc", "syscall-in-window"),
        ("48 cf", "not-relocatable"),  # iretq
        ("cb", "not-relocatable"),  # far return
        ("ff 2c 24", "not-relocatable"),  # far jump
        ("f4", "not-relocatable"),  # hlt
        ("c7 f8 00 00 00 00", "not-relocatable"),  # xbegin
        ("67 8b 05 00 00 00 00", "not-relocatable"),  # eip-relative
        ("66 0f 84 00 00 00 00", "not-relocatable"),  # processors disagree
        ("75 01 48 89 c0", "not-relocatable"),  # jumps into its neighbour
        ("06", "not-an-instruction"),
        ("48 8b", "not-an-instruction"),
    ],
)
def test_what_cannot_move_is_refused_by_name(code: str, kind: str) -> None:
    with pytest.raises(NativeError) as error:
        relocate(bytes.fromhex(code), HERE, THERE)
    assert error.value.args[0] == kind
    assert error.value.args[2] is not None


def test_a_destination_out_of_reach_is_refused() -> None:
    with pytest.raises(NativeError) as error:
        relocate(bytes.fromhex("eb 00"), HERE, HERE + (1 << 31) + 16)
    assert error.value.args[0] == "out-of-reach"
    new, _ = relocate(bytes.fromhex("eb 00"), HERE, HERE + (1 << 31) - 16)
    assert relative_operands(new, HERE + (1 << 31) - 16) == [HERE + 2]


def test_a_loop_back_to_the_site_meets_the_patch_again() -> None:
    new, _ = relocate(bytes.fromhex("ff c9 75 fc"), HERE, THERE)  # dec ecx; jne site
    assert relative_operands(new, THERE) == [HERE]


def test_endbr_and_notrack_are_kept() -> None:
    code = bytes.fromhex("f3 0f 1e fa 3e ff e0")
    assert relocate(code, HERE, THERE) == (code, [(0, 0), (4, 4)])


def test_random_bytes_never_crash() -> None:
    chosen = random.Random(2)
    for _ in range(50_000):
        code = chosen.randbytes(chosen.randrange(1, 24))
        decode(code, HERE)
        try:
            new, mapping = relocate(code, HERE, THERE)
        except NativeError:
            continue
        assert mapping and disassemble(new, THERE)
