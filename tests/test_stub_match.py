"""Any stub reads back from its bytes, whatever it fetches; anything else does not."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ptwprobe import _native
from ptwprobe.errors import StubError
from ptwprobe.model import (
    Argument,
    Constant,
    Fetch,
    Memory,
    Register,
    RingLayout,
    Stub,
    StubForm,
    StubRequest,
    ThreadIdSource,
    TypeKind,
    ValueType,
)
from ptwprobe.stub.assemble import MAX_WORDS, assemble, stub_size_bound
from ptwprobe.stub.encode import REGISTERS
from ptwprobe.stub.match import match_stub
from ptwprobe.stub.straight import straight_end

U64 = (1 << 64) - 1
SITE = 0x5555_5555_5000

# Plain, growing and rip-relative instructions, and ends without a way on.
DISPLACED = (
    b"\x0f\x1f\x44\x00\x00",
    b"\x90" * 5,
    b"\x55\x48\x89\xe5\x53",  # push rbp; mov rbp, rsp; push rbx
    b"\x48\x8d\x05\x10\x00\x00\x00",  # lea rax, [rip + 0x10]
    b"\x85\xff\x74\x10\x90",  # test edi, edi; je +0x10; nop
    b"\xe3\x10\xe3\x10\xe3\x10",  # jrcxz, three times
    b"\x31\xc0\xc3\x90\x90",  # xor eax, eax; ret; nop; nop
    b"\xe9\x00\x01\x00\x00",  # jmp
)

types = st.builds(ValueType, st.sampled_from(TypeKind), st.sampled_from([8, 16, 32, 64]))
offsets = st.one_of(
    st.integers(-(1 << 8), 1 << 8), st.integers(-(1 << 31), (1 << 31) - 1), st.integers(-(1 << 63), 1 << 62)
)
leaves = st.one_of(
    st.builds(Register, st.sampled_from([*REGISTERS, "rip"])), st.builds(Constant, st.integers(-(1 << 63), U64))
)
fetches: st.SearchStrategy[Fetch] = st.recursive(leaves, lambda inner: st.builds(Memory, inner, offsets), max_leaves=4)
arguments = st.builds(Argument, st.just("value"), fetches, types, st.just(""))
addresses = st.integers(0, (1 << 47) - 1)
layouts = st.builds(
    RingLayout,
    control_addr=addresses,
    data_addr=addresses,
    rings=st.integers(1, 4096),
    ring_bits=st.integers(12, 30),
    gate_addr=addresses,
    load_gate_addr=addresses,
    load_gate_value=st.integers(1, (1 << 30) - 1),
    thread_id=st.sampled_from(ThreadIdSource),
    thread_id_offset=st.integers(-(1 << 31), (1 << 31) - 1),
    use_rdpid=st.booleans(),
)
requests = st.builds(
    lambda displaced, **rest: StubRequest(displaced=displaced, continue_addr=SITE + len(displaced), **rest),
    form=st.sampled_from(StubForm),
    event_id=st.integers(0, 0xFFFF),
    arguments=st.lists(arguments, max_size=8).map(tuple),
    stub_addr=st.integers(SITE - 0x7000_0000, SITE + 0x7000_0000),
    site_addr=st.just(SITE),
    displaced=st.sampled_from(DISPLACED),
    paced=st.booleans(),
    ring=layouts,
)


# Two words of the pt form with nothing between them, each by a template of its own.
CONSTANT_THEN_REGISTER = StubRequest(
    form=StubForm.PT,
    event_id=1,
    arguments=(
        Argument("value", Constant(7), ValueType(TypeKind.UNSIGNED, 8), ""),
        Argument("value", Register("rax"), ValueType(TypeKind.UNSIGNED, 8), ""),
        Argument("value", Constant(7), ValueType(TypeKind.UNSIGNED, 8), ""),
        Argument("value", Register("rax"), ValueType(TypeKind.UNSIGNED, 64), ""),
    ),
    stub_addr=SITE + 0x1000,
    site_addr=SITE,
    displaced=DISPLACED[0],
    continue_addr=SITE + len(DISPLACED[0]),
    paced=False,
)


def facts(stub: Stub) -> tuple[object, ...]:
    request = stub.request
    return (
        (
            request.form,
            request.event_id,
            request.stub_addr,
            request.site_addr,
            request.displaced,
            request.continue_addr,
        ),
        (stub.code, stub.slot_addrs, stub.displaced_map, stub.loads, stub.listing),
    )


@settings(max_examples=100, deadline=None)
@given(requests)
def test_a_stub_without_branches_leads_to_where_the_program_goes_on(request: StubRequest) -> None:
    stub = assemble(request)
    branches = request.form is StubForm.RING or stub.loads or request.displaced in DISPLACED[4:7]
    jump = SITE + 5 + 0x100 if request.displaced == DISPLACED[7] else request.continue_addr
    assert straight_end(stub) == (0 if branches else jump)


@settings(max_examples=150, deadline=None)
@given(requests, st.binary(max_size=40))
@example(CONSTANT_THEN_REGISTER, b"")
def test_every_stub_reads_back(request: StubRequest, behind: bytes) -> None:
    stub = assemble(request)
    matched = match_stub(stub.code + behind, request.stub_addr)
    assert matched is not None
    assert facts(matched) == facts(stub)
    if request.form is StubForm.PT:
        assert matched.request.paced == request.paced
        return
    ring, want = matched.request.ring, request.ring
    assert ring is not None and want is not None
    assert (ring.control_addr, ring.data_addr, ring.rings, ring.ring_bits, ring.gate_addr, ring.use_rdpid) == (
        (want.control_addr, want.data_addr, want.rings, want.ring_bits, want.gate_addr, want.use_rdpid)
    )
    if stub.loads:
        assert (ring.load_gate_addr, ring.load_gate_value) == (want.load_gate_addr, want.load_gate_value)


@settings(max_examples=60, deadline=None)
@given(requests, st.data())
def test_a_changed_byte_is_no_match_or_another_stub(request: StubRequest, data: st.DataObject) -> None:
    stub = assemble(request)
    at = data.draw(st.integers(0, len(stub.code) - 1))
    changed = bytearray(stub.code)
    changed[at] ^= data.draw(st.integers(1, 255))
    matched = match_stub(bytes(changed), request.stub_addr)
    # A number may be another number; then the result says so, and it is not the stub that was installed.
    assert matched is None or (matched.code == changed and matched.request != request)


@settings(max_examples=50, deadline=None)
@given(requests, st.integers(1, 1 << 20))
def test_a_stub_cut_short_or_elsewhere_is_no_match(request: StubRequest, distance: int) -> None:
    stub = assemble(request)
    assert match_stub(stub.code[:-1], request.stub_addr) is None
    moved = replace(request, stub_addr=request.stub_addr + distance)
    # Only a stub that never jumps back is the same bytes elsewhere.
    matched = match_stub(stub.code, moved.stub_addr)
    assert (matched is not None) == (assemble(moved).code == stub.code)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_other_bytes_are_no_match(code: bytes) -> None:
    assert match_stub(code, 0x1000) is None


@settings(max_examples=150, deadline=None)
@given(requests, st.integers(SITE - 0x7000_0000, SITE + 0x7000_0000))
def test_the_size_bound_holds_and_does_not_depend_on_addresses(request: StubRequest, stub_addr: int) -> None:
    bound = stub_size_bound(request)
    assert len(assemble(request).code) <= bound
    assert stub_size_bound(replace(request, stub_addr=stub_addr)) == bound
    assert stub_size_bound(replace(request, stub_addr=0, site_addr=0, continue_addr=5)) == bound


@settings(max_examples=100, deadline=None)
@given(requests)
def test_slots_loads_and_copies_lie_in_the_stub(request: StubRequest) -> None:
    stub = assemble(request)
    assert len(stub.slot_addrs) == 1 + len(request.arguments)
    assert list(stub.slot_addrs) == sorted(set(stub.slot_addrs))
    starts = {addr: text for addr, _, text in _native.stub_listing(stub.code, stub.addr)}
    for addr in stub.slot_addrs:
        assert starts[addr].startswith("ptwrite" if request.form is StubForm.PT else "mov qword ptr [r10 + ")
    for start, end, fixup in stub.loads:
        assert starts[start].startswith("mov")
        assert stub.addr <= start < end <= fixup < stub.end
    for offset, addr in stub.displaced_map:
        assert 0 <= offset < len(request.displaced)
        assert addr in starts


def simple(
    form: StubForm, *fetches: tuple[str, str], displaced: bytes = b"\x90" * 5, paced: bool = True
) -> StubRequest:
    return StubRequest(
        form,
        0x8001,
        tuple(Argument("", Register(name), ValueType(TypeKind(type[0]), int(type[1:])), "") for name, type in fetches),
        SITE + 0x1000,
        SITE,
        displaced,
        SITE + len(displaced),
        paced=paced,
    )


def instructions(stub: Stub) -> list[str]:
    return [line.split("  ")[-1].strip() for line in stub.listing if "  " in line]


def test_a_pt_stub_of_plain_registers_touches_nothing() -> None:
    stub = assemble(simple(StubForm.PT, ("rdi", "u64"), ("rsp", "u64")))
    literal = stub.addr + 40
    assert instructions(stub) == [
        "lfence",
        f"ptwrite qword ptr [{literal:#x}]",
        "lfence",
        "ptwrite rdi",
        "lfence",
        "ptwrite rsp",
        *["nop"] * 5,
        f"jmp {SITE + 5:#x}",
    ]
    assert stub.code[40:48] == (0x8001 << 48 | 2 << 40 | 0x5054525731).to_bytes(8, "little")


def test_an_unpaced_pt_stub_that_narrows_a_word() -> None:
    stub = assemble(simple(StubForm.PT, ("rcx", "u64"), ("rsi", "s8"), ("rsp", "u64"), paced=False))
    assert instructions(stub)[4:9] == [
        "ptwrite qword ptr [rsp + 0x8]",
        "movsx rax, sil",
        "ptwrite rax",
        "lea rax, [rsp + 0x90]",
        "ptwrite rax",
    ]


def test_no_jump_back_behind_code_that_never_gets_there() -> None:
    for displaced in (b"\x31\xc0\xc3\x90\x90", b"\xe9\x00\x01\x00\x00", b"\xff\xe0\x90\x90\x90"):
        stub = assemble(simple(StubForm.PT, displaced=displaced))
        assert f"jmp {SITE + len(displaced):#x}" not in instructions(stub)


def test_a_tail_that_tells_of_no_code_is_no_match() -> None:
    code = bytearray(assemble(simple(StubForm.PT)).code)
    code[-6] = 0
    assert match_stub(bytes(code), SITE + 0x1000) is None


def _arguments(count: int) -> tuple[Argument, ...]:
    return (Argument("a", Register("rdi"), ValueType(TypeKind.HEX, 64), ""),) * count


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"event_id": 0x10000}, "event id 0x10000"),
        ({"arguments": _arguments(MAX_WORDS + 1)}, "33 arguments"),
        (
            {"arguments": (Argument("x", Register("eax"), ValueType(TypeKind.HEX, 64), ""),)},
            "argument x: no register %eax",
        ),
        (
            {"arguments": (Argument("x", Register("rax"), ValueType(TypeKind.HEX, 24), ""),)},
            "argument x: no type of 24",
        ),
        ({"arguments": (Argument("x", Memory(Register("rax"), 0), ValueType(TypeKind.HEX, 8), ""),)}, "no ring layout"),
        ({"form": StubForm.RING}, "no ring layout"),
        ({"displaced": b""}, "no displaced code for the site at 0x5555"),
        ({"continue_addr": SITE + (1 << 33)}, "continue_addr=0x5557"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_stub_can_do_is_refused(change: dict[str, object], message: str) -> None:
    make = functools.partial(replace, simple(StubForm.PT))
    with pytest.raises(StubError, match=message):
        assemble(make(**change))


def test_a_displaced_call_is_refused() -> None:
    with pytest.raises(_native.NativeError, match="call-in-window"):
        assemble(simple(StubForm.PT, displaced=b"\xe8\x00\x00\x00\x00"))
