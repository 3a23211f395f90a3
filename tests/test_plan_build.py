"""Finished patches: the jump, the stub's place, and that patched code does what it did."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ptwprobe._native import CodeMap, disassemble, relative_operands
from ptwprobe.errors import RefusalReason, RefusedError
from ptwprobe.model import ObjectFile, Patch, Site, StubForm, Tactic, Window
from ptwprobe.patch.build import build_patch, jump_to, stub_range
from ptwprobe.patch.place import AddressSpace, Allocator
from ptwprobe.patch.plan import find_window
from tests.elfwriter import ElfWriter

ROOT = Path(__file__).parent.parent
TEXT = 0x1000
BIAS = 0x5555_5555_4000
SITE_ADDR = BIAS + TEXT


def allocator(*taken: tuple[int, int]) -> Allocator:
    return Allocator(AddressSpace(((BIAS, BIAS + 0x4000), *taken), (0, 0), (0, 0), False, 0x10000))


def planned(folder: Path, text: str) -> tuple[Site, Window, CodeMap]:
    code = bytes.fromhex(text)
    path = ElfWriter().text(TEXT, code).function("f", TEXT, len(code)).write(folder / "code")
    code_map = CodeMap(path)
    site = Site(ObjectFile("/bin/prog", path, "", 0, 0, BIAS), "f", "f", TEXT, len(code), TEXT, TEXT, SITE_ADDR, True)
    window = find_window(code_map, TEXT, BIAS)
    assert isinstance(window, Window)
    return site, window, code_map


def built(folder: Path, text: str, room: Allocator | None = None) -> Patch:
    site, window, code_map = planned(folder, text)
    return build_patch(site, 7, (), window, room or allocator(), StubForm.PT, None, code_map=code_map)


@pytest.mark.parametrize(
    ("text", "tactic"),
    [
        ("0f 1f 44 00 00 c3", Tactic.NOP),
        ("48 8b 05 00 10 00 00 c3", Tactic.SINGLE),
        ("55 48 89 e5 41 57 c3", Tactic.WINDOW),
        ("48 89 e5 ff c9 75 fc 31 c0 c3", Tactic.PUN),
        ("55 ff c9 75 fc 31 c0 c3", Tactic.PUN),
    ],
)
def test_the_written_bytes_jump_to_the_stub(tmp_path: Path, text: str, tactic: Tactic) -> None:
    room = allocator()
    patch = built(tmp_path, text, room)
    code = bytes.fromhex(text)
    assert patch.window.tactic is tactic and patch.event_id == 7
    assert patch.old == code[: len(patch.new)] and len(patch.new) == patch.window.written
    memory = patch.new + code[len(patch.new) :]
    assert relative_operands(memory[:5], SITE_ADDR) == [patch.stub.addr]
    assert disassemble(memory[:5], SITE_ADDR)[0][2] == f"jmp {patch.stub.addr:#x}"
    assert patch.window.target_min <= patch.stub.addr <= patch.window.target_max
    # The stub lies in what is to be mapped.
    [(start, length)] = room.ranges()
    assert start <= patch.stub.addr and patch.stub.end <= start + length


def test_the_stub_reaches_what_the_displaced_code_reaches(tmp_path: Path) -> None:
    # mov -0x70000000(%rip),%rax: nothing above the site is near enough.
    site, window, _ = planned(tmp_path, "48 8b 05 00 00 00 90 c3")
    lowest, highest = stub_range(window, 100)
    target = SITE_ADDR + 7 - 0x7000_0000
    assert highest == target + (1 << 31) - 100 and lowest >= window.target_min
    patch = build_patch(site, 7, (), window, allocator(), StubForm.PT, None)
    assert patch.stub.addr <= highest


def test_a_jump_that_is_none_is_never_written(tmp_path: Path) -> None:
    _, window, _ = planned(tmp_path, "48 89 e5 ff c9 75 fc 31 c0 c3")
    assert jump_to(window, window.target_max)[0] == 0xE9
    with pytest.raises(AssertionError):
        jump_to(window, window.target_max + 1)


def test_refusal_no_stub_space(tmp_path: Path) -> None:
    site, window, code_map = planned(tmp_path, "48 89 e5 ff c9 75 fc b8 01 00 00 00 c3")
    room = allocator((window.target_min - 0x1000, window.target_max + 0x1000))
    with pytest.raises(RefusedError) as error:
        build_patch(site, 7, (), window, room, StubForm.PT, None, code_map=code_map)
    assert error.value.reason is RefusalReason.NO_STUB_SPACE
    assert "prog:f+0x3 can be probed" in error.value.hint
    assert room.ranges() == []


def test_a_stub_that_fails_gives_its_room_back(tmp_path: Path) -> None:
    site, window, _ = planned(tmp_path, "55 48 89 e5 41 57 c3")
    room = allocator()
    with pytest.raises(Exception, match="event id"):
        build_patch(site, 1 << 20, (), window, room, StubForm.PT, None)
    assert room.ranges() == []


def run(mode: str, library: Path) -> str:
    command = [sys.executable, "-m", "tests.patchexec", mode, str(library)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_instruction_can_be_patched_without_changing_a_result(progs: Callable[..., Path]) -> None:
    out = run("each", progs("libwork"))
    assert int(out.split("probed ")[1].split()[0]) > 250 and out.rstrip().endswith("wrong 0")


@pytest.mark.parametrize("name", ["libc.so.6", "libsqlite3.so.0"])
def test_all_functions_of_a_library_patched_at_once_change_no_result(name: str) -> None:
    path = Path("/usr/lib/x86_64-linux-gnu") / name
    if not path.exists():
        pytest.skip(f"no {path}")
    out = run("entries", path.resolve())
    assert int(out.split("probed ")[1].split()[0]) > 2500 and out.rstrip().endswith("wrong 0")
