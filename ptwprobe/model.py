"""The types that travel between the stages. Frozen, without behaviour beyond their own names.

Addresses never share a type with one another by name: ``vaddr`` is an ELF virtual address, ``file_offset`` an offset
in the file, ``runtime_addr`` an address in the target, ``tsc`` a time-stamp-counter value, ``ns`` nanoseconds of
CLOCK_MONOTONIC.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

# ---------------------------------------------------------------- values


@dataclass(frozen=True)
class Register:
    """The full 64-bit register ``name`` ("rax" ... "r15", "rsp", "rip" is the site) at the site."""

    name: str


@dataclass(frozen=True)
class Constant:
    """An immediate: 64-bit two's complement, stored unsigned."""

    value: int


@dataclass(frozen=True)
class Memory:
    """``size`` bytes (set by the type of the argument; 8 for inner dereferences) at ``base + offset``."""

    base: Fetch
    offset: int


Fetch: TypeAlias = "Register | Constant | Memory"


class TypeKind(Enum):
    UNSIGNED = "u"
    SIGNED = "s"
    HEX = "x"


@dataclass(frozen=True)
class ValueType:
    """Integer type of an argument: ``bits`` is 8, 16, 32 or 64."""

    kind: TypeKind
    bits: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.bits}"


@dataclass(frozen=True)
class Argument:
    """One value of a probe. ``text`` is the FETCH as written; ``entry_only`` where it used ``$argN``."""

    name: str
    fetch: Fetch
    type: ValueType
    text: str
    entry_only: bool = False


# ---------------------------------------------------------------- where


@dataclass(frozen=True)
class Where:
    """What a probe's WHERE says.

    ``obj`` is a path, a soname or the start of one, or None for the main program (globs allowed). Exactly one of
    ``function`` (a name or glob, with ``offset`` bytes added) and ``file_offset`` is given.
    """

    obj: str | None
    function: str | None
    offset: int = 0
    file_offset: int | None = None
    column: int = 0


@dataclass(frozen=True)
class Probe:
    """A parsed probe. ``group`` and ``name`` are the user's; a site without a name is named after its function."""

    text: str
    where: Where
    arguments: tuple[Argument, ...]
    group: str | None = None
    name: str | None = None
    paced: bool = True


# ---------------------------------------------------------------- sites


@dataclass(frozen=True)
class ObjectFile:
    """One ELF file as a process has mapped it.

    ``path`` is the name that the target shows for it, ``open_path`` a path by which *we* can open the very file that
    is mapped (``/proc/PID/map_files/...`` or ``/proc/PID/root/...``). ``bias`` is added to a vaddr to get a runtime
    address (0 when there is no process). ``build_id`` is hex, "" if there is none.
    """

    path: str
    open_path: str
    build_id: str
    device: int
    inode: int
    bias: int


@dataclass(frozen=True)
class Site:
    """One place to probe in one object.

    ``function`` is the demangled name, ``symbol`` the raw one, ``function_vaddr``/``function_size`` its bounds in
    bytes (size 0: not known); ``is_entry`` whether the site is where the function's arguments still stand in their
    registers (its first instruction, or the one after a leading ``endbr64``). ``runtime_addr`` is vaddr + bias.
    """

    object: ObjectFile
    function: str
    symbol: str
    function_vaddr: int
    function_size: int
    vaddr: int
    file_offset: int
    runtime_addr: int
    is_entry: bool


# ---------------------------------------------------------------- stubs


class StubForm(Enum):
    PT = "pt"
    RING = "ring"


class ThreadIdSource(Enum):
    """Where a ring stub gets its thread word from."""

    TLS_FIELD = "tls-field"
    """A 4-byte load at ``fs:offset``: the thread's own tid, as its libc keeps it."""
    FS_BASE = "fs-base"
    """``rdfsbase``: the recorder maps it to a tid."""


@dataclass(frozen=True)
class RingLayout:
    """The ring as the target sees it (addresses in the target); the layout is told in ``native/src/ring.rs``.

    ``control_addr``: start of the control mapping; ``data_addr``: start of the data windows, ring i at
    ``data_addr + (i << (ring_bits + 1))``, each mapped twice in a row; ``rings``: number of rings;
    ``gate_addr``: a 4-byte word of a wipe-on-fork page, non-zero while this process emits;
    ``load_gate_addr``/``load_gate_value``: a stub may load through a pointer only while the word has that value.
    """

    control_addr: int
    data_addr: int
    rings: int
    ring_bits: int
    gate_addr: int
    load_gate_addr: int
    load_gate_value: int
    thread_id: ThreadIdSource
    thread_id_offset: int
    use_rdpid: bool


@dataclass(frozen=True)
class StubRequest:
    """Everything a stub is made of.

    ``displaced`` is the original code of the window, which starts at ``site_addr`` and is followed by
    ``continue_addr`` in the target; ``event_id`` goes into the header word.
    """

    form: StubForm
    event_id: int
    arguments: tuple[Argument, ...]
    stub_addr: int
    site_addr: int
    displaced: bytes
    continue_addr: int
    paced: bool = True
    ring: RingLayout | None = None


@dataclass(frozen=True)
class Stub:
    """An assembled stub.

    ``slot_addrs``: address that stands for each word on the wire, header first (the ``ptwrite`` itself in the pt
    form, the store of the word in the ring form). ``displaced_map``: (offset in the window, address of its copy),
    one pair per displaced instruction. ``loads``: (first byte, end, fix-up address) of every instruction that
    loads through a pointer; after a fault there the thread goes on at the fix-up and the word is 0.
    """

    request: StubRequest
    code: bytes
    slot_addrs: tuple[int, ...]
    displaced_map: tuple[tuple[int, int], ...]
    loads: tuple[tuple[int, int, int], ...]
    listing: tuple[str, ...] = field(repr=False, default=())

    @property
    def addr(self) -> int:
        return self.request.stub_addr

    @property
    def end(self) -> int:
        return self.request.stub_addr + len(self.code)


# ---------------------------------------------------------------- patches


class Tactic(Enum):
    """How a site is patched; the value is the name in every output."""

    NOP = "nop"
    """One 5-byte NOP, or a run of NOPs."""
    SINGLE = "single"
    """One instruction of five bytes or more."""
    WINDOW = "window"
    """Several instructions with no jump target inside."""
    PUN = "pun"
    """Only the site's own bytes change; the bytes after it are the top of the jump's displacement."""


@dataclass(frozen=True)
class Window:
    """The bytes that a patch displaces and the jump that replaces them.

    ``displaced``: original bytes, from ``site_addr``, whole instructions; ``written``: how many bytes the patch writes
    (5, or fewer for a pun); the jump has to land in ``[target_min, target_max]`` (inclusive).
    """

    tactic: Tactic
    site_addr: int
    displaced: bytes
    written: int
    target_min: int
    target_max: int

    @property
    def continue_addr(self) -> int:
        return self.site_addr + len(self.displaced)


@dataclass(frozen=True)
class Patch:
    """A finished plan for one site: ``new`` replaces ``old`` at ``site.runtime_addr`` in one write."""

    site: Site
    event_id: int
    window: Window
    stub: Stub
    old: bytes
    new: bytes


@dataclass(frozen=True)
class CodeRange:
    """Pages of a target's code that are switched: a copy of ours, with the patches, is mapped in their place.

    [``start``, ``start`` + ``length``) are runtime addresses. ``aside``: where the file's own pages are meanwhile.
    ``file_device``, ``file_inode``, ``file_offset``: what the pages at ``aside`` are of, as ``/proc/PID/maps`` has it.
    """

    start: int
    length: int
    aside: int
    file_device: int
    file_inode: int
    file_offset: int

    @property
    def end(self) -> int:
        return self.start + self.length


# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class EventField:
    """One argument of an event on the wire: ``type`` as in ``ValueType``'s text."""

    name: str
    type: str


@dataclass(frozen=True)
class Event:
    """A probe's site as the session knows it. ``event`` is ``group/name``; ``sites``: pid → runtime address."""

    event_id: int
    event: str
    probe: str
    fields: tuple[EventField, ...]
    sites: dict[int, int]


@dataclass(frozen=True)
class Hit:
    """One hit of a probe. ``ns``: CLOCK_MONOTONIC; ``cpu`` -1 where not known; ``ip``: runtime address of the site."""

    ns: int
    pid: int
    tid: int
    cpu: int
    comm: str
    event: str
    ip: int
    args: dict[str, int]


@dataclass(frozen=True)
class Totals:
    """Every hit is in exactly one of ``hits``, ``lost``, ``torn``; ``stray`` are words without a header."""

    hits: int = 0
    lost: int = 0
    torn: int = 0
    stray: int = 0
    errors: int = 0

    def __str__(self) -> str:
        return f"hits={self.hits} lost={self.lost} torn={self.torn} stray={self.stray} errors={self.errors}"
