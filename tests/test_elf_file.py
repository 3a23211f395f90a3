"""ELF files and their symbols, against readelf and nm; and files that are malformed on purpose."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ptwprobe import _native
from ptwprobe.probe.debugfile import symbol_table
from ptwprobe.probe.dynamic import relocations, soname
from ptwprobe.probe.elffile import ElfFile
from ptwprobe.probe.symbols import Symbol, SymbolTable, squeeze
from tests.elf_builds import build_id, compiled, nm, run

LIBRARIES = Path("/usr/lib/x86_64-linux-gnu")
REAL = [
    path
    for path in (
        LIBRARIES / "libc.so.6",
        LIBRARIES / "libcrypto.so.3",
        LIBRARIES / "libstdc++.so.6",
        LIBRARIES / "ld-linux-x86-64.so.2",
        Path("/usr/bin/python3.11"),
    )
    if path.exists()
]

TWO_FILES = """
__attribute__((noinline, noclone)) static int helper(int x) { asm volatile("" ::: "memory"); return x + 1; }
int use_%s(int x) { return helper(x) + helper(x + 1); }
"""


def readelf_functions(path: Path, *flags: str) -> set[tuple[str, int]]:
    """(name without version, vaddr) of the defined functions and IFUNCs in a symbol table."""
    out = set()
    for line in run("readelf", "--wide", *flags, path).splitlines():
        words = line.split()
        if len(words) >= 8 and words[3] in ("FUNC", "IFUNC") and words[6] not in ("UND", "ABS"):
            out.add((words[7].partition("@")[0], int(words[1], 16)))
    return out


def dynamic_lines(path: Path) -> list[list[str]]:
    """The words of readelf's lines for dynamic symbols that have a name."""
    lines = [line.split() for line in run("readelf", "--wide", "--dyn-syms", path).splitlines()]
    return [words for words in lines if len(words) >= 8 and words[0] != "Num:"]


def pairs(table: SymbolTable) -> set[tuple[str, int]]:
    return {(symbol.name, symbol.vaddr) for symbol in table.functions}


def found(table: SymbolTable, pattern: str) -> list[Symbol]:
    return table.find(pattern)[0]


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_dynamic_symbols_are_those_of_readelf(path: Path, tmp_path: Path) -> None:
    stripped = tmp_path / "stripped"
    # Without build id and symtab, so that only dynsym is left.
    run(
        "objcopy",
        "--strip-all",
        "--remove-section=.note.gnu.build-id",
        "--remove-section=.gnu_debuglink",
        path,
        stripped,
    )
    expected = readelf_functions(path, "--dyn-syms")
    assert pairs(symbol_table(ElfFile(str(stripped)))) == expected
    assert len(expected) > 20


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name)
def test_build_id_soname_and_segments_are_those_of_readelf(path: Path) -> None:
    elf = ElfFile(str(path))
    assert elf.build_id == build_id(path)
    in_file = elf.file_offset(elf.build_id_vaddr or 0)
    assert in_file is not None
    assert elf.read_at(in_file, len(elf.build_id) // 2).hex() == elf.build_id
    dynamic = run("readelf", "--wide", "--dynamic", path)
    assert soname(elf) == (dynamic.partition("Library soname: [")[2].partition("]")[0])
    loads = [line.split() for line in run("readelf", "--wide", "--segments", path).splitlines() if " LOAD " in line]
    assert [(s.file_offset, s.vaddr, s.file_size) for s in elf.loads] == [
        (int(words[1], 16), int(words[2], 16), int(words[4], 16)) for words in loads
    ]


def test_relocations_are_those_of_readelf() -> None:
    path = REAL[0]
    expected = {
        int(line.split()[0], 16)
        for line in run("readelf", "--wide", "--relocs", path).splitlines()
        if "R_X86_64_IRELATIV" in line
    }
    assert {r.vaddr for r in relocations(ElfFile(str(path))) if r.type == 37} == expected


def test_static_functions_of_equal_names_are_all_found(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.c").write_text(TWO_FILES % name)
    binary = tmp_path / "libtwo.so"
    run("gcc", "-O1", "-g0", "-shared", "-fPIC", "-o", binary, tmp_path / "a.c", tmp_path / "b.c")
    symbols = found(symbol_table(ElfFile(str(binary))), "helper")
    assert [s.vaddr for s in symbols] == sorted(nm(binary)["helper"])
    assert {s.source for s in symbols} == {"a.c", "b.c"}
    assert all(s.local for s in symbols)


def test_aliases_are_one_function(tmp_path: Path) -> None:
    binary = compiled(
        tmp_path / "libalias.so",
        'int real(int x) { return x; }\nint other(int) __attribute__((alias("real"), weak));\n',
        "-shared",
        "-fPIC",
        "-nostdlib",
    )
    table = symbol_table(ElfFile(str(binary)))
    assert [s.name for s in found(table, "*")] == ["real"]
    assert [s.name for s in found(table, "oth*")] == ["other"]
    assert {s.name for s in table.at(found(table, "real")[0].vaddr)} == {"real", "other"}


def test_versions_choose_the_default_unless_named(tmp_path: Path) -> None:
    script = tmp_path / "versions"
    script.write_text("V1 { global: f; local: *; };\nV2 { global: f; } V1;\n")
    source = """
    __asm__(".symver f_old, f@V1\\n.symver f_new, f@@V2");
    int f_old(int x) { return x; }
    int f_new(int x) { return x + 1; }
    """
    flags = ("-shared", "-fPIC", f"-Wl,--version-script={script}")
    binary = compiled(tmp_path / "libversions.so", source, *flags)
    for strip in (False, True):
        if strip:
            run("strip", binary)
        table = symbol_table(ElfFile(str(binary)))
        by_version = {version: [s.vaddr for s in found(table, f"f{version}")] for version in ("", "@V1", "@@V2", "@V3")}
        listed = {words[7]: int(words[1], 16) for words in dynamic_lines(binary)}
        assert by_version == {
            "": [listed["f@@V2"]],
            "@V1": [listed["f@V1"]],
            "@@V2": [listed["f@@V2"]],
            "@V3": [],
        }


def test_zero_size_symbols_reach_to_the_next_function_or_the_end_of_the_section(tmp_path: Path) -> None:
    source = """
    __asm__(".text\\n.globl first,second,last\\n"
            ".type first,@function\\n.type second,@function\\n.type last,@function\\n"
            "first: nop\\nnop\\nret\\nsecond: nop\\nret\\nlast: nop\\nnop\\nnop\\nret\\n");
    """
    binary = compiled(tmp_path / "libzero.so", source, "-shared", "-fPIC", "-nostdlib")
    elf = ElfFile(str(binary))
    table = symbol_table(elf)
    sizes = {name: table.size(found(table, name)[0]) for name in ("first", "second", "last")}
    assert sizes == {"first": 3, "second": 2, "last": 4}
    second = found(table, "second")[0]
    assert table.containing(second.vaddr + 1) == second
    assert table.containing(second.vaddr + 4).name == "last"  # type: ignore[union-attr]
    assert table.containing(0) is None


def test_cold_parts_and_plt_entries_are_no_functions(tmp_path: Path) -> None:
    source = """
    #include <stdexcept>
    #include <string>
    extern "C" int puts(const char *);
    extern "C" __attribute__((noinline)) int work(int x) {
        std::string s = "abc";
        if (x < 0) throw std::runtime_error("bad " + s);
        return x + 1;
    }
    int main(int argc, char **) { return work(argc) + (int)(long)&puts; }
    """
    # In a program that is not position-independent, &puts is a PLT entry of its own.
    binary = compiled(tmp_path / "cold", source, "-O2", "-no-pie", "-fno-pie", compiler="g++")
    assert "work.cold" in nm(binary)
    assert any(words[3:4] == ["FUNC"] and int(words[1], 16) for words in dynamic_lines(binary) if "puts" in words[7])
    table = symbol_table(ElfFile(str(binary)))
    names = {symbol.name for symbol in table.functions}
    assert "work" in names
    assert not {"work.cold", "puts"} & names
    assert found(table, "*cold*") == []


def test_clones_have_names_of_their_own_and_are_proposed(tmp_path: Path) -> None:
    source = """
    __attribute__((noinline)) static int scaled(int *unused, int x, int y) { asm volatile(""); return x * y; }
    int twice(int x) { return scaled(0, x, 2); }
    """
    binary = compiled(tmp_path / "libclone.so", source, "-O2", "-shared", "-fPIC")
    [clone] = [name for name in nm(binary) if name.startswith("scaled.")]
    table = symbol_table(ElfFile(str(binary)))
    assert found(table, "scaled") == []
    assert table.near("scaled")[0] == clone
    assert len(found(table, clone)) == 1


CPP = """
namespace ns {
struct Box {
    int v;
    __attribute__((noinline)) int get(int k) const { return v + k; }
    bool operator==(const Box &o) const;
};
bool Box::operator==(const Box &o) const { return v == o.v; }
__attribute__((noinline)) int over(int a) { return a; }
__attribute__((noinline)) int over(const char *a) { return *a; }
template <typename T> __attribute__((noinline)) T twice(T x) { return x + x; }
}
int use(int a, const char *s, ns::Box b) { return ns::over(a) + ns::over(s) + ns::twice<int>(a) + b.get(a) + (b == b); }
"""


def test_cpp_names_match_with_and_without_parameters(tmp_path: Path) -> None:
    binary = compiled(tmp_path / "libcpp.so", CPP, "-shared", "-fPIC", "-O1", compiler="g++")
    table = symbol_table(ElfFile(str(binary)))

    def raw(pattern: str) -> list[str]:
        return [s.name for s in found(table, pattern)]

    assert raw("ns::Box::get") == raw("ns::Box::get(int) const") == ["_ZNK2ns3Box3getEi"]
    assert raw("_ZNK2ns3Box3getEi") == ["_ZNK2ns3Box3getEi"]
    assert raw("ns::Box::operator==") == ["_ZNK2ns3BoxeqERKS0_"]
    assert sorted(raw("ns::over")) == ["_ZN2ns4overEPKc", "_ZN2ns4overEi"]
    assert raw("ns::over(char const*)") == raw("ns::over(char const *)") == ["_ZN2ns4overEPKc"]
    assert raw("ns::twice<int>") == ["_ZN2ns5twiceIiEET_S1_"]
    assert set(raw("ns::over*")) == set(raw("ns::over"))
    assert raw("nothing::*") == []
    assert table.near("ns::ovre")[:1] == ["ns::over"]


@pytest.mark.skipif(not (LIBRARIES / "libstdc++.so.6").exists(), reason="needs libstdc++")
def test_names_of_libstdcpp_demangle_as_binutils_do() -> None:
    table = readelf_functions(LIBRARIES / "libstdc++.so.6", "--dyn-syms")
    # Special names (thunks and the like) are worded differently.
    names = sorted(name for name, _ in table if name.startswith("_Z") and not name.startswith(("_ZT", "_ZG")))
    ours = _native.demangle_all(names)
    theirs = "\n".join(run("c++filt", "-p", *names[i : i + 500]).strip() for i in range(0, len(names), 500)).split("\n")
    differ = [
        (name, both, other)
        for name, both, other in zip(names, ours, theirs, strict=True)
        if both is None or squeeze(both[1]) != squeeze(other)
    ]
    assert differ == []


def test_rust_names_are_without_hash() -> None:
    assert _native.demangle("_ZN4core3fmt5write17h0123456789abcdefE") == ("core::fmt::write",) * 2
    assert squeeze("<a::S>::m") == squeeze("a::S::m")
    assert squeeze("<a::S as a::T>::m") != squeeze("a::S::m")
    assert _native.demangle("main") is None


@pytest.mark.parametrize(
    ("library", "pattern", "limit_ms"),
    [("libcrypto.so.3", "EVP_EncryptUpdate", 150), ("libc.so.6", "str*", 300), ("libc.so.6", "malloc", 150)],
)
def test_finding_functions_is_fast(library: str, pattern: str, limit_ms: int) -> None:
    path = LIBRARIES / library
    if not path.exists():
        pytest.skip(f"needs {library}")
    best = 1e9
    for _ in range(3):
        start = time.perf_counter()
        assert found(symbol_table(ElfFile(str(path)), str(path)), pattern)
        best = min(best, time.perf_counter() - start)
    assert best * 1000 < limit_ms
