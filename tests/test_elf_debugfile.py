"""Symbols that are not in the object itself: separate debug files and mini-debuginfo, good and broken."""

from __future__ import annotations

import lzma
import os
import shutil
from pathlib import Path

import pytest

from ptwprobe.errors import InputError
from ptwprobe.probe import debugfile
from ptwprobe.probe.debugfile import symbol_table
from ptwprobe.probe.elffile import ElfFile
from ptwprobe.probe.symbols import Symbol, SymbolTable
from tests.elf_builds import add_debuglink, add_mini_debuginfo, build_id, compiled, nm, run, split_debug


def found(table: SymbolTable, pattern: str) -> list[Symbol]:
    return table.find(pattern)[0]


SECRET = """
__attribute__((noinline)) static int hidden_one(int x) { asm volatile(""); return x + 3; }
int seen(int x) { return hidden_one(x); }
"""


@pytest.fixture
def debug_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "debug"
    monkeypatch.setattr(debugfile, "DEBUG_ROOT", str(root))
    return root


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    return compiled(tmp_path / "libsecret.so", SECRET, "-O1", "-shared", "-fPIC", "-Wl,--build-id")


def hidden(binary: Path) -> list[int]:
    return [s.vaddr for s in found(symbol_table(ElfFile(str(binary)), str(binary)), "hidden_one")]


def test_separate_debug_file_by_build_id(secret: Path, debug_root: Path) -> None:
    expected = nm(secret)["hidden_one"]
    identity = build_id(secret)
    place = debug_root / ".build-id" / identity[:2] / f"{identity[2:]}.debug"
    place.parent.mkdir(parents=True)
    split_debug(secret, place)
    assert hidden(secret) == expected
    # A debug file of another build is passed over.
    other = compiled(
        secret.with_name("libother.so"), SECRET + "int more;\n", "-O2", "-shared", "-fPIC", "-Wl,--build-id"
    )
    shutil.copy(other, place)
    os.utime(place, ns=(1, 1))
    assert hidden(secret) == []
    place.unlink()
    os.mkfifo(place)
    assert hidden(secret) == []


def test_separate_debug_file_in_the_targets_file_system_comes_first(secret: Path, debug_root: Path) -> None:
    root, identity = secret.parent / "root", build_id(secret)
    expected = nm(secret)["hidden_one"]
    place = Path(f"{root}{debug_root}/.build-id/{identity[:2]}/{identity[2:]}.debug")
    place.parent.mkdir(parents=True)
    split_debug(secret, place)
    table = symbol_table(ElfFile(str(secret)), "/inside/libsecret.so", str(root))
    assert [s.vaddr for s in found(table, "hidden_one")] == expected
    assert hidden(secret) == []


@pytest.mark.parametrize("folder", [".", ".debug", "root"])
def test_separate_debug_file_by_debuglink(secret: Path, debug_root: Path, folder: str) -> None:
    run("objcopy", "--remove-section=.note.gnu.build-id", secret)
    expected = nm(secret)["hidden_one"]
    home = debug_root / str(secret.parent).lstrip("/") if folder == "root" else secret.parent / folder
    home.mkdir(parents=True, exist_ok=True)
    debug = home / "libsecret.debug"
    split_debug(secret, debug)
    add_debuglink(secret, debug)
    assert hidden(secret) == expected
    debug.write_bytes(debug.read_bytes() + b"x")  # the CRC is another now
    assert hidden(secret) == []


def test_mini_debuginfo(secret: Path) -> None:
    expected = nm(secret)["hidden_one"]
    add_mini_debuginfo(secret)
    assert hidden(secret) == expected
    assert len(found(symbol_table(ElfFile(str(secret))), "seen")) == 1


@pytest.mark.parametrize("data", [b"no xz at all", lzma.compress(b"no ELF file"), lzma.compress(bytes(5000))[:-9]])
def test_broken_mini_debuginfo_is_an_error(secret: Path, data: bytes) -> None:
    run("strip", secret)
    section = secret.with_name("section")
    section.write_bytes(data)
    run("objcopy", "--add-section", f".gnu_debugdata={section}", secret)
    with pytest.raises(InputError):
        hidden(secret)
