"""Where a stub leads that has no branch which a trace would tell."""

from __future__ import annotations

from ptwprobe._native import decode, relative_operands
from ptwprobe.model import Stub


def straight_end(stub: Stub) -> int:
    """The runtime address at which the program goes on behind the stub; 0 where branches of the stub have a say in it.

    Between the two are only instructions that follow each other, and direct jumps.
    """
    pieces = {stub.addr + offset: (length, kind) for offset, length, kind in decode(stub.code, stub.addr)}
    at = stub.addr
    # Nothing comes twice on a way that ends.
    while (piece := pieces.pop(at, None)) is not None:
        length, kind = piece
        if kind == "jump":
            start = at - stub.addr
            (at,) = relative_operands(stub.code[start : start + length], at)
            if not stub.addr <= at < stub.end:
                return at
        elif kind in ("nop", "endbr", "plain"):
            at += length
        else:
            break
    return 0
