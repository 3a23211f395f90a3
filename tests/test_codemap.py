"""What the code map knows: of files written byte by byte, of compiled ones, and of libc against objdump."""

from __future__ import annotations

import random
import re
import struct
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import pytest

from ptwprobe._native import CodeMap, NativeError
from tests.elfwriter import DT_RELR, DT_RELRSZ, EXEC, ElfWriter

TEXT = 0x1000
LIBC = "/lib/x86_64-linux-gnu/libc.so.6"


def code(text: str) -> bytes:
    return bytes.fromhex(text)


def kinds(code_map: CodeMap) -> dict[int, set[str]]:
    found: dict[int, set[str]] = defaultdict(set)
    for vaddr, kind in code_map.targets(0, 1 << 50):
        found[vaddr].add(kind)
    return found


def compiled(source: str, folder: Path, *flags: str, suffix: str = ".c") -> str:
    path = folder / f"source{suffix}"
    path.write_text(source)
    binary = folder / "binary"
    compiler = "g++" if suffix == ".cpp" else "gcc"
    subprocess.run([compiler, "-o", binary, path, *flags], check=True, capture_output=True)
    return str(binary)


def symbols(path: str) -> dict[str, int]:
    listing = subprocess.run(["nm", path], check=True, capture_output=True, text=True).stdout
    return {name: int(vaddr, 16) for vaddr, _, name in re.findall(r"^([0-9a-f]+) (\w) (\S+)$", listing, re.M)}


# ---------------------------------------------------------------- bytes


def test_direct_branches_calls_and_where_they_return(tmp_path: Path) -> None:
    # 0: jne 4; 2: call 0xa; 7: jmp 7; 9: ret; a: endbr64; ret
    text = code("75 02 e8 03 00 00 00 eb fe c3 f3 0f 1e fa c3")
    made = CodeMap(ElfWriter().text(TEXT, text).function("f", TEXT, 10).write(tmp_path / "a"))
    found = kinds(made)
    assert found[TEXT + 4] == {"branch"}
    assert found[TEXT + 7] == {"return", "branch"}
    assert found[TEXT + 10] == {"call", "endbr"}
    assert found[TEXT] == {"function"}
    assert set(found) == {TEXT, TEXT + 4, TEXT + 7, TEXT + 10}
    assert made.targets(TEXT + 4, TEXT + 7) == []
    assert made.targets(TEXT + 3, TEXT + 5) == [(TEXT + 4, "branch")]


def test_loops_and_jrcxz_and_xbegin_are_branches(tmp_path: Path) -> None:
    text = code("e2 02 e3 02 e1 02 c7 f8 04 00 00 00 90 90 90 90 90")
    found = kinds(CodeMap(ElfWriter().text(TEXT, text).write(tmp_path / "a")))
    assert {TEXT + 4, TEXT + 6, TEXT + 8, TEXT + 16} <= set(found)


def test_decoding_begins_anew_at_every_symbol(tmp_path: Path) -> None:
    # Data that would swallow the first bytes of g: movabs with 8 bytes of immediate.
    text = code("c3 48 b8 55 eb fd c3 90 90 90 90 90 90 90 90 90")
    plain = CodeMap(ElfWriter().text(TEXT, text).write(tmp_path / "a"))
    assert not plain.is_boundary(TEXT + 3)
    made = CodeMap(ElfWriter().text(TEXT, text).function("g", TEXT + 3, 4).write(tmp_path / "b"))
    assert made.is_boundary(TEXT + 3) and made.is_boundary(TEXT + 4) and not made.is_boundary(TEXT + 5)
    assert kinds(made)[TEXT + 3] == {"function", "branch"}


def test_function_bounds(tmp_path: Path) -> None:
    writer = ElfWriter().text(TEXT, bytes(0x100)).function("f", TEXT, 0x10).function("g", TEXT + 0x20)
    made = CodeMap(writer.function("h", TEXT + 0x40).write(tmp_path / "a"))
    assert made.function_bounds(TEXT + 0xF) == (TEXT, TEXT + 0x10)
    assert made.function_bounds(TEXT + 0x10) is None
    assert made.function_bounds(TEXT + 0x3F) == (TEXT + 0x20, TEXT + 0x40)
    assert made.function_bounds(TEXT + 0xFF) == (TEXT + 0x40, TEXT + 0x100)
    assert made.function_bounds(0) is None and made.function_bounds(1 << 63) is None
    assert made.functions() == [(TEXT, TEXT + 0x10), (TEXT + 0x20, TEXT + 0x40), (TEXT + 0x40, TEXT + 0x100)]


def test_bytes_end_with_the_section(tmp_path: Path) -> None:
    made = CodeMap(ElfWriter().text(TEXT, code("90 c3")).data(0x3000, b"data").write(tmp_path / "a"))
    assert made.bytes(TEXT + 1, 64) == code("c3")
    assert made.bytes(0x3000, 4) == b"" and made.bytes((1 << 64) - 1, 4) == b""


def test_relocated_pointers_are_targets(tmp_path: Path) -> None:
    writer = ElfWriter().text(TEXT, bytes(64)).relative(0x2000, [(0x6000, TEXT + 5), (0x6008, 0x6000)])
    found = kinds(CodeMap(writer.data(0x6000, bytes(16)).write(tmp_path / "a")))
    assert found[TEXT + 5] == {"pointer"} and 0x6000 not in found


def test_what_stands_in_a_relocated_place_is_a_target(tmp_path: Path) -> None:
    writer = ElfWriter().text(TEXT, bytes(64)).relative(0x2000, [(0x6000, 0x6000)])
    found = kinds(CodeMap(writer.data(0x6000, struct.pack("<Q", TEXT + 7)).write(tmp_path / "a")))
    assert found[TEXT + 7] == {"pointer"}


def test_packed_relocations_are_targets(tmp_path: Path) -> None:
    # One address, then a bitmap: the words after it with bits 0 and 2.
    table = struct.pack("<QQ", 0x5000, 0b1011)
    words = struct.pack("<4Q", TEXT + 3, TEXT + 9, TEXT + 20, TEXT + 30)
    writer = ElfWriter().text(TEXT, bytes(64)).data(0x4000, table, ".relr.dyn").data(0x5000, words)
    writer.dynamic(0x6000, [(DT_RELR, 0x4000), (DT_RELRSZ, len(table))])
    found = kinds(CodeMap(writer.write(tmp_path / "a")))
    assert {TEXT + 3, TEXT + 9, TEXT + 30} <= set(found) and TEXT + 20 not in found


def test_at_a_fixed_address_words_and_immediates_are_pointers(tmp_path: Path) -> None:
    # mov $0x1009,%edi; movabs $0x100b,%rax; nops
    text = code("bf 09 10 00 00 48 b8 0b 10 00 00 00 00 00 00") + b"\x90" * 20
    writer = ElfWriter(type=EXEC).text(TEXT, text).data(0x3000, struct.pack("<QQ", 7, TEXT + 17))
    found = kinds(CodeMap(writer.write(tmp_path / "a")))
    assert {TEXT + 9, TEXT + 11, TEXT + 17} <= set(found)
    moving = ElfWriter().text(TEXT, text).data(0x3000, struct.pack("<QQ", 7, TEXT + 17))
    assert kinds(CodeMap(moving.write(tmp_path / "b"))) == {}


def table_user(text: str, table: bytes, folder: Path) -> CodeMap:
    """A function at TEXT, a table at 0x2000."""
    body = code(text)
    writer = ElfWriter().text(TEXT, body + b"\x90" * 32).data(0x2000, table, ".rodata", writable=False)
    return CodeMap(writer.function("f", TEXT, len(body) + 32).write(folder / "table"))


SWITCH = "48 8d 15 f9 0f 00 00 48 63 04 ba 48 01 d0 3e ff e0"
"""lea 0x2000(%rip),%rdx; movslq (%rdx,%rdi,4),%rax; add %rdx,%rax; notrack jmp *%rax"""


def test_a_table_of_relative_entries_ends_at_the_first_that_is_no_code(tmp_path: Path) -> None:
    entries = [TEXT + 20 - 0x2000, TEXT + 22 - 0x2000, 0x44, TEXT + 24 - 0x2000]
    made = table_user(SWITCH, struct.pack("<4i", *entries), tmp_path)
    found = kinds(made)
    assert found[TEXT + 20] == found[TEXT + 22] == {"table"} and TEXT + 24 not in found
    assert not made.has_unknown_jumps(TEXT)


def test_a_table_without_one_good_entry_is_no_table(tmp_path: Path) -> None:
    made = table_user(SWITCH, struct.pack("<2i", 0x44, 0x48), tmp_path)
    assert made.has_unknown_jumps(TEXT) and made.unknown_jumps() == [TEXT + 14]


def test_entries_relative_to_something_else_than_the_table(tmp_path: Path) -> None:
    # lea table(%rip),%rdx; lea f+0x18(%rip),%rcx; movslq (%rdx,%rdi,4),%rax; add %rcx,%rax; jmp *%rax
    text = "48 8d 15 f9 0f 00 00 48 8d 0d 0a 00 00 00 48 63 04 ba 48 01 c8 ff e0"
    made = table_user(text, struct.pack("<3i", 3, 5, 0x7000), tmp_path)
    found = kinds(made)
    assert found[TEXT + 0x18 + 3] == found[TEXT + 0x18 + 5] == {"table"}
    assert not made.has_unknown_jumps(TEXT)


@pytest.mark.parametrize(
    "text",
    [
        "48 8b 07 ff e0",  # mov (%rdi),%rax; jmp *%rax
        "ff 67 10",  # jmp *0x10(%rdi)
        "48 89 f0 ff e0",  # a caller's pointer
        "74 05 48 89 f0 eb 03 48 8b 07 ff e0",  # one or the other
        "e8 00 00 00 00 ff e0",  # what a call returned
        "64 48 33 3c 25 30 00 00 00 48 c1 cf 11 ff e7",  # glibc's mangled pointers
        "48 0f 45 07 ff e0",  # cmovne (%rdi),%rax
    ],
)
def test_jumps_to_pointers_are_known(text: str, tmp_path: Path) -> None:
    assert not table_user(text, b"", tmp_path).has_unknown_jumps(TEXT)


@pytest.mark.parametrize(
    "text",
    [
        "48 01 f0 ff e0",  # add %rsi,%rax
        "0f b7 07 48 01 f0 ff e0",  # 2-byte entries
        "48 8d 04 fa ff e0",  # lea (%rdx,%rdi,8),%rax
        "48 6b c7 0c ff e0",  # imul $12
        "75 03 48 8b 07 74 03 48 ff c0 ff e0",  # a pointer or one more
        "48 63 04 ba 48 01 d0 ff e0",  # a table, but nobody knows which
    ],
)
def test_jumps_to_computed_places_are_unknown(text: str, tmp_path: Path) -> None:
    assert table_user(text, b"", tmp_path).has_unknown_jumps(TEXT)


def test_places_outside_of_any_function_are_unknown(tmp_path: Path) -> None:
    made = CodeMap(ElfWriter().text(TEXT, bytes(16)).function("f", TEXT, 4).write(tmp_path / "a"))
    assert made.has_unknown_jumps(TEXT + 8) and not made.has_unknown_jumps(TEXT)


# ---------------------------------------------------------------- compiled files

SWITCHES = r"""
int other(int);
int f(int x, int y) {
    switch (x) {
    case 1: return other(y) + 1;   case 2: return other(y) * 3;  case 3: return other(y) ^ 5;
    case 4: return other(y) - 7;   case 5: return other(y) / 9;  case 6: return other(y) % 11;
    case 7: return other(y) | 13;  case 8: return other(y) & 15; default: return y;
    }
}
int (*const table[])(int, int) = { f };
int other(int x) { asm volatile (""); return x; }
int main(int n, char **v) { (void)v; return table[0](n, n); }
"""


@pytest.mark.parametrize("strip", [[], ["-s"]])
@pytest.mark.parametrize("kind", [["-fPIE", "-pie"], ["-fno-pie", "-no-pie"]])
def test_a_compiled_switch(tmp_path: Path, strip: list[str], kind: list[str]) -> None:
    flags = ["-O2", "-fno-inline", "-fcf-protection=none", *kind]
    path = compiled(SWITCHES, tmp_path, *flags)
    f = symbols(path)["f"]
    if strip:
        subprocess.run(["strip", path], check=True)
    made = CodeMap(path)
    bounds = made.function_bounds(f)
    assert bounds and bounds[0] == f
    in_table = {t for t, why in made.targets(*bounds) if why in ("table", "pointer")}
    assert len(in_table) >= 8
    assert all(made.is_boundary(t) for t in in_table)
    assert not made.has_unknown_jumps(f)


def test_landing_pads(tmp_path: Path) -> None:
    source = """
    void may_throw(int);
    struct Guard { ~Guard(); };
    int f(int x) { Guard g; try { may_throw(x); } catch (int e) { return e; } catch (...) { return 2; } return 0; }
    void may_throw(int x) { if (x > 3) throw x; }
    Guard::~Guard() { asm volatile (""); }
    int main(int n, char **) { return f(n); }
    """
    path = compiled(source, tmp_path, "-O2", "-fno-inline", suffix=".cpp")
    made = CodeMap(path)
    f = symbols(path)["_Z1fi"]
    pads = {vaddr for vaddr, why in made.targets(0, 1 << 50) if why == "landing-pad"}
    assert len(pads) >= 2
    assert all(made.is_boundary(pad) for pad in pads)
    assert not made.has_unknown_jumps(f)


def test_a_back_edge_to_the_second_byte(tmp_path: Path) -> None:
    source = """
    .globl f
    .type f, @function
    f: .cfi_startproc
       .byte 0x40                   # a prefix that the loop leaves out
    1: lea 1(%rax), %eax
       dec %edi
       jne 1b
       ret
       .cfi_endproc
    .size f, .-f
    """
    path = compiled(source, tmp_path, "-shared", "-nostdlib", suffix=".s")
    made = CodeMap(path)
    f = symbols(path)["f"]
    assert made.targets(f, f + 5) == [(f + 1, "branch")]
    assert made.is_boundary(f) and not made.is_boundary(f + 1)


def test_a_file_without_sections_is_known_by_its_unwind_table(tmp_path: Path) -> None:
    path = compiled(SWITCHES, tmp_path, "-O2", "-fno-inline", "-fcf-protection=none", "-fPIE", "-pie")
    f = symbols(path)["f"]
    whole = CodeMap(path)
    data = bytearray(Path(path).read_bytes())
    struct.pack_into("<Q", data, 40, 0)  # e_shoff
    struct.pack_into("<HHH", data, 58, 64, 0, 0)
    Path(path).write_bytes(data)
    bare = CodeMap(path)
    assert bare.function_bounds(f) == whole.function_bounds(f)
    assert not bare.has_unknown_jumps(f)
    for kind in ("table", "pointer", "branch"):
        assert {t for t, why in whole.targets(0, 1 << 40) if why == kind} <= {t for t, _ in bare.targets(0, 1 << 40)}


# ---------------------------------------------------------------- real files


def test_direct_targets_of_libc_are_those_of_objdump() -> None:
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", "-j", ".text", LIBC], check=True, capture_output=True, text=True
    ).stdout
    branch = re.compile(r"^ +[0-9a-f]+:\t(?:\w+ )*(j\w+|call|loop\w*|xbegin)(?:,p[nt])? +(?:0x)?([0-9a-f]+) <", re.M)
    theirs = {(int(target, 16), "call" if name == "call" else "branch") for name, target in branch.findall(listing)}
    made = CodeMap(LIBC)
    ours = {found for found in made.targets(0, 1 << 50) if found[1] in ("call", "branch")}
    assert len(theirs) > 20_000
    missing = {t for t in theirs - ours if made.bytes(t[0], 1)}
    print(f"libc: {len(theirs)} direct targets, {len(missing)} of them not ours: {sorted(missing)[:5]}")
    assert not missing


def test_reading_libcrypto_takes_no_time() -> None:
    path = Path("/lib/x86_64-linux-gnu/libcrypto.so.3")
    if not path.exists():
        pytest.skip("no libcrypto")
    best = 1e9
    for _ in range(3):
        start = time.process_time()
        CodeMap(str(path))
        best = min(best, time.process_time() - start)
    print(f"libcrypto: {best * 1000:.0f} ms")
    assert best < 0.3  # about 50 ms on a machine of its own


# ---------------------------------------------------------------- hostile files


def test_what_is_no_elf_file_is_told(tmp_path: Path) -> None:
    for name, data in {
        "empty": b"",
        "text": b"#!/bin/sh\n" * 40,
        "class32": b"\x7fELF\x01\x01\x01" + bytes(100),
    }.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(NativeError) as error:
            CodeMap(str(tmp_path / name))
        assert error.value.args[0] == "bad-elf"
    with pytest.raises(NativeError) as error:
        CodeMap(ElfWriter(machine=183).text(TEXT, bytes(4)).write(tmp_path / "arm"))
    assert error.value.args[0] == "bad-elf" and error.value.args[2] == 18
    with pytest.raises(NativeError) as error:
        CodeMap(str(tmp_path / "absent"))
    assert error.value.args[0] == "io"


def test_overlapping_and_endless_segments_are_refused(tmp_path: Path) -> None:
    data = bytearray(ElfWriter().text(TEXT, bytes(64)).data(0x3000, bytes(64)).bytes())
    struct.pack_into("<Q", data, 64 + 32, 1 << 60)  # p_filesz
    (tmp_path / "endless").write_bytes(data)
    overlapping = ElfWriter().text(TEXT, bytes(64)).data(TEXT + 8, bytes(64)).bytes()
    (tmp_path / "overlapping").write_bytes(overlapping)
    for name in ("endless", "overlapping"):
        with pytest.raises(NativeError) as error:
            CodeMap(str(tmp_path / name))
        assert error.value.args[0] == "bad-elf"


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_are_read_or_refused(tmp_path: Path, seed: int) -> None:
    chosen = random.Random(seed)
    good = Path(compiled(SWITCHES, tmp_path, "-O2")).read_bytes()
    target = tmp_path / "damaged"
    for _ in range(150):
        data = bytearray(good)
        if chosen.random() < 0.3:
            del data[chosen.randrange(len(data)) :]
        for _ in range(chosen.randrange(1, 40)):
            if data:
                # Headers and tables are where damage matters.
                at = chosen.choice([chosen.randrange(len(data)), chosen.randrange(min(0x400, len(data)))])
                data[at] = chosen.choice([0, 1, 0x7F, 0x80, 0xFF, chosen.randrange(256)])
        target.write_bytes(data)
        try:
            made = CodeMap(str(target))
        except NativeError as error:
            assert error.args[0] == "bad-elf" and error.args[1]
            continue
        for start, _ in made.functions()[:20]:
            made.targets(start, start + 100)
            made.is_boundary(start + 3)
            made.has_unknown_jumps(start)
