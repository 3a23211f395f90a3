"""Probes → sites, in running programs and in files; every address is checked against binutils."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ptwprobe.errors import ProbeSyntaxError, RefusalReason, RefusedError, ResolveError
from ptwprobe.probe.elf import event_name, list_functions, resolve_file
from ptwprobe.probe.spec import parse
from ptwprobe.process import Process
from tests.elf_builds import ENDBR, MAIN, PLAIN, TELLS, F, Start, compiled, nm, one, run, told


def test_an_ambiguous_static_function_is_an_error_that_says_which(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.c").write_text(
            '__attribute__((noinline, noclone)) static int helper(int x) { asm volatile(""); return x; }\n'
            f"int use_{name}(int x) {{ return helper(x); }}\n"
        )
    binary = tmp_path / "libtwo.so"
    run("gcc", "-O1", "-g0", "-shared", "-fPIC", "-o", binary, tmp_path / "a.c", tmp_path / "b.c")
    with pytest.raises(ResolveError, match="2 functions 'helper'") as caught:
        one("helper", binary)
    choices = re.findall(r"helper of (\w\.c): vaddr (0x\w+), write libtwo.so:(0x\w+)", caught.value.message)
    assert {(source, int(vaddr, 16)) for source, vaddr, _ in choices} == set(
        zip(["a.c", "b.c"], nm(binary)["helper"], strict=True)
    )
    for _, vaddr, file_offset in choices:
        site = one(f"libtwo:{file_offset} $arg1", binary)
        assert (site.vaddr, site.function, site.is_entry) == (int(vaddr, 16), "helper", True)
    assert [site.function for site in resolve_file(parse("help*"), str(binary))] == ["helper"] * 2


def test_endbr64_stays_and_the_site_is_still_the_entry(tmp_path: Path, start: Start) -> None:
    binary = compiled(tmp_path / "prog", TELLS + F + MAIN, *ENDBR)
    child = start(binary)
    process = Process(child.pid)
    site = one("f $arg1", process)
    assert site.runtime_addr == told(child) + 4
    assert (site.is_entry, site.vaddr - site.function_vaddr) == (True, 4)
    assert binary.read_bytes()[site.file_offset - 4 : site.file_offset] == b"\xf3\x0f\x1e\xfa"
    assert one("f+0x4 $arg1", process) == site
    assert one(f"prog:{site.file_offset:#x} $arg1", process) == site
    assert one(f"prog:{site.file_offset - 4:#x} $arg1", process) == site
    plain = one("f $arg1", compiled(tmp_path / "plain", TELLS + F + MAIN, *PLAIN))
    assert plain.vaddr == plain.function_vaddr


def test_offsets(tmp_path: Path) -> None:
    binary = compiled(tmp_path / "prog", TELLS + F + MAIN, *PLAIN)
    entry = one("f", binary)
    inside = one("f+0x3 %di", binary)
    assert (inside.vaddr, inside.is_entry, inside.function) == (entry.vaddr + 3, False, "f")
    assert (inside.function_vaddr, inside.function_size) == (entry.vaddr, entry.function_size)
    assert one(f"prog:{inside.file_offset:#x}", binary) == inside
    with pytest.raises(ResolveError, match="beyond the end of f"):
        one("f+0x1000", binary)
    for offset in ("0x0", "0x7fffffffffffffff", "0x10"):
        with pytest.raises(ResolveError, match="not in an executable segment") as caught:
            one(f"prog:{offset}", binary)
        assert re.search(r"code is at 0x1", caught.value.hint)


def test_refusal_arguments_need_entry(tmp_path: Path) -> None:
    binary = compiled(tmp_path / "prog", TELLS + F + MAIN, *PLAIN)
    with pytest.raises(RefusedError) as refused:
        one("f+0x3 $arg1", binary)
    assert refused.value.reason is RefusalReason.ARGUMENTS_NEED_ENTRY
    assert "%rdi" in refused.value.hint


def test_a_stripped_program_is_probed_by_file_offset(tmp_path: Path) -> None:
    binary = compiled(tmp_path / "prog", TELLS + F + MAIN, *PLAIN)
    expected = one("f", binary)
    run("strip", binary)
    site = one(f"prog:{expected.file_offset:#x} %di", binary)
    assert (site.vaddr, site.function, site.function_size, site.is_entry) == (expected.vaddr, "", 0, False)
    with pytest.raises(RefusedError, match="\\$argN"):
        one(f"prog:{expected.file_offset:#x} $arg1", binary)
    with pytest.raises(ResolveError, match="no function 'f'"):
        one("f", binary)


def test_globs_give_each_function_once(tmp_path: Path) -> None:
    binary = compiled(
        tmp_path / "liba.so",
        F + F.replace("f(", "f2(") + 'int f_alias(int) __attribute__((alias("f")));',
        "-shared",
        "-fPIC",
        "-nostdlib",
    )
    assert [site.function for site in resolve_file(parse("f*"), str(binary))] == ["f", "f2"]
    with pytest.raises(ResolveError, match="no function 'x\\*'"):
        resolve_file(parse("x*"), str(binary))


def test_a_file_has_to_be_the_object_of_the_probe(tmp_path: Path) -> None:
    binary = compiled(tmp_path / "libnamed.so.2", F, "-shared", "-fPIC")
    for obj in ("libnamed", "libnamed.so.2", str(binary)):
        assert one(f"{obj}:f", binary).function == "f"
    with pytest.raises(ResolveError, match="'libc'"):
        one("libc:f", binary)


def test_event_names(tmp_path: Path) -> None:
    binary = compiled(tmp_path / "libev-1.so.2", F, "-shared", "-fPIC", *PLAIN)

    def name(text: str, taken: set[str] | None = None) -> str:
        probe = parse(text)
        return event_name(probe, resolve_file(probe, str(binary))[0], taken or set())

    assert name("f") == "probe_libev/f"
    assert name("f+0x3") == "probe_libev/f_3"
    assert name("g/x=f") == "g/x"
    assert name("x=f") == "probe_libev/x"
    assert name("g/f") == "g/f"
    assert name("f", {"probe_libev/f", "probe_libev/f_1"}) == "probe_libev/f_2"
    offset = resolve_file(parse("f"), str(binary))[0].file_offset
    run("strip", "--strip-all", "-R", ".dynsym", binary)
    assert name(f"libev-1.so.2:{offset:#x}") == f"probe_libev/at_{offset:x}"


def test_event_names_of_cpp_functions_are_identifiers(tmp_path: Path) -> None:
    source = """
    namespace ns { struct A { int v; bool operator==(const A &) const; }; }
    bool ns::A::operator==(const A &o) const { return v == o.v; }
    """
    binary = compiled(tmp_path / "cpp", source, "-shared", "-fPIC", compiler="g++")
    probe = parse("ns::A::operator==")
    [site] = resolve_file(probe, str(binary))
    assert site.function == "ns::A::operator==(ns::A const&) const"
    assert event_name(probe, site, set()) == "probe_cpp/ns_A_operator"


def test_functions_are_listed(tmp_path: Path, start: Start) -> None:
    more = """
    static int one(int x) { asm volatile(""); return x + 1; }
    static int (*choose(void))(int) { return one; }
    int g(int) __attribute__((ifunc("choose")));
    int f_alias(int) __attribute__((alias("f")));
    """
    source = TELLS + F + more + MAIN
    binary = compiled(tmp_path / "prog", source, *PLAIN)
    expected = nm(binary)
    rows = {row.name: row for row in list_functions(str(binary))}
    assert (rows["f"].vaddr, rows["f"].aliases, rows["f"].kind) == (expected["f"][0], ("f_alias",), "func")
    assert rows["g"].kind == "ifunc"
    assert rows["one"].source.endswith("prog.c")
    assert set(rows) <= set(expected)
    process = Process(start(binary).pid)
    assert [row.name for row in list_functions(process, "f")] == ["f"]
    assert any(row.name == "malloc" for row in list_functions(process, "libc:mallo*"))
    with pytest.raises(ProbeSyntaxError):
        list(list_functions(process, "a:b:c"))
