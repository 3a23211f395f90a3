"""The walk, case by case: what packets over code that is written here say."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.ptpackets import OVF, PSB, fup, long_tnt, mode_exec, mode_tsx, pgd, pge, psb_plus, ptw, tip, tnt, tsc
from tests.walking import LOOP, SITE, STUB, Assemble, Walked, walk


def test_conditional_branches_direct_jumps_and_calls_are_followed(assemble: Assemble) -> None:
    p = assemble(LOOP)
    walked = walk(psb_plus(p.top) + tnt("TTN") + tip(p.back) + tnt("N") + tip(p.other), p)
    assert walked.branches == [
        (p.again, p.top, "cond"),
        (p.again, p.top, "cond"),
        (p.again + 2, p.out, "jump"),
        (p.out, p.f, "call"),
        (p.leave, p.back, "return"),
        (p.first, p.other, "indirect"),
    ]
    assert not walked.marks


def test_a_return_that_is_a_taken_branch_goes_to_its_call(assemble: Assemble) -> None:
    p = assemble(LOOP)
    walked = walk(psb_plus(p.top) + tnt("NTT") + tip(p.other), p)
    assert walked.branches[2:] == [
        (p.leave, p.back, "return"),
        (p.either, p.first, "cond"),
        (p.first, p.other, "indirect"),
    ]
    assert not walked.marks


def test_targets_may_come_after_the_branches_behind_them(assemble: Assemble) -> None:
    p = assemble(LOOP)
    # jmp rax comes between the branches of the two packets.
    packets = psb_plus(p.either) + tnt("NTT") + tsc(1001) + tnt("N") + tip(p.top) + tip(p.back)
    walked = walk(packets + tnt("T"), p, compressed_returns=False)
    assert walked.branches == [
        (p.first, p.top, "indirect"),
        (p.again, p.top, "cond"),
        (p.again, p.top, "cond"),
        (p.again + 2, p.out, "jump"),
        (p.out, p.f, "call"),
        (p.leave, p.back, "return"),
        (p.either, p.first, "cond"),
    ]
    assert not walked.marks


def test_a_return_that_is_not_taken_has_its_target_later(assemble: Assemble) -> None:
    p = assemble(LOOP)
    walked = walk(psb_plus(p.again) + tnt("NN") + tip(p.other), p)
    # The call is on the stack: a compressed return would be "taken", so the branch is the one behind.
    assert walked.branches[2:] == [(p.leave, p.other, "return")]
    assert walked.errors == [f"the trace does not fit the instruction at {p.done:#x}"]


def test_only_64_return_addresses_are_kept(assemble: Assemble) -> None:
    p = assemble("f: dec eax\n c: jz out\n d: call f\n e: nop\n out: ret")
    packets = psb_plus(p.f) + long_tnt("N" * 40) + long_tnt("N" * 30 + "T") + long_tnt("T" * 40) + long_tnt("T" * 24)
    walked = walk(packets + tip(p.e) + tip(p.f), p)
    kinds = Counter(kind for _, _, kind in walked.branches)
    assert kinds == {"cond": 1, "call": 70, "return": 66}
    assert not walked.marks


def test_a_call_of_the_next_instruction_is_not_kept(assemble: Assemble) -> None:
    p = assemble("call f\n back: nop\n f: call here\n here: pop rax\n leave: ret")
    walked = walk(psb_plus(p._start) + tnt("T"), p)
    assert walked.branches[-1] == (p.leave, p.back, "return")
    assert not walked.errors


def test_a_system_call_ends_the_trace_until_it_returns(assemble: Assemble) -> None:
    p = assemble(LOOP)
    walked = walk(psb_plus(p.other) + pgd() + pge(p.after) + pgd(), p)
    assert walked.branches[:2] == [(p.done, 0, "syscall"), (0, p.after, "start")]
    assert not walked.errors


def test_an_interrupt_is_a_branch_from_the_next_instruction(assemble: Assemble) -> None:
    p = assemble(LOOP)
    kernel = 0xFFFFFFFF81000000
    for end, to in ((pgd(), 0), (tip(kernel), kernel)):
        walked = walk(psb_plus(p.again) + tnt("N") + fup(p.f) + end, p)
        assert walked.branches == [
            (p.again + 2, p.out, "jump"),
            (p.out, p.f, "call"),
            (p.f, to, "interrupt"),
        ]
        assert not walked.errors + walked.soft


def test_an_aborted_transaction_is_left(assemble: Assemble) -> None:
    p = assemble("begin: xbegin abort\n in: dec eax\n again: jnz in\n xend\n abort: nop\n jmp rax")
    packets = psb_plus(p.begin) + mode_tsx(inside=True) + fup(p.labels["in"])
    packets += tnt("T") + mode_tsx(inside=False, abort=True) + fup(p.again) + tip(p.abort) + tip(p.begin)
    walked = walk(packets, p)
    assert walked.branches == [
        (p.again, p.labels["in"], "cond"),
        (p.again, p.abort, "abort"),
        (p.abort + 1, p.begin, "indirect"),
    ]
    assert not walked.errors + walked.soft


def test_code_of_32_bits(assemble: Assemble) -> None:
    # 0x48 is `dec eax` there, and a prefix in 64-bit code.
    p = assemble(".byte 0x48\n again: jnz _start\n nop\n out: jmp rax")
    walked = walk(psb_plus(p._start, bits=32) + tnt("TN") + mode_exec(64) + tip(p.again) + tnt("T"), p)
    assert walked.branches == [
        (p.again, p._start, "cond"),
        (p.out, p.again, "indirect"),
        (p.again, p._start, "cond"),
    ]


def test_instructions_may_overlap(assemble: Assemble) -> None:
    # A jump to its own second byte, which begins `inc eax`; from the second of `mov eax, 0x90900275` on it is `jnz`.
    source = "top: dec eax\n over: .byte 0xeb, 0xff, 0xc0\n end: jnz top\n"
    p = assemble(source + "mov: .byte 0xb8, 0x75, 0x02, 0x90, 0x90\n out: jmp rax")
    packets = psb_plus(p.top) + tnt("TN") + tip(p.mov + 1) + tnt("T") + tip(p.top) + fup(p.over + 1) + pgd()
    walked = walk(packets + pge(p.over + 1) + tnt("N") + tip(p.mov), p)
    around = [(p.over, p.over + 1, "jump"), (p.end, p.top, "cond")]
    assert walked.branches == [
        *around,
        around[0],
        (p.out, p.mov + 1, "indirect"),
        (p.mov + 1, p.out, "cond"),
        (p.out, p.top, "indirect"),
        around[0],
        (p.over + 1, 0, "interrupt"),
        (0, p.over + 1, "start"),
        (p.out, p.mov, "indirect"),
    ]
    assert not walked.errors + walked.soft


def test_jumps_in_circles_end(assemble: Assemble) -> None:
    p = assemble("here: jmp here\n one: jmp two\n two: jmp one")
    for start in (p.here, p.one):
        walked = walk(psb_plus(start) + tnt("T") + tip(start), p)
        assert walked.branches == []
        assert [error[:13] for error in walked.errors] == ["direct jumps "]
    # A hit, or an interrupt, tells where it was.
    walked = walk(psb_plus(p.one) + fup(p.two) + pgd(), p)
    assert walked.branches == [(p.one, p.two, "jump"), (p.two, 0, "interrupt")]


def test_an_overflow_loses_up_to_the_next_address(assemble: Assemble) -> None:
    p = assemble(LOOP)
    walked = walk(psb_plus(p.top) + tnt("T") + OVF + fup(p.again) + tnt("T"), p)
    assert walked.branches == [(p.again, p.top, "cond")] * 2
    assert [kind for _, _, _, kind, _, _ in walked.marks] == ["overflow"]


def test_after_bytes_that_are_no_packet_it_goes_on_at_the_next_psb(assemble: Assemble) -> None:
    p = assemble(LOOP)
    bad = psb_plus(p.top) + tnt("T") + b"\x02\xff" + tnt("TTT")
    walked = walk(bad + psb_plus(p.again) + tnt("T"), p)
    assert walked.branches == [(p.again, p.top, "cond")] * 2
    assert [(offset, kind) for _, _, offset, kind, _, _ in walked.marks] == [(len(bad) - 3, "error")]


@pytest.mark.parametrize("kept", [b"\x4d\x05\x34\x06", b"\x02\x32\x01", b"\x02"], ids=["tip", "ptw", "byte"])
def test_a_packet_without_its_end_does_not_take_the_psb_behind_it(assemble: Assemble, kept: bytes) -> None:
    p = assemble(LOOP)
    walked = walk(psb_plus(p.top) + tnt("T") + kept + psb_plus(p.again) + tnt("T"), p)
    assert walked.branches[0] == walked.branches[-1] == (p.again, p.top, "cond")
    assert len(walked.errors) >= 1


def test_a_packet_that_does_not_fit_the_code_costs_no_more_than_up_to_the_next_target(assemble: Assemble) -> None:
    p = assemble(LOOP)
    walked = walk(psb_plus(p.top) + tip(p.first) + tip(p.top) + tnt("T"), p)
    assert walked.branches == [(p.first, p.top, "indirect"), (p.again, p.top, "cond")]
    assert walked.errors == [f"the trace does not fit the instruction at {p.again:#x}"]


# ---- words

HIT = ptw(1, STUB + 4) + ptw(2, STUB + 10)


def test_a_hit_in_a_stub_that_cannot_be_read_moves_nothing(assemble: Assemble) -> None:
    p = assemble(SITE)
    walked = walk(psb_plus(p.f) + tnt("TN") + HIT + tnt("T") + tnt("N") + HIT + tnt("T"), p)
    assert walked.branches == [
        (p.again, p.f, "cond"),
        (p.again + 2, p.site, "jump"),
        (p.last, p.f, "cond"),
        (p.again + 2, p.site, "jump"),
        (p.last, p.f, "cond"),
    ]
    assert walked.words == [(1, 1, STUB + 4), (1, 2, STUB + 10), (3, 1, STUB + 4), (3, 2, STUB + 10)]
    assert not walked.errors + walked.soft


PATCHED = SITE.replace("nop dword ptr [rax+rax*1+0]", f".byte 0xe9; .long {STUB:#x} - on")
NEAR = 0x500000
NEAR_HIT = ptw(1, NEAR) + ptw(2, NEAR + 5)


def near(source: str) -> str:
    return source.replace(f"{STUB:#x}", f"{NEAR:#x}")


def test_a_hit_in_a_stub_that_is_known_is_at_its_place(assemble: Assemble) -> None:
    p = assemble(near(PATCHED))
    stub = assemble(f"ptwrite rax\n ptwrite rbx\n back: .byte 0xe9; .long {p.on:#x} - end\n end:", NEAR)
    walked = walk(psb_plus(p.again) + tnt("N") + NEAR_HIT + tnt("T"), p, stub)
    assert walked.branches == [
        (p.again + 2, p.site, "jump"),
        (p.site, NEAR, "jump"),
        (stub.back, p.on, "jump"),
        (p.last, p.f, "cond"),
    ]
    assert walked.words == [(2, 1, NEAR), (2, 2, NEAR + 5)]
    assert not walked.errors + walked.soft


def test_a_patched_site_whose_stub_cannot_be_read_goes_on_behind_it(assemble: Assemble) -> None:
    p = assemble(near(PATCHED))
    packets = psb_plus(p.again) + tnt("N") + NEAR_HIT + tnt("T") + tnt("T")
    walked = walk(packets, p, stubs=[(NEAR, NEAR + 32, p.site, p.on)])
    assert walked.branches == [
        (p.again + 2, p.site, "jump"),
        (p.site, NEAR, "jump"),
        (p.last, p.f, "cond"),
        (p.again, p.f, "cond"),
    ]
    assert not walked.errors + walked.soft
    # Nobody says where it goes on: told once, until a packet tells an address. The words are all there.
    walked = walk(packets + ptw(3, NEAR) + tip(p.f) + tnt("T"), p)
    assert walked.branches == [
        (p.again + 2, p.site, "jump"),
        (p.site, NEAR, "jump"),
        (p.again, p.f, "cond"),
    ]
    assert walked.errors == [f"no code is known at {NEAR:#x}"]
    assert [value for _, value, _ in walked.words] == [1, 2, 3]


def test_a_hit_is_at_its_site_where_that_is_known(assemble: Assemble) -> None:
    p = assemble(SITE)
    stub = (STUB, STUB + 32, p.site, p.on)
    packets = psb_plus(p.f) + tnt("TN") + HIT + fup(STUB + 7) + pgd()
    before = [(p.again, p.f, "cond"), (p.again + 2, p.site, "jump"), (STUB + 7, 0, "interrupt")]
    after = [(0, STUB + 7, "start"), (p.last, p.f, "cond")]
    walked = walk(packets + pge(STUB + 7) + tnt("T"), p, stubs=[stub])
    assert walked.branches == before + after
    assert walked.words == [(2, 1, STUB + 4), (2, 2, STUB + 10)]
    assert not walked.errors + walked.soft
    # The trace begins, or goes on after a loss, inside the stub.
    for begin in (psb_plus(STUB + 7), psb_plus() + pge(STUB + 7), psb_plus(p.f) + OVF + fup(STUB + 7)):
        walked = walk(begin + ptw(2, STUB + 10) + tnt("T"), p, stubs=[stub])
        assert walked.branches[-1] == (p.last, p.f, "cond")
        assert not walked.soft


@pytest.mark.parametrize("source", [SITE, near(PATCHED)])
def test_flow_behind_a_stub_that_branches_and_cannot_be_read_is_unknown_up_to_the_next_target(
    assemble: Assemble, source: str
) -> None:
    p = assemble(source)
    stub = (NEAR, NEAR + 32, p.site, 0)
    # What the stub's own branches were, and whether there was one, nobody can tell from the next.
    packets = psb_plus(p.again) + tnt("N") + NEAR_HIT + tnt("TN") + tnt("N") + tip(p.again) + tnt("TT")
    walked = walk(packets, p, stubs=[stub])
    jumps = [(p.again + 2, p.site, "jump")] + [(p.site, NEAR, "jump")] * (source != SITE)
    assert walked.branches == [*jumps, (p.again, p.f, "cond"), (p.again, p.f, "cond")]
    assert walked.errors == [f"no code is known at {NEAR if source != SITE else p.site:#x}"]
    assert [value for _, value, _ in walked.words] == [1, 2]
    # Where the stub can be read its branches are known.
    branching = assemble(f"test eax, eax\n again: jz again\n .byte 0xe9; .long {p.on:#x} - end\n end:", NEAR)
    walked = walk(psb_plus(p.again) + tnt("N") + tnt("TN") + tnt("T"), p, branching, stubs=[stub])
    if source != SITE:
        assert walked.branches[2:] == [
            (branching.again, branching.again, "cond"),
            (branching.again + 2, p.on, "jump"),
            (p.last, p.f, "cond"),
        ]
        assert not walked.errors


@pytest.mark.parametrize("where", [0, 4, 7])
def test_an_interrupt_in_a_stub_that_cannot_be_read_loses_nothing(assemble: Assemble, where: int) -> None:
    p = assemble(SITE)
    handler = assemble("nop\n jmp rax\n nop\n leave: syscall", 0x600000)
    begin = psb_plus(p.f) + tnt("TN") + ptw(1, STUB + 4) + fup(STUB + where) + pgd()
    end = pge(STUB + where) + ptw(2, STUB + 10) + tnt("T")
    walked = walk(begin + end, p)
    before = [(p.again, p.f, "cond"), (STUB + where, 0, "interrupt")]
    after = [(0, STUB + where, "start"), (p.again + 2, p.site, "jump"), (p.last, p.f, "cond")]
    assert walked.branches == before + after
    assert not walked.errors + walked.soft
    # A signal handler runs in between.
    signal = pge(handler.start) + tip(handler.leave - 1) + pgd()
    walked = walk(begin + signal + end, p, handler)
    assert walked.branches[2:5] == [
        (0, handler.start, "start"),
        (handler.start + 1, handler.leave - 1, "indirect"),
        (handler.leave, 0, "syscall"),
    ]
    assert walked.branches[:2] + walked.branches[5:] == before + after
    assert not walked.errors + walked.soft


def test_words_are_read_out_of_sync_too(assemble: Assemble) -> None:
    p = assemble(SITE)
    walked = walk(psb_plus() + ptw(1) + OVF + HIT + tnt("TT") + ptw(3), p)
    assert [(value, ip) for _, value, ip in walked.words] == [(1, None), (1, STUB + 4), (2, STUB + 10), (3, None)]


def test_an_address_that_nothing_leads_to_is_believed_and_loses_nothing(assemble: Assemble) -> None:
    p = assemble(SITE)
    walked = walk(psb_plus(p.again) + tnt("N") + ptw(9, p.again) + tnt("T"), p)
    assert walked.branches == [(p.again + 2, p.site, "jump"), (p.last, p.f, "cond")]
    assert len(walked.soft) == 1
    assert not walked.errors


@pytest.mark.parametrize("cuts", list(itertools.product([False, True], repeat=2)))
def test_a_psb_anywhere_changes_nothing(assemble: Assemble, cuts: tuple[bool, bool]) -> None:
    p = assemble(SITE)
    middle, end = (psb_plus(ip) if cut else b"" for cut, ip in zip(cuts, (p.again, STUB + 7), strict=True))
    packets = psb_plus(p.f) + tnt("T") + middle + tnt("N") + ptw(1, STUB + 4) + end + ptw(2, STUB + 10) + tnt("T")
    walked = walk(packets, p)
    assert walked.branches == [
        (p.again, p.f, "cond"),
        (p.again + 2, p.site, "jump"),
        (p.last, p.f, "cond"),
    ]
    assert not walked.errors + walked.soft


def test_of_a_trace_without_any_psb_nothing_is_known(assemble: Assemble) -> None:
    p = assemble(SITE)
    walked = walk(tnt("TT") + PSB[:-1], p)
    assert walked == Walked([], [(0, 0, 0, "missing", "16", None)])
