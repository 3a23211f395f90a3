"""IFUNCs: the implementation that a process uses, against what its dynamic linker says."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import pytest

from ptwprobe.errors import ResolveError
from ptwprobe.probe.elf import list_functions
from ptwprobe.process import Process
from tests.elf_builds import PLAIN, WAIT, Start, address, compiled, nm, one


@pytest.fixture
def me() -> Process:
    return Process(os.getpid())


@pytest.mark.parametrize("name", ["strlen", "memcpy", "memset", "strchr", "memchr", "strcmp", "strcpy"])
def test_the_implementation_of_an_ifunc_is_the_one_that_the_process_uses(name: str, me: Process) -> None:
    site = one(f"libc:{name} $arg1", me)
    expected = address(ctypes.CDLL(None), name)
    assert site.runtime_addr in (expected, expected + 4)
    assert (site.function, site.is_entry) == (name, True)
    listed = list(list_functions(me, f"libc:{name}"))
    assert [row.kind for row in listed] == ["ifunc"]
    assert site.function_vaddr != listed[0].vaddr


IFUNC = """
static int one(int x) { asm volatile(""); return x + 1; }
static int two(int x) { asm volatile(""); return x + 2; }
static int (*choose(void))(int) { return %s; }
int f(int) __attribute__((ifunc("choose")));
"""


@pytest.mark.parametrize("choice", ["one", "two"])
@pytest.mark.parametrize("flags", [("-pie",), ("-static", "-no-pie", "-fno-pie"), ("-pie", "-Wl,-z,now")], ids=" ".join)
def test_ifunc_within_a_program(choice: str, flags: tuple[str, ...], tmp_path: Path, start: Start) -> None:
    binary = compiled(
        tmp_path / "prog", WAIT + IFUNC % choice + "int main(void) { f(1); ready(); return f(1); }", *PLAIN, *flags
    )
    process = Process(start(binary).pid)
    site = one("f $arg1", process)
    assert (site.vaddr, site.symbol, site.function) == (nm(binary)[choice][0], choice, "f")
    with pytest.raises(ResolveError, match="IFUNC") as caught:
        one("f", binary)
    assert "process" in caught.value.hint


def test_ifunc_that_another_object_has_bound_or_not_yet(tmp_path: Path, start: Start) -> None:
    library = compiled(tmp_path / "libi.so", IFUNC % "two", "-shared", "-fPIC", *PLAIN)
    main = """
    extern int f(int);
    int main(int argc, char **argv) { (void)argv; if (argc > 1) f(1); ready(); return f(1); }
    """
    lazy = compiled(tmp_path / "prog", WAIT + main, "-Wl,-z,lazy", "-fplt", str(library))
    bound, unbound = Process(start(lazy, "call").pid), Process(start(lazy).pid)
    assert one("libi:f", bound).vaddr == nm(library)["two"][0]
    with pytest.raises(ResolveError, match="nothing in process"):
        one("libi:f", unbound)
