"""The emitting part of a stub, in its two forms, and the parts of it that stand behind the jump back.

The ring protocol is told in ``native/src/ring``: a record is 32 bytes (mark, time, thread word, event id with the
number of words and the fault mask) and its words; a *mark* counts records in its high 24 bits, bytes in its low 40.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..model import Argument, Register, RingLayout, StubForm, StubRequest, ThreadIdSource
from .layout import Layout
from .operands import FRAMES, MASK64, ValueCode, extend, known

HEADER_MAGIC = 0x5054525731
"""Low 40 bits of the header word on PT."""

RECORD_HEADER = 32
"""Bytes of a ring record before its words."""

CONTROL_BLOCKS = 0x1000
LOST_NO_RING = 0x40
"""Offsets in the ring's control mapping: the blocks of the rings, and the counter of hits on a CPU without one."""

LITERAL_ALIGN = 8
PADDING = b"\xcc"


def record_size(words: int) -> int:
    return RECORD_HEADER + 8 * words


def header_word(event_id: int, words: int) -> int:
    """The word that opens a hit on PT."""
    return event_id << 48 | words << 40 | HEADER_MAGIC


def emit_ring(layout: Layout, request: StubRequest, ring: RingLayout, values: ValueCode) -> None:
    size = record_size(len(request.arguments))
    layout.add("ring_enter", gate=ring.gate_addr, leave="leave")
    layout.add("ring_cpu_rdpid" if ring.use_rdpid else "ring_cpu_rdtscp")
    layout.add(
        "ring_locate",
        rings=ring.rings,
        no_ring="no ring",
        control=ring.control_addr + CONTROL_BLOCKS,
        data=ring.data_addr,
        window_bits=ring.ring_bits + 1,
    )
    layout.label("reserve")
    layout.add(
        "ring_reserve", room=(1 << ring.ring_bits) - size, increment=(1 << 40) + size, full="full", again="reserve"
    )
    layout.add("ring_record", mask=(1 << ring.ring_bits) - 1)
    if ring.thread_id is ThreadIdSource.TLS_FIELD:
        layout.add("ring_thread_tls_field", offset=ring.thread_id_offset & MASK64)
    else:
        layout.add("ring_thread_fs_base")
    layout.label("word 0")
    layout.add("ring_header", header=request.event_id | len(request.arguments) << 16)
    for i, argument in enumerate(request.arguments):
        value = values.fetch(argument, f"fault {i}")
        layout.label(f"word {i + 1}")
        layout.add("ring_store", {"value": value}, offset=record_size(i))
    layout.add("ring_complete")
    layout.label("leave")
    layout.add("ring_leave")


def ring_behind(layout: Layout, ring: RingLayout, faults: list[int]) -> None:
    """Lost hits, and the fix-ups of the words in ``faults``."""
    layout.label("full")
    layout.add("ring_full", again="reserve", leave="leave")
    layout.label("no ring")
    layout.add("ring_no_ring", lost=ring.control_addr + LOST_NO_RING, leave="leave")
    for i in faults:
        layout.label(f"fault {i}")
        layout.add("ring_fault", bit=1 << i, store=f"word {i + 1}")


def needs_stack(form: StubForm, arguments: Sequence[Argument], site_addr: int) -> bool:
    """Whether a stub has a frame: every ring stub, and pt stubs that compute a word, which takes scratch registers."""
    return form is StubForm.RING or any(
        known(argument.fetch, site_addr) is None
        and not (isinstance(argument.fetch, Register) and argument.type.bits == 64)
        for argument in arguments
    )


def emit_pt(layout: Layout, request: StubRequest, values: ValueCode) -> None:
    slots = FRAMES[StubForm.PT].slots
    framed = needs_stack(StubForm.PT, request.arguments, request.site_addr)
    if framed:
        layout.add("pt_enter")
    _pace(layout, request)
    layout.label("word 0")
    layout.add("pt_word_literal", literal="literal 0")
    for i, argument in enumerate(request.arguments, 1):
        _pace(layout, request)
        fetch = argument.fetch
        if known(fetch, request.site_addr) is not None:
            layout.label(f"word {i}")
            layout.add("pt_word_literal", literal=f"literal {i}")
        elif isinstance(fetch, Register) and argument.type.bits == 64 and (not framed or fetch.name in slots):
            layout.label(f"word {i}")
            if framed:
                layout.add("pt_word_saved", offset=slots[fetch.name])
            else:
                layout.add("pt_word_register", {"value": fetch.name})
        else:
            value = values.fetch(argument, f"fault {i - 1}")
            layout.label(f"word {i}")
            layout.add("pt_word_register", {"value": value})
    if framed:
        layout.add("pt_leave")


def _pace(layout: Layout, request: StubRequest) -> None:
    if request.paced:
        layout.add("pace")


def pt_behind(layout: Layout, request: StubRequest, faults: list[int]) -> None:
    """The fix-ups of the words in ``faults``, and the literals."""
    for i in faults:
        layout.label(f"fault {i}")
        layout.add("pt_fault", word=f"word {i + 1}")
    layout.raw("padding", PADDING * (-layout.next_addr % LITERAL_ALIGN))
    layout.label("literal 0")
    layout.raw("literal", _quad(header_word(request.event_id, len(request.arguments))))
    for i, argument in enumerate(request.arguments, 1):
        value = known(argument.fetch, request.site_addr)
        if value is not None:
            layout.label(f"literal {i}")
            layout.raw("literal", _quad(extend(value, argument.type)))


def _quad(value: int) -> bytes:
    return value.to_bytes(8, "little")


def load_gate(request: StubRequest) -> dict[str, int]:
    """The values of the form's load gate template."""
    ring = request.ring
    if ring is None:
        return {}
    if request.form is StubForm.RING:
        return {"gate": ring.load_gate_addr, "value": ring.load_gate_value}
    minus = -ring.load_gate_value & 0xFFFF_FFFF
    minus -= (minus >> 31) << 32
    return {"gate": ring.gate_addr, "load_gate": ring.load_gate_addr, "minus_value": minus}
