"""The walk of traces in which the kernel shows, and of CPUs that err."""

from __future__ import annotations

from tests.ptpackets import OVF, fup, pgd, pge, psb_plus, tip, tnt, tsc
from tests.walking import LOOP, SITE, STUB, Assemble, walk

KERNEL = 0xFFFFFFFF81000000
"""Traced too, though nobody has its code."""


def in_kernel(*, back: int) -> bytes:
    """Packets of the kernel up to where it goes back to a program."""
    return tnt("TTNT") + tip(KERNEL + 0x40) + tnt("T") + tip(KERNEL + 0x1234) + tip(KERNEL) + tnt("NN") + tip(back)


def test_a_program_goes_on_behind_a_system_call_whose_code_is_not_known(assemble: Assemble) -> None:
    p = assemble("call f\n back: jz back\n jmp rax\n f: nop\n call: syscall\n after: ret")
    packets = psb_plus(p._start) + tip(KERNEL) + in_kernel(back=p.after)
    # The return, too, whose call was before.
    walked = walk(packets + tnt("TT") + tip(KERNEL + 8), p)
    assert walked.branches[:5] == [
        (p._start, p.f, "call"),
        (p.call, KERNEL, "syscall"),
        (0, p.after, "farreturn"),
        (p.after, p.back, "return"),
        (p.back, p.back, "cond"),
    ]
    assert walked.errors == [f"the trace does not fit the instruction at {p.back:#x}"]
    assert walked.soft == [f"the kernel's code is not known, at {KERNEL:#x}: its branches are left out"]


def test_a_program_goes_on_behind_an_interrupt_whose_code_is_not_known(assemble: Assemble) -> None:
    p = assemble(SITE)
    nested = fup(KERNEL + 8) + tip(KERNEL + 0x100) + tnt("T")
    for ip in (p.again, STUB + 7):
        walked = walk(psb_plus(p.f) + fup(ip) + tip(KERNEL) + nested + in_kernel(back=ip) + tnt("TN"), p)
        assert [branch for branch in walked.branches if branch[0] < KERNEL] == [
            (ip, KERNEL, "interrupt"),
            (0, ip, "farreturn"),
            (p.again, p.f, "cond"),
        ]
        assert not walked.errors
        assert len(walked.soft) == 1


def test_tracing_that_starts_and_ends_in_the_kernel_loses_nothing_of_the_program(assemble: Assemble) -> None:
    p = assemble(SITE)
    packets = psb_plus(KERNEL) + in_kernel(back=p.f) + tnt("T") + fup(p.again) + tip(KERNEL) + tnt("T") + pgd()
    walked = walk(packets + pge(KERNEL + 4) + in_kernel(back=p.again) + tnt("T"), p)
    assert [branch for branch in walked.branches if branch[2] in ("cond", "interrupt", "farreturn")] == [
        (0, p.f, "farreturn"),
        (p.again, p.f, "cond"),
        (p.again, KERNEL, "interrupt"),
        (0, p.again, "farreturn"),
        (p.again, p.f, "cond"),
    ]
    assert not walked.errors


# ---- errata

SKYLAKE = "GenuineIntel,6,94,3"


def test_an_address_that_is_told_while_tracing_is_off_says_nothing(assemble: Assemble) -> None:
    p = assemble(LOOP)
    for stray in (psb_plus(p.other), psb_plus() + OVF + fup(p.other)):
        walked = walk(stray + tsc(1001) + pge(p.again) + tnt("T"), p)
        assert walked.branches == [(0, p.again, "start"), (p.again, p.top, "cond")]
        assert not walked.soft
    # Flow in between shows that it was on.
    assert walk(psb_plus(p.again) + tnt("T") + pge(p.again), p).soft == ["tracing starts while it is on"]


def test_an_overflow_inside_a_cyc_is_seen_on_cpus_that_do_so(assemble: Assemble) -> None:
    p = assemble(LOOP)
    packets = psb_plus(p.top) + tnt("T") + b"\x1f" + OVF + fup(p.either) + tnt("N") + tip(p.top)
    walked = walk(packets, p, cpu=SKYLAKE)
    assert walked.branches == [(p.again, p.top, "cond"), (p.first, p.top, "indirect")]
    assert [kind for _, _, _, kind, _, _ in walked.marks] == ["overflow"]


def test_a_jump_that_leaves_the_filter_untold_is_not_guessed(assemble: Assemble) -> None:
    p = assemble("jmp on\n on: nop\n call: syscall")
    assert walk(psb_plus(p._start) + pgd(), p).branches[-1] == (p.call, 0, "syscall")
    assert walk(psb_plus(p._start) + pgd(), p, cpu=SKYLAKE).branches == [(0, 0, "end")]
    assert walk(psb_plus(p._start) + pgd(p.on), p, cpu=SKYLAKE).branches == [(p._start, p.on, "jump")]
