"""The native core (Rust, ``ptwprobe/native``). Checked against the built module by ``tests/test_package.py``."""

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias, final

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

# ---- flow

_FlowMark: TypeAlias = tuple[int, int, int, str, str, int | None]

def walk(
    packets: bytes,
    regions: Sequence[tuple[int, bytes]],
    stubs: Sequence[tuple[int, int, int, int]] = ...,
    *,
    compressed_returns: bool = ...,
    tsc_ctc: tuple[int, int] | None = ...,
    mtc_shift: int = ...,
    max_nonturbo: int = ...,
    cpu: str = ...,
) -> tuple[bytes, list[_FlowMark]]:
    """Walks Intel PT ``packets`` over code: ``regions`` are (start, bytes), ``stubs`` (start, end, site, where the
    program goes on); ``cpu``: what wrote them, as perf has it: "GenuineIntel,6,94,3".

    The taken branches, 24 bytes each, little-endian: from, to, kind. Marks: (branches before, TSC, offset in
    ``packets``, kind, value or text, address or None); kinds: word, event, overflow, missing, error, soft.
    """

@final
class FlowReader:
    """The control flow of a perf.data, stream by stream; ``jobs`` threads work at it (0: one for each CPU).

    ``images``, ``root``, ``caches``, ``live``, ``stubs``: where code is looked for, as for :class:`CodeTimeline`.
    """

    def __new__(
        cls,
        path: str | PathLike[str],
        *,
        images: str | PathLike[str] | None = ...,
        root: str | PathLike[str] | None = ...,
        caches: Sequence[str | PathLike[str]] = ...,
        live: bool = ...,
        stubs: Sequence[tuple[int, int, int, int, int]] = ...,
        jobs: int = ...,
    ) -> FlowReader: ...
    def streams(self) -> list[tuple[int, int | None, int | None]]:
        """(number, thread, CPU) of each."""

    def notes(self) -> list[str]:
        """What a user should know of the code, of the files that were read by now."""

    def next_batch(self, stream: int) -> tuple[bytes, list[tuple[int, int]], list[_FlowMark]] | None:
        """The next of a stream, None at its end: branches and marks as of :func:`walk`, counted from the batch's first
        branch, and times as (branches before, TSC)."""

    def count(self) -> dict[str, int]:
        """Walks all to the end: branches, words, events, losses, errors (after which branches may be missing), soft."""

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

def first_that_may_fault(code: bytes, addr: int, trusted: Sequence[str]) -> int | None:
    """Offset of the first instruction that can fault by itself: a division, ud2, an operand in memory that another
    register leads to than rsp, rip and those that are ``trusted`` (in thread-local storage never).
    """

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

# ---- recording

@final
class RingMemory:
    """The rings of one target over ``fd``, an empty memfd of its own (made with MFD_ALLOW_SEALING); sized, allocated,
    sealed and mapped here. Layout: ``native/src/ring``. NativeError kind "ring".
    """

    def __new__(cls, fd: int, rings: int, ring_bits: int) -> RingMemory: ...
    @staticmethod
    def layout(rings: int, ring_bits: int) -> tuple[int, int]:
        """(bytes of the control pages, bytes of the whole file)."""

    @property
    def control_len(self) -> int: ...
    @property
    def data_len(self) -> int:
        """Bytes of one ring in the file; it takes twice as many of the address space."""

    @property
    def total_len(self) -> int: ...
    @property
    def load_gate_ptr(self) -> int:
        """Address of the load-gate word in *our* address space, valid while this object lives."""

    @property
    def recorder_ptr(self) -> int:
        """Same of the word that says whether somebody records."""

    def lost_no_ring(self) -> int:
        """Hits on a CPU that has no ring."""

@final
class RingTestWriter:
    """What a stub does, for tests that have no patched program: maps the rings as a target and writes records."""

    def __new__(cls, fd: int, rings: int, ring_bits: int) -> RingTestWriter: ...
    def write(
        self, ring: int, thread: int, event_id: int, args: list[int], *, faults: int = 0, tsc: int | None = None
    ) -> bool:
        """One record; False if it was counted as lost."""

    def abandon(self, ring: int, nargs: int) -> bool:
        """Reserve a record and never complete it, as a thread does that dies in a stub."""

    def write_many(self, ring: int, thread: int, event_id: int, count: int, *, per_second: int = 0) -> int:
        """``count`` records with the arguments (i, ~i), unpaced if ``per_second`` is 0. Returns how many were lost."""

@final
class Recorder:
    """Drains the rings of all targets into a new perf.data, in a thread of its own, from ``start`` to ``stop``.

    Calls wait for the end of a round (some ms at most) without the GIL. NativeError kinds: disk-full, write-error
    (the file cannot be made), unknown-target, duplicate-target, bad-event, bad-build-id, stopped.
    """

    def __new__(cls, perf_data_path: str | PathLike[str], cmdline: list[str]) -> Recorder: ...
    def add_event(self, event_id: int, nargs: int) -> None:
        """Ids from 0x8000 up, at most 255 arguments."""

    def add_target(self, pid: int, ring: RingMemory, comm: str) -> None:
        """``comm`` names threads that are gone before they can be looked up."""

    def add_stub(self, pid: int, event_id: int, slot_addrs: list[int]) -> None:
        """The address of each word of the event in the stub, header first. Records without a stub are stray."""

    def add_mapping(
        self,
        pid: int,
        addr: int,
        length: int,
        file_offset: int,
        dev_major: int,
        dev_minor: int,
        inode: int,
        prot: int,
        flags: int,
        path: str | PathLike[str],
        build_id_hex: str,
        ns: int = 0,
    ) -> None:
        """Executable memory of a target, as an MMAP2 record; ``build_id_hex`` may be "". ``ns``: CLOCK_MONOTONIC from
        which on it is there; later where hits of later times are written already."""

    def set_thread(self, pid: int, fs_base: int, tid: int) -> None: ...
    def keep_threads(self, tids: list[int] | None) -> None:
        """Hits of other threads are counted as filtered; None keeps all."""

    def start(self) -> None: ...
    def stats(self) -> dict[str, Any]:
        """Counts: hits (written), lost, torn, faults, filtered, stray, unknown_threads, late, broken_rings, bytes (of
        perf.data), held (read, not written yet); and error: None or (kind, message), kind disk-full or write-error.

        After an error the recording has stopped: the file is whole up to there, what comes later counts as lost.
        """

    def holes(self) -> list[tuple[int, int, int]]:
        """(pid, ring, ns for which it has been blocked) of rings that wait for a record to be completed.

        A hole reaches to what was reserved when it was first reported here.
        """

    def pass_hole(self, pid: int, ring: int) -> int:
        """Give a hole up: every thread of the target was seen outside the stubs *after* ``holes`` reported it.

        Returns the hits torn by it; 0 if it was completed meanwhile, or never reported.
        """

    def drop_target(self, pid: int) -> None:
        """The last look at a target that writes no more: gone, or unpatched. Its holes are passed."""

    def tap(self, capacity: int) -> None:
        """Keep a copy of the newest ``capacity`` hits for ``take_hits``; the oldest go when it is full."""

    def take_hits(self, max: int) -> list[tuple[int, int, int, int, int, list[int]]]:
        """(ns of CLOCK_MONOTONIC, pid, tid, cpu, event id, arguments) of hits as they are written, oldest first."""

    def stop(self) -> dict[str, Any]:
        """Read all rings to their end, write everything, end the file; the final ``stats``. May be called again."""

    def clock(self) -> tuple[int, int, int, int]:
        """(shift, mult, zero, TSC in Hz): the factors of ``perf_event_mmap_page``; the final ones after ``stop``."""

# ---- trace

@final
class CodeTimeline:
    """The address spaces of a perf.data over time. Space 0 has no code; times are TSC.

    ``images``: the folder beside the perf.data; ``root``: put in front of every path; ``caches``: folders with files by
    build id (``~/.debug``, debuginfod's); ``live``: ask processes that still run for their files. ``stubs``: (pid,
    (start, end, site, where it continues)).
    """

    def __new__(
        cls,
        path: str | PathLike[str],
        *,
        images: str | PathLike[str] | None = ...,
        root: str | PathLike[str] | None = ...,
        caches: Sequence[str | PathLike[str]] = ...,
        live: bool = ...,
        stubs: Sequence[tuple[int, tuple[int, int, int, int]]] = ...,
    ) -> CodeTimeline: ...
    def process(self, pid: int, tsc: int) -> int:
        """The space of a process."""

    def thread(self, tid: int) -> list[tuple[int, int, int | None, int | None]]:
        """(begin, space, pid, tid), in order of time."""

    def cpu(self, cpu: int) -> list[tuple[int, int, int | None, int | None]]: ...
    def regions(self, space: int) -> list[tuple[int, int]]:
        """[start, end) of known code."""

    def read(self, space: int, addr: int, size: int) -> bytes:
        """As many bytes as are known from ``addr`` on."""

    def stub(self, space: int, addr: int) -> tuple[int, int, int, int] | None: ...
    def notes(self) -> list[str]:
        """What a user should know, of files only where they were read."""

    def __len__(self) -> int: ...

@final
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

_BranchKind: TypeAlias = Literal[
    "cond",
    "jump",
    "indirect-jump",
    "call",
    "indirect-call",
    "return",
    "syscall",
    "far-return",
    "interrupt",
    "trace-start",
    "trace-end",
    "tx-abort",
    "far-other",
]

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
    | tuple[Literal["error"], int | None, int | None, int | None, int | None, int | None, str, str]
    | tuple[Literal["branch"], int | None, int | None, int | None, int | None, int, int, _BranchKind]
    | tuple[Literal["event"], int | None, int | None, int | None, int | None, str, int | None]
    | tuple[Literal["note"], int | None, int | None, int | None, int | None, int, str]
)
"""Exists for type checkers only.

("hit", ns, pid, tid, cpu, comm, event, ip, args), ("stray", ns, pid, tid, cpu, comm, ip, value),
("lost" or "torn", ns, cpu, count), ("error", ns, pid, tid, cpu, offset in the file, message, stable word), and of a
MergedReader ("branch", ns, pid, tid, cpu, from, to, kind), ("event", ns, pid, tid, cpu, packet, ip),
("note", ns, pid, tid, cpu, offset, message); None is not known.
"""

@final
class TraceReader:
    """Entries of a perf.data, in the order of time. OSError, or NativeError: "trace" with an offset, and at the end
    "no-trace" where nothing in it was recorded by Intel PT.

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
    def read(self) -> bool:
        """Reads entries for some more lines; False after the last. Errors as of TraceReader."""

    def write(self) -> None:
        """Writes the lines of what was read. OSError of ``fd``."""

    def totals(self) -> tuple[int, int, int, int, int]:
        """hits, lost, torn, stray, errors of what was written."""

@final
class MergedReader:
    """Entries of a perf.data, control flow included, in the order of time; ``events`` as of TraceReader, the rest as of
    FlowReader."""

    def __new__(
        cls,
        path: str,
        events: list[tuple[int, str, list[tuple[str, str]], list[tuple[int, int, list[int]]]]],
        *,
        images: str | PathLike[str] | None = ...,
        root: str | PathLike[str] | None = ...,
        caches: Sequence[str | PathLike[str]] = ...,
        live: bool = ...,
        stubs: Sequence[tuple[int, int, int, int, int]] = ...,
        jobs: int = ...,
    ) -> MergedReader: ...
    def next_batch(self, max: int, branches: bool) -> list[_TraceEntry]:
        """Up to ``max`` entries, branches only or all others; empty at the end."""

    def totals(self) -> tuple[int, int, int, int, int]:
        """As of TraceReader."""

    def notes(self) -> list[str]:
        """As of FlowReader."""

@final
class ArrowStream:
    """A table that is read once, as the Arrow PyCapsule interface gives it."""

    @staticmethod
    def branches(reader: MergedReader) -> ArrowStream:
        """Takes ``reader`` away."""

    @staticmethod
    def hits(
        path: str, events: list[tuple[int, str, list[tuple[str, str]], list[tuple[int, int, list[int]]]]]
    ) -> ArrowStream: ...
    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """NativeError "closed" at the second time."""

@final
class FlowScript:
    """As ScriptWriter, with control flow; takes ``reader`` away.

    ``show``: words (hits, branches, calls, returns, jumps, syscalls, interrupts, trace, events, errors) with commas
    between, or letters of perf's --itrace (b c r w x p o e); None is all. ``indent``: by depth of calls; ``stack``: the
    calls that led to each hit.
    """

    def __new__(
        cls,
        reader: MergedReader,
        fd: int,
        format: str,
        patterns: list[str],
        tids: list[int],
        start: int | None,
        end: int | None,
        *,
        show: str | None = None,
        indent: bool = False,
        stack: bool = False,
    ) -> FlowScript: ...
    def read(self) -> bool: ...
    def write(self) -> None: ...
    def totals(self) -> tuple[int, int, int, int, int]: ...
    def branches(self) -> int:
        """Branches so far, shown or not."""

    def notes(self) -> list[str]: ...
    def progress(self) -> tuple[int, int]:
        """Bytes of the trace that were read, and all."""

@final
class PacketDump:
    """Every packet of a perf.data as text."""

    def __new__(cls, path: str) -> PacketDump: ...
    def next_lines(self) -> str:
        """Some more lines; empty at the end."""

    def errors(self) -> int: ...

# ---- target

def share_memory(pid: int, other: int) -> bool:
    """Whether two processes have one address space; False where the kernel or its permissions do not tell."""

OPEN_HERE: int
"""A number for ``Tracer.remote`` that is no call of the target."""

_Switch: TypeAlias = tuple[Literal["replace", "renew", "restore", "abandon"], int, int, bytes, int, int | None, int]
"""Exists for type checkers only.

An exchange of a range of pages: (what, start, length, content that is there now or b"", address of the file's pages
aside, address where our old copy goes, address where our new copy is).
"""

@final
class Tracer:
    """Traces live processes. A task of its own (``pid``) does it; it ends with ``close``, or after us if we are killed:
    then it closes the gates, takes every patch out and lets the targets go.

    All calls release the GIL. NativeError kinds: gone, not-permitted, busy (nothing was changed), seccomp (nothing was
    touched), foreign-probe (with the address), unmapped, changed (same), unswitchable (by the page), unsupported,
    exec-failed, invalid, failed, ended.
    Commands on a process that is not attached attach it for their own duration.
    """

    def __new__(cls) -> Tracer: ...
    @property
    def pid(self) -> int:
        """What targets show as their tracer, and the value of an open load gate."""

    def attach(self, pid: int) -> None:
        """Seize all threads; they run on."""

    def detach(self, pid: int) -> None:
        """Let all threads go. One that cannot be stopped now (a vfork parent) goes when it next stops."""

    def close(self) -> None: ...
    def remote(
        self,
        pid: int,
        calls: Sequence[tuple[int, Sequence[int | tuple[int, int]]]],
        scratch: bytes | None = None,
        keep: Sequence[tuple[int, int, int]] = ...,
    ) -> list[int]:
        """System calls (number, arguments) by one thread of the target, while the others run on; ends after the first
        that fails. The number OPEN_HERE opens the target's descriptor that is its argument here; the result is ours.

        An argument is a number, (index of an earlier call, addend to its result), or (-1, offset in ``scratch``),
        whose bytes are in the target's memory meanwhile. ``keep``: (index of a call, offset, length) of mappings
        that are ours from then on, as if ``set_mapped`` had told of them, until it is called. Results are as the
        kernel gives them: -errno for a failure; -EBUSY and -ESRCH for a call that was not made, since the thread did
        not come to a stand for it or has ended.
        """

    def ask(self, pid: int) -> tuple[int, int, bool]:
        """The thread that executes remote calls: its tid, its fs_base, and whether it may read the time stamp counter
        (False where it set PR_TSC_SIGSEGV, prctl(2))."""

    def apply(
        self,
        pid: int,
        sites: Sequence[tuple[int, bytes, bytes, int, Sequence[tuple[int, int]]]],
        switches: Sequence[_Switch] = ...,
        carried: Sequence[tuple[int, bytes]] = ...,
        all_words: bool = False,
        thread_id_offset: int | None = None,
        release: bool = False,
    ) -> int:
        """One change: (address, old bytes, new bytes, length of the window, [(offset, address of the copy)]) each.

        All sites or none. Sites in a range of ``switches`` change with it, others are written. ``carried``: what else
        is written, into pages that were restored. ``all_words``: any word of a stack that points into a window
        refuses, not signal frames only. ``thread_id_offset``: nothing is changed (kind "thread-ids") unless every
        thread has its id there, from its fs_base. ``release``: the process is not traced any more afterwards. Returns
        the ns that the target stood still.
        """

    def changed_ns(self) -> int:
        """CLOCK_MONOTONIC at which the last change was made, while its target stood; 0 before the first."""

    def adopt(
        self,
        pid: int,
        sites: Sequence[tuple[int, bytes, bytes, int, Sequence[tuple[int, int]]]],
        switched: Sequence[tuple[int, int, int]] = ...,
    ) -> None:
        """Take over the patches of a recorder that has died: ``sites``, as of ``apply``, undo them; ``switched``:
        (address aside, start, length) of the ranges that are switched.

        They are undone at ``close`` and at our death, unless ``apply`` was called with them.
        """

    def threads(self, pid: int) -> list[tuple[int, int, int, int, int, int]]:
        """(tid, rip, rsp, fs_base, orig_rax, rax) of every thread, in one short stop."""

    def threads_in_ranges(self, pid: int, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """The tids whose rip, or any word on whose stacks, is in one of the [start, end)."""

    def set_mapped(
        self, pid: int, stubs: Sequence[tuple[int, int]], data: Sequence[tuple[int, int]], fresh: bool = False
    ) -> None:
        """Remember which (address, length) of ours ``pid`` has now, so that it goes even if we are killed.

        ``fresh``: it was mapped by us just now, so that nobody can be in there before a patch is in.
        """

    def unmap(self, pid: int) -> list[int]:
        """Unmap what ``set_mapped`` told. Threads that a job-control stop holds in a stub are let run out of it.

        Returns the tids of those that are in a stub all the same, or have a frame that leads into one; then nothing
        was unmapped. The patches are to be out before.
        """

    def close_files(self, pid: int) -> int:
        """Close the descriptors of ``pid`` that lead to memfds of ours, unless it records others; how many."""

    def watch(self, pid: int, loads: Sequence[tuple[int, int, int]]) -> None:
        """Attach, and hide faults of the instructions at [start, end): the thread goes on at the fix-up address."""

    def take_ended(self, pid: int) -> list[int]:
        """Addresses of the patches that were taken out since the last call: a displaced instruction faulted there, and
        the program's handler may have gone on inside the patch.
        """

    def hold_gate(self, word_addr: int) -> int:
        """Make the word at ``word_addr`` (of ours, in a shared mapping) our pid, until we release it or die."""

    def release_gate(self, word_addr: int) -> None: ...
    def launch(self, argv: Sequence[str], env: Sequence[str], cwd: str | None = None) -> int:
        """Start a program, standing at its first instruction. ``env``: ``NAME=value`` each; its PATH is searched."""

    def kill(self, pid: int) -> None:
        """Kill a launched process."""

    def next_mapping_event(self, pid: int, timeout_ms: int) -> Literal["mapped", "exec", "exit", "timeout"]:
        """Let a launched process run up to its next change of mappings; it stands still after "mapped" and "exec"."""

    def resume(self, pid: int) -> None:
        """Let it run on without such stops."""

    def exit_status(self, pid: int) -> int | None:
        """Exit code of a launched process, or minus the signal that killed it; None while it runs."""

    def events(self, timeout_ms: int) -> list[tuple[Literal["exec", "exit", "clone"], int, int, int]]:
        """(kind, pid, tid, value) since the last call; value: wait status of an exit, tid of a clone."""
