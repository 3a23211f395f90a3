"""Windows by tactic and refusals by reason, on bytes written down here; then on all functions of real files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ptwprobe._native import CodeMap, decode
from ptwprobe.errors import InputError, RefusalReason, RefusedError
from ptwprobe.model import ObjectFile, Site, Tactic, Window
from ptwprobe.patch.codemaps import code_map as cached_code_map
from ptwprobe.patch.plan import Taken, entry_after_endbr, find_window, footprint, plan_window
from tests.elfwriter import EXEC, ElfWriter

TEXT = 0x1000
BIAS = 0x7F00_0000_0000
MOV = "48 89 e5"  # mov %rsp,%rbp
NOPS = "0f 1f 44 00 00"


class Code:
    """A file of one section with functions in it, and a process that has it mapped."""

    def __init__(self, folder: Path, code: str, functions: dict[str, tuple[int, int]], **elf: Any) -> None:
        self.bytes = bytes.fromhex(code)
        writer = ElfWriter(**elf).text(TEXT, self.bytes)
        for name, (offset, size) in functions.items():
            writer.function(name, TEXT + offset, size)
        self.functions = functions
        self.path = writer.write(folder / "code.so")
        self.map = CodeMap(self.path)
        self.memory = bytearray(self.bytes)

    def site(self, offset: int = 0, bias: int = BIAS) -> Site:
        file = ObjectFile("/usr/lib/libcode.so.1", self.path, "", 0, 0, bias)
        name, (start, size) = [f for f in self.functions.items() if f[1][0] <= offset][-1]
        vaddr = TEXT + offset
        return Site(file, name, name, TEXT + start, size, vaddr, vaddr, vaddr + bias, offset == start)

    def plan(self, offset: int = 0, bias: int = BIAS, can_switch: Callable[[int], bool] | None = None) -> Window:
        def read(addr: int, length: int) -> bytes:
            at = addr - bias - TEXT
            return bytes(self.memory[at : at + length])

        return plan_window(self.site(offset, bias), read, self.map, can_switch)


@pytest.fixture
def code(tmp_path: Path) -> Callable[..., Code]:
    def make(text: str, functions: dict[str, tuple[int, int]] | None = None, **elf: int) -> Code:
        length = len(bytes.fromhex(text))
        return Code(tmp_path, text, functions or {"f": (0, length)}, **elf)

    return make


def refusal(make: Code, offset: int = 0, bias: int = BIAS) -> RefusedError:
    """``bias`` 0: no room for puns that reach down."""
    with pytest.raises(RefusedError) as error:
        make.plan(offset, bias)
    return error.value


# ---------------------------------------------------------------- tactics


@pytest.mark.parametrize(
    ("text", "tactic", "displaced"),
    [
        (NOPS + "c3", Tactic.NOP, 5),
        ("66 0f 1f 84 00 00 00 00 00 c3", Tactic.NOP, 9),
        ("90 90 90 90 90 c3", Tactic.NOP, 5),
        ("66 90 0f 1f 40 00 c3", Tactic.NOP, 6),
        ("b8 01 00 00 00 c3", Tactic.SINGLE, 5),
        ("48 8b 05 00 10 00 00 c3", Tactic.SINGLE, 7),
        (f"55 {MOV} 41 57 c3", Tactic.WINDOW, 6),
        ("53 85 ff 74 01 90 c3", Tactic.WINDOW, 5),
    ],
)
def test_the_tactic_follows_the_instructions(
    code: Callable[..., Code], text: str, tactic: Tactic, displaced: int
) -> None:
    made = code(text)
    window = made.plan()
    assert (window.tactic, len(window.displaced), window.written) == (tactic, displaced, 5)
    assert window.displaced == made.bytes[:displaced]
    assert window.site_addr == BIAS + TEXT
    after = window.site_addr + 5
    assert (window.target_min, window.target_max) == (after - (1 << 31), after + (1 << 31) - 1)


def test_padding_behind_the_function_makes_room(code: Callable[..., Code]) -> None:
    nops = code("89 f8 c3 66 90 0f 1f 00 55 c3", {"f": (0, 3), "g": (8, 2)})
    assert (nops.plan().tactic, nops.plan().displaced.hex()) == (Tactic.WINDOW, "89f8c36690")
    traps = code("89 f8 c3 cc cc cc cc cc 55 c3", {"f": (0, 3), "g": (8, 2)})
    assert traps.plan().displaced.hex() == "89f8c3cccc"


def test_a_last_ret_with_padding_behind_it_is_a_window(code: Callable[..., Code]) -> None:
    made = code(f"55 5d c3 {NOPS} c3", {"f": (0, 3), "g": (8, 1)})
    assert made.plan(2).displaced.hex() == "c30f1f440000"


def test_own_bytes_are_punned_where_the_next_instruction_is_a_target(code: Callable[..., Code]) -> None:
    # 0: mov %rsp,%rbp; 3: dec %ecx; 5: jne 3; 7: xor eax,eax; ret
    made = code(f"{MOV} ff c9 75 fc 31 c0 c3")
    window = made.plan()
    assert (window.tactic, window.displaced.hex(), window.written) == (Tactic.PUN, "4889e5", 3)
    # rel32 = xx xx ff c9: negative
    lowest = window.site_addr + 5 + int.from_bytes(bytes.fromhex("0000ffc9"), "little", signed=True)
    assert (window.target_min, window.target_max) == (lowest, lowest + 0xFFFF)


def test_a_punned_jump_may_stand_at_the_end_of_a_page(code: Callable[..., Code]) -> None:
    made = code("90 " * 0xFFD + f"{MOV} 31 c0 c3", {"f": (0xFFD, 6)})
    window = made.plan(0xFFD, can_switch=lambda page: False)
    assert (window.tactic, window.written) == (Tactic.PUN, 3)


def test_endbr64_stays_and_the_site_moves_behind_it(code: Callable[..., Code]) -> None:
    made = code(f"f3 0f 1e fa 55 {MOV} 5d c3")
    site = entry_after_endbr(made.site(), made.bytes)
    assert (site.vaddr, site.file_offset, site.runtime_addr) == (TEXT + 4, TEXT + 4, BIAS + TEXT + 4)
    assert site.is_entry and site.function_vaddr == TEXT
    assert entry_after_endbr(site, made.bytes[4:]) is site
    assert made.plan(4).displaced.hex() == "554889e55d"


# ---------------------------------------------------------------- refusals


def test_refusal_foreign_probe(code: Callable[..., Code]) -> None:
    made = code(f"55 {MOV} 41 57 c3")
    made.memory[0] = 0xCC
    error = refusal(made)
    assert error.reason is RefusalReason.FOREIGN_PROBE
    assert "cc 48 89" in str(error) and "55 48 89" in str(error)
    made.memory[0] = 0x55
    made.memory[5] = 0xCC  # inside the last displaced instruction
    assert refusal(made).reason is RefusalReason.FOREIGN_PROBE
    made.memory[5] = 0x57
    made.memory[6] = 0xCC  # behind it
    assert made.plan().tactic is Tactic.WINDOW


def test_refusal_jump_target_in_window(code: Callable[..., Code]) -> None:
    # 0: push; 1: dec %ecx; 3: jne 1; 5: pop; ret
    error = refusal(code("55 ff c9 75 fc 5d c3", type=EXEC), bias=0)
    assert error.reason is RefusalReason.JUMP_TARGET_IN_WINDOW
    assert "byte 1 is the target of a branch" in error.message


def test_refusal_jump_target_inside_one_instruction(code: Callable[..., Code]) -> None:
    # lock cmpxchg, entered behind its prefix as some libraries do: 0: je 3; 2: lock; 3: cmpxchg %ecx,0x10(%rdi)
    made = code("74 01 f0 0f b1 4f 10 c3")
    assert refusal(made, 2).reason is RefusalReason.JUMP_TARGET_IN_WINDOW


def test_refusal_call_in_window(code: Callable[..., Code]) -> None:
    made = code(f"e8 00 00 00 00 55 {MOV} 41 57 c3")
    error = refusal(made)
    assert error.reason is RefusalReason.CALL_IN_WINDOW
    assert "libcode.so.1:f+0x5 can be probed" in error.hint


def test_refusal_syscall_in_window(code: Callable[..., Code]) -> None:
    assert refusal(code("0f 05 c3 90 90 90")).reason is RefusalReason.SYSCALL_IN_WINDOW
    assert refusal(code("6a 05 0f 05 c3 f0", type=EXEC), bias=0).reason is RefusalReason.SYSCALL_IN_WINDOW
    assert refusal(code("cd 80 c3 90 90 90")).reason is RefusalReason.SYSCALL_IN_WINDOW


def test_refusal_unknown_targets(code: Callable[..., Code]) -> None:
    # 0: push; 1: add %rsi,%rax; 4: jmp *%rax
    error = refusal(code("55 48 01 f0 ff e0", type=EXEC), bias=0)
    assert error.reason is RefusalReason.UNKNOWN_TARGETS
    # One instruction does not depend on it.
    single = code("b8 01 00 00 00 48 01 f0 ff e0")
    assert single.plan().tactic is Tactic.SINGLE


def test_refusal_crosses_page_only_where_one_of_the_pages_cannot_be_exchanged(code: Callable[..., Code]) -> None:
    made = code("90 " * 0xFFE + "b8 01 00 00 00 c3", {"f": (0xFFE, 6)})
    border = TEXT + BIAS + 0x1000
    assert made.plan(0xFFE).written == 5
    for page in (border - 0x1000, border):
        with pytest.raises(RefusedError) as error:
            made.plan(0xFFE, can_switch=page.__ne__)
        assert error.value.reason is RefusalReason.CROSSES_PAGE


def test_refusal_not_relocatable(code: Callable[..., Code]) -> None:
    assert refusal(code("c7 f8 00 00 00 00 c3")).reason is RefusalReason.NOT_RELOCATABLE  # xbegin
    assert refusal(code("0f 01 d7 90 90 90 c3")).reason is RefusalReason.NOT_RELOCATABLE  # enclu
    error = refusal(code(f"f3 0f 1e fa 55 {MOV} 5d c3"))
    assert error.reason is RefusalReason.NOT_RELOCATABLE
    assert "libcode.so.1:f+0x4 can be probed" in error.hint


def test_refusal_not_an_instruction(code: Callable[..., Code]) -> None:
    made = code("b8 01 00 00 00 c3")
    assert refusal(made, 2).reason is RefusalReason.NOT_AN_INSTRUCTION
    assert refusal(code("06 90 90 90 90 90")).reason is RefusalReason.NOT_AN_INSTRUCTION


def test_refusal_function_too_short(code: Callable[..., Code]) -> None:
    made = code("89 f8 c3 f0 ff 07", {"f": (0, 3)}, type=EXEC)
    error = refusal(made, bias=0)
    assert error.reason is RefusalReason.FUNCTION_TOO_SHORT
    assert "classic uprobe" in error.hint
    assert refusal(code("89 f8 c3", type=EXEC)).reason is RefusalReason.FUNCTION_TOO_SHORT


def test_refusal_not_executable(code: Callable[..., Code]) -> None:
    error = refusal(code("c3"), 0x5000)
    assert error.reason is RefusalReason.NOT_EXECUTABLE
    assert "no code" in error.message and "uprobe" not in error.hint


def test_refusal_already_probed(code: Callable[..., Code]) -> None:
    made = code(f"55 {MOV} 41 57 b8 01 00 00 00 c3")
    first, second = made.plan(), made.plan(6)
    assert footprint(first) == (BIAS + TEXT, BIAS + TEXT + 6)
    Taken([first]).take(made.site(6), second)
    with pytest.raises(RefusedError) as error:
        Taken([second, first]).take(made.site(), first)
    assert error.value.reason is RefusalReason.ALREADY_PROBED


def test_a_pun_relies_on_the_bytes_behind_it(code: Callable[..., Code]) -> None:
    made = code(f"{MOV} ff c9 75 fc b8 01 00 00 00 c3")
    pun = made.plan()
    assert pun.tactic is Tactic.PUN
    neighbour = replace(pun, site_addr=pun.site_addr + 4, tactic=Tactic.SINGLE)
    with pytest.raises(RefusedError):
        Taken([neighbour]).take(made.site(), pun)


def test_code_behind_a_jump_is_never_taken_unless_it_is_filling(code: Callable[..., Code]) -> None:
    # ret, then code of the same function that nothing known jumps to
    made = code("55 5d c3 31 c0 31 c9 c3", type=EXEC)
    assert refusal(made, 2, bias=0).reason is RefusalReason.UNKNOWN_TARGETS


def test_a_message_names_the_place_and_the_bytes(code: Callable[..., Code]) -> None:
    error = refusal(code("55 5d e8 00 00 00 00 c3", type=EXEC), 2)
    assert "libcode.so.1:f+0x2 (0x7f0000001002: e8 00 00 00 00 c3): a call" in error.message
    nameless = code("e8 00 00 00 00 c3")
    site = replace(nameless.site(), function="", symbol="")
    with pytest.raises(RefusedError, match=r"libcode\.so\.1:0x1000 "):
        plan_window(site, lambda addr, length: nameless.bytes[:length], nameless.map)


# ---------------------------------------------------------------- real files


@pytest.mark.parametrize(
    ("name", "bias", "expected"),
    [
        ("/lib/x86_64-linux-gnu/libc.so.6", 0x7F12_3456_7000, 0.98),
        ("/lib/x86_64-linux-gnu/libcrypto.so.3", 0x7F12_3456_7000, 0.98),
        ("/usr/bin/python3", 0, 0.90),
        ("/lib/x86_64-linux-gnu/libsqlite3.so.0", 0x7F12_3456_7000, 0.98),
    ],
)
def test_share_of_entries_that_can_be_probed(name: str, bias: int, expected: float) -> None:
    if not Path(name).exists():
        pytest.skip(f"no {name}")
    code_map = CodeMap(name)
    entries = planned = 0
    for start, end in code_map.functions():
        code = code_map.bytes(start, end - start)
        entry = start + 4 if code.startswith(bytes.fromhex("f30f1efa")) else start
        window = find_window(code_map, entry, bias)
        entries += 1
        if not isinstance(window, Window):
            continue
        planned += 1
        # What the plan rests on, looked at once more.
        assert code_map.bytes(entry, len(window.displaced)) == window.displaced
        parts = decode(window.displaced, entry)
        assert sum(length for _, length, _ in parts) == len(window.displaced)
        assert not {"call", "system", "fixed", "endbr"} & {kind for _, _, kind in parts}
        assert not code_map.targets(entry, entry + window.written)
    print(f"{name}: {planned} of {entries} entries, {100 * planned / entries:.2f} %")
    assert planned / entries >= expected


def test_code_maps_are_kept(code: Callable[..., Code]) -> None:
    file = code("c3").site().object
    assert cached_code_map(replace(file, inode=77)) is cached_code_map(replace(file, inode=77))
    with pytest.raises(InputError, match="cannot read"):
        cached_code_map(replace(file, inode=78, open_path="/nonexistent"))
