"""ELF files that are no ELF files, for other machines, or malformed on purpose: only our own errors come out."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ptwprobe.errors import InputError, PtwprobeError, UnsupportedError
from ptwprobe.probe.debugfile import symbol_table
from ptwprobe.probe.dynamic import relocations, soname
from ptwprobe.probe.elffile import ElfFile
from ptwprobe.probe.symbols import SymbolTable, Table
from tests.elf_builds import add_mini_debuginfo, compiled
from tests.test_elf_debugfile import SECRET

PROGRAM = Path("/proc/self/exe")


def test_what_is_no_elf_file_is_told(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path, tmp_path / "absent", Path("/dev/zero"), Path("a\0b")):
        with pytest.raises(InputError):
            ElfFile(str(path))
    text = tmp_path / "text"
    text.write_text("#!/bin/sh\n" * 20)
    with pytest.raises(InputError, match="no ELF file"):
        ElfFile(str(text))


def test_other_machines_are_unsupported() -> None:
    data = bytearray(PROGRAM.read_bytes()[:4096])
    for offset, value, word in ((4, 1, "32-bit"), (18, 183, "183")):
        changed = bytearray(data)
        changed[offset] = value
        with pytest.raises(UnsupportedError, match=word):
            ElfFile("", "x", bytes(changed))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("small")
    binary = compiled(folder / "libsmall.so", SECRET, "-shared", "-fPIC", "-nostdlib", "-Wl,--build-id")
    add_mini_debuginfo(binary)
    return binary.read_bytes()


def use_everything(data: bytes) -> None:
    elf = ElfFile("", "x", data)
    assert len(elf.build_id) <= 128
    soname(elf)
    list(relocations(elf))
    table = symbol_table(elf)
    for symbol in table.find("*")[0]:
        table.size(symbol)
        elf.code(symbol.vaddr, 16)
    table.find("seen")
    table.near("sen")


@settings(max_examples=300, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_changed_bytes_raise_our_errors_only(small: bytes, data: st.DataObject) -> None:
    changed = bytearray(small)
    headers = range(len(small) - 64 * 20, len(small))
    positions = st.one_of(
        st.integers(16, 63), st.sampled_from(headers), st.integers(64, 512), st.integers(0, len(small) - 1)
    )
    for _ in range(data.draw(st.integers(1, 6))):
        changed[data.draw(positions)] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
    try:
        use_everything(bytes(changed))
    except PtwprobeError as error:
        assert error.hint


def test_a_file_cut_off_anywhere_raises_our_errors_only(small: bytes) -> None:
    for size in range(0, len(small), 97):
        try:
            use_everything(small[:size])
        except PtwprobeError as error:
            assert error.hint


def test_names_that_share_their_bytes_do_not_take_memory_without_bound() -> None:
    strings = b"\0" + b"n" * 65_000 + b"\0"
    row = struct.Struct("<IBBHQQ")
    rows = b"".join(row.pack(1 + i % 60_000, 0x12, 0, 1, 0x1000 + i, 1) for i in range(20_000))
    elf = ElfFile("/proc/self/exe")
    with pytest.raises(InputError, match="symbol table"):
        SymbolTable(elf, [Table(rows, strings)]).find("*")
    assert SymbolTable(elf, [Table(rows, strings)]).named("nope") == []


def test_names_that_are_no_text_are_escaped() -> None:
    names = [b"plain", b"\x1b[31mred", b"_Z1f\xff", b"_Z1g\xed\xb3\xbf", "_Z1ö".encode(), b"two\nlines"]
    strings = b"\0" + b"\0".join(names) + b"\0"
    elf = ElfFile("/proc/self/exe")
    code = next(load.vaddr for load in elf.loads if load.executable)
    row = struct.Struct("<IBBHQQ")
    rows = b"".join(row.pack(strings.index(name), 0x12, 0, 1, code + i, 1) for i, name in enumerate(names))
    table = SymbolTable(elf, [Table(rows, strings)])
    shown = [symbol.name for symbol in table.find("*")[0]]
    assert shown == ["plain", "\\x1b[31mred", "_Z1f\\xff", "_Z1g\\xed\\xb3\\xbf", "_Z1ö", "two\\nlines"]
    assert [table.display(symbol) for symbol in table.functions] == shown
