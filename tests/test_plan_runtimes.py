"""Sites that are refused for what runs around them: who looks at the addresses of faults, whose stacks are small."""

from __future__ import annotations

from pathlib import Path

import pytest

from ptwprobe._native import CodeMap
from ptwprobe.errors import RefusalReason, RefusedError
from ptwprobe.model import Memory, ObjectFile, Site, StubForm, Window
from ptwprobe.patch.plan import plan_window
from ptwprobe.patch.runtimes import check_runtime
from ptwprobe.probe.spec import parse
from tests.elfwriter import ElfWriter

TEXT = 0x1000
LOADS = "48 8b 47 08 c3"  # mov 8(%rdi),%rax; ret
HARMLESS = "55 48 89 e5 41 57 c3"  # push %rbp; mov %rsp,%rbp; push %r15; ret
GO_ENTRY = "49 3b 66 10 76 20 55 c3"  # cmp 0x10(%r14),%rsp; jbe; push %rbp
JVM = ["/usr/bin/java", "/usr/lib/jvm/lib/server/libjvm.so"]


def planned(folder: Path, code: str, section: str = "") -> tuple[Site, Window]:
    data = bytes.fromhex(code) + b"\x90" * 64
    writer = ElfWriter().text(TEXT, data).function("f", TEXT, len(data))
    if section:
        writer.data(0x3000, bytes(16), section)
    path = writer.write(folder / "prog")
    site = Site(ObjectFile("/bin/prog", path, "", 0, 0, 0), "f", "f", TEXT, len(data), TEXT, TEXT, TEXT, True)
    return site, plan_window(site, lambda addr, size: data[addr - TEXT :][:size], CodeMap(path))


def check(
    where: tuple[Site, Window], probe: str = "f", form: StubForm = StubForm.RING, mapped: list[str] | None = None
) -> RefusalReason | None:
    """The reason of the refusal, if there is one. A probe that reads memory makes its process traced."""
    arguments = parse(probe).arguments
    traced = any(isinstance(argument.fetch, Memory) for argument in arguments)
    try:
        check_runtime(*where, arguments, form, mapped or ["/bin/prog"], traced)
    except RefusedError as error:
        assert "uprobe" in error.hint
        return error.reason
    return None


def test_a_program_without_such_a_runtime_is_patched(tmp_path: Path) -> None:
    assert check(planned(tmp_path, LOADS)) is None
    assert check(planned(tmp_path, LOADS), mapped=["/usr/lib/libgomp.so.1", "/usr/lib/libgolf.so"]) is None


@pytest.mark.parametrize("library", ["libjvm.so", "libcoreclr.so", "libgnat-12.so", "libgo.so.21"])
def test_refusal_may_fault_where_a_library_looks_at_addresses(tmp_path: Path, library: str) -> None:
    mapped = ["/bin/prog", f"/usr/lib/{library}"]
    assert check(planned(tmp_path, LOADS), mapped=mapped) is RefusalReason.MAY_FAULT
    assert check(planned(tmp_path, HARMLESS), mapped=mapped) is None


def test_refusal_may_fault_is_none_where_the_process_stays_traced(tmp_path: Path) -> None:
    assert check(planned(tmp_path, LOADS), "f v=+0(%di)", mapped=JVM) is None
    assert check(planned(tmp_path, LOADS), "f v=%di", mapped=JVM) is RefusalReason.MAY_FAULT


def test_refusal_may_fault_in_compiled_webassembly(tmp_path: Path) -> None:
    assert check(planned(tmp_path, LOADS, ".wasmtime.traps")) is RefusalReason.MAY_FAULT


def test_refusal_may_fault_for_an_undefined_instruction_in_any_program(tmp_path: Path) -> None:
    # Only a handler gets behind it, and the stub has nothing there.
    code = "48 85 ff 0f 0b b8 01 00 00 00 c3"
    assert check(planned(tmp_path, code)) is RefusalReason.MAY_FAULT
    assert check(planned(tmp_path, code), "f v=+0(%di)") is None


@pytest.mark.parametrize("section", [".go.buildinfo", ".gopclntab"])
def test_refusal_small_stack_in_go_code(tmp_path: Path, section: str) -> None:
    where = planned(tmp_path, GO_ENTRY, section)
    assert check(where) is RefusalReason.SMALL_STACK
    assert check(where, "f v=+0(%ax)") is RefusalReason.SMALL_STACK
    # A pt stub that only emits whole registers needs no stack.
    assert check(where, "f a=%ax", StubForm.PT) is None
    assert check(where, "f a=%ax:u8", StubForm.PT) is RefusalReason.SMALL_STACK
    loads = planned(tmp_path, LOADS, section)
    assert check(loads, "f a=%ax", StubForm.PT) is RefusalReason.MAY_FAULT
