"""From a :class:`~ptwprobe.model.StubRequest` to the bytes of a stub.

A stub is the emitting part (``forms.py``), the displaced instructions and the jump back, and behind them what is rarely
or never run: lost hits, fix-ups of loads, literals, and the tail that tells which site the stub is for, which
``match.py`` reads. No stub calls or returns, so a shadow stack does not matter to it.
"""

from __future__ import annotations

import struct

from .. import _native
from ..errors import StubError
from ..model import Stub, StubForm, StubRequest
from .forms import LITERAL_ALIGN, emit_pt, emit_ring, load_gate, pt_behind, ring_behind
from .layout import Layout
from .operands import ValueCode, check, has_load
from .verify import DISPLACED, verified

MAX_WORDS = 32
"""Words per hit: the fault mask of a ring record has as many bits."""

TAIL = struct.Struct("<QQB")
"""Site address, continue address, length of the displaced code, which follows."""

_GROWTH = 5
"""By how many times relocated code may grow: a 2-byte ``loop`` becomes 9 bytes, the worst case."""

_ENDS = frozenset({"jump", "indirect", "return", "undefined"})
"""Kinds of instructions after which nothing comes."""


def assemble(request: StubRequest) -> Stub:
    """The stub, checked: what its code disassembles to is what the templates say.

    :raises StubError: a value does not fit, or the check failed
    :raises NativeError: the displaced code cannot be moved
    """
    layout = Layout(request.stub_addr)
    values = _emit(layout, request)
    displaced = _displaced(layout, request)
    _behind(layout, request)
    code, listing = verified(layout)
    labels = layout.labels
    return Stub(
        request=request,
        code=code,
        slot_addrs=tuple(labels[f"word {i}"] for i in range(len(request.arguments) + 1)),
        displaced_map=displaced,
        loads=tuple((start, end, labels[fault]) for start, end, fault in values.loads),
        listing=listing,
    )


def stub_size_bound(request: StubRequest) -> int:
    """Bytes that suffice for the stub at whatever address (neither stub_addr nor site_addr matters)."""
    layout = Layout(0)
    _emit(layout, request)
    layout.raw(DISPLACED, bytes(_GROWTH * len(request.displaced)))
    layout.add("jump_back", continue_addr=request.continue_addr)
    _behind(layout, request)
    return layout.size + LITERAL_ALIGN - 1


def _emit(layout: Layout, request: StubRequest) -> ValueCode:
    _check(request)
    values = ValueCode(layout, request.form, request.site_addr, load_gate(request))
    if request.form is StubForm.PT:
        emit_pt(layout, request, values)
    else:
        assert request.ring is not None
        emit_ring(layout, request, request.ring, values)
    return values


def _check(request: StubRequest) -> None:
    if not 0 <= request.event_id <= 0xFFFF:
        raise StubError(f"event id {request.event_id:#x} does not fit 16 bits")
    if len(request.arguments) > MAX_WORDS:
        raise StubError(f"{len(request.arguments)} arguments", f"a probe takes up to {MAX_WORDS}")
    if not request.displaced:
        raise StubError(f"no displaced code for the site at {request.site_addr:#x}")
    for argument in request.arguments:
        check(argument)
    if request.ring is None and (request.form is StubForm.RING or any(map(has_load, request.arguments))):
        raise StubError("no ring layout for a stub that emits into it or loads through pointers")


def _displaced(layout: Layout, request: StubRequest) -> tuple[tuple[int, int], ...]:
    """The displaced instructions' copies and the jump back; (offset in the window, address of the copy) of each."""
    start = layout.next_addr
    code, offsets = _native.relocate(request.displaced, request.site_addr, start)
    layout.raw(DISPLACED, code)
    # Asked of the original: the copy of a loop or jrcxz ends with a jump, and goes on all the same.
    last = _native.decode(request.displaced[offsets[-1][0] :], request.site_addr)[0][2]
    if last not in _ENDS:
        layout.add("jump_back", continue_addr=request.continue_addr)
    return tuple((old, start + new) for old, new in offsets)


def _behind(layout: Layout, request: StubRequest) -> None:
    faults = [i for i, argument in enumerate(request.arguments) if has_load(argument)]
    if request.form is StubForm.PT:
        pt_behind(layout, request, faults)
    elif request.ring is not None:
        ring_behind(layout, request.ring, faults)
    layout.raw("tail", TAIL.pack(request.site_addr, request.continue_addr, len(request.displaced)) + request.displaced)
