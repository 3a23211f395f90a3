"""The native core (Rust, ``ptwprobe/native``). Checked against the built module by ``tests/test_package.py``."""

from typing import Literal, TypeAlias, final

class NativeError(Exception):
    """``args`` is (kind, message, offset or None); ``kind`` is a stable word."""

    args: tuple[str, str, int | None]

# ---- machine

def cpu_features() -> dict[str, bool]:
    """rdpid, rdtscp, fsgsbase, ptwrite_cpuid, invariant_tsc."""

def ptwrite_executes() -> bool:
    """Whether ``ptwrite`` runs here rather than raising #UD; tried in a forked child."""

def calibrate_tsc() -> dict[str, int]:
    """tsc_hz, and the factors shift, mult, zero from TSC to ns of CLOCK_MONOTONIC; takes 20 ms."""

def stub_template(name: str) -> str | None: ...
def stub_template_names() -> list[str]: ...
def demangle(name: str) -> tuple[str, str] | None:
    """A C++ or Rust symbol name as (with parameters, without them); None for a name that is not mangled."""

def demangle_all(names: list[str]) -> list[tuple[str, str] | None]: ...

# ---- stub

def stub_listing(code: bytes, addr: int) -> list[tuple[int, int, str]]:
    """(address, length in bytes, text) of every instruction, in the templates' (Intel) syntax; "(bad)" ends the list
    where the bytes do not decode."""

# ---- x86

def disassemble(code: bytes, addr: int) -> list[tuple[int, int, str]]:
    """(address, length, text in GNU syntax) of every instruction; NativeError "not-an-instruction" with the offset."""

def decode(code: bytes, addr: int) -> list[tuple[int, int, str]]:
    """(offset, length, kind) of the instructions up to the first that does not decode.

    Kinds: nop, endbr, plain, jump, branch, indirect, return, call, system, trap, undefined, fixed.
    """

def relative_operands(code: bytes, addr: int) -> list[int]:
    """Absolute addresses of branch targets and rip-relative operands."""

def relocate(code: bytes, from_addr: int, to_addr: int) -> tuple[bytes, list[tuple[int, int]]]:
    """The code with the same effect at ``to_addr``, and (old offset, new offset) of every instruction.

    NativeError kinds: call-in-window, syscall-in-window, not-relocatable, not-an-instruction, out-of-reach.
    """

@final
class CodeMap:
    """Control flow of an ELF file; all addresses are virtual addresses of the file.

    NativeError kinds: bad-elf (with a file offset where known), io.
    """

    def __new__(cls, path: str) -> CodeMap: ...
    def function_bounds(self, vaddr: int) -> tuple[int, int] | None:
        """[start, end) of the function that contains ``vaddr``."""

    def functions(self) -> list[tuple[int, int]]: ...
    def targets(self, lo: int, hi: int) -> list[tuple[int, str]]:
        """(vaddr, kind) of everything that is jumped to, lo < vaddr < hi.

        Kinds: function, branch, call, return, table, pointer, landing-pad, endbr.
        """

    def is_boundary(self, vaddr: int) -> bool:
        """Whether an instruction starts there, decoding straight on from the nearest known start."""

    def has_unknown_jumps(self, vaddr: int) -> bool:
        """Whether the function around ``vaddr`` may jump to places that are not among the targets."""

    def unknown_jumps(self) -> list[int]: ...
    def bytes(self, vaddr: int, length: int) -> bytes:
        """Up to ``length`` bytes of code as in the file; fewer at the end of a section."""

# ---- trace

@final
class TraceWriter:
    """A perf.data as the recorder writes it. Times in ns of CLOCK_MONOTONIC; errors of the disk are OSError."""

    def __new__(cls, path: str, shift: int, mult: int, zero: int, pmu_type: int = 8) -> TraceWriter: ...
    def comm(self, pid: int, tid: int, comm: bytes, ns: int, exec: bool = False) -> None: ...
    def mmap2(
        self,
        pid: int,
        tid: int,
        addr: int,
        len: int,
        file_offset: int,
        path: bytes,
        ns: int,
        build_id: bytes | None = None,
    ) -> None: ...
    def fork(self, pid: int, tid: int, ppid: int, ptid: int, ns: int) -> None: ...
    def exit(self, pid: int, tid: int, ppid: int, ptid: int, ns: int) -> None: ...
    def switch_in(self, pid: int, tid: int, cpu: int, ns: int) -> None: ...
    def lost(self, count: int, cpu: int, ns: int) -> None: ...
    def torn(self, count: int, cpu: int, ns: int) -> None: ...
    def auxtrace(self, tid: int, pid: int, data: bytes, tsc_reference: int) -> None:
        """Raw packets, beginning with a PSB."""

    def hits(self, tid: int, pid: int, hits: list[tuple[int, list[int], int, list[int]]]) -> None:
        """One chunk of hits: (tsc, slot addresses header first, header word, argument words) each."""

    def finished_round(self) -> None: ...
    def flush(self) -> None: ...
    def finish(self, shift: int, mult: int, zero: int, version: str = "", command_line: list[str] = ...) -> None: ...

_TraceEntry: TypeAlias = (
    tuple[
        Literal["hit"],
        int | None,
        int | None,
        int | None,
        int | None,
        str,
        str,
        int,
        dict[str, int],
    ]
    | tuple[Literal["stray"], int | None, int | None, int | None, int | None, str, int | None, int]
    | tuple[Literal["lost"], int | None, int | None, int]
    | tuple[Literal["torn"], int | None, int | None, int]
    | tuple[Literal["error"], int | None, int | None, int | None, int | None, int | None, str]
)
"""Exists for type checkers only.

("hit", ns, pid, tid, cpu, comm, event, ip, args), ("stray", ns, pid, tid, cpu, comm, ip, value),
("lost" or "torn", ns, cpu, count), ("error", ns, pid, tid, cpu, offset in the file, message); None is not known.
"""

@final
class TraceReader:
    """Entries of a perf.data, in the order of time. NativeError "trace" with an offset, or OSError.

    ``events``: (id, "group/name", [(field, type)], [(pid, address of the site, slot addresses)]) each. With ``follow``
    the file is still being written: a round that is not finished is waited for.
    """

    def __new__(
        cls,
        path: str,
        events: list[tuple[int, str, list[tuple[str, str]], list[tuple[int, int, list[int]]]]],
        follow: bool = False,
    ) -> TraceReader: ...
    def next_batch(self, max: int) -> list[_TraceEntry]:
        """Up to ``max`` entries; empty at the (present) end."""

    def skip(self, max: int) -> bool:
        """Passes over up to ``max`` entries, which are counted; False at the end."""

    def totals(self) -> tuple[int, int, int, int, int]:
        """hits, lost, torn, stray, errors of the entries so far."""

@final
class ScriptWriter:
    """Writes lines to ``fd`` (duplicated). ``format``: text, jsonl, csv; times in ns, both ends included."""

    def __new__(
        cls,
        path: str,
        events: list[tuple[int, str, list[tuple[str, str]], list[tuple[int, int, list[int]]]]],
        fd: int,
        format: str,
        patterns: list[str],
        tids: list[int],
        start: int | None = None,
        end: int | None = None,
    ) -> ScriptWriter: ...
    def write(self) -> bool:
        """Writes some more lines; False after the last. OSError of ``fd``."""

    def totals(self) -> tuple[int, int, int, int, int]:
        """hits, lost, torn, stray, errors of what was written."""

@final
class PacketDump:
    """Every packet of a perf.data as text."""

    def __new__(cls, path: str) -> PacketDump: ...
    def next_lines(self) -> str:
        """Some more lines; empty at the end."""

    def errors(self) -> int: ...
