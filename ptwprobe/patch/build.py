"""From a window to a finished patch: the stub's place, its code, and the jump to it. Nothing is written here."""

from __future__ import annotations

from dataclasses import replace

from ptwprobe._native import CodeMap, NativeError, disassemble, relative_operands
from ptwprobe.errors import RefusalReason, RefusedError
from ptwprobe.model import Argument, Patch, RingLayout, Site, StubForm, StubRequest, Window
from ptwprobe.patch.place import Allocator
from ptwprobe.patch.plan import JUMP, nearest_window
from ptwprobe.patch.refusals import refused
from ptwprobe.stub.assemble import assemble, stub_size_bound

REACH = 1 << 31
"""Bytes that a 4-byte displacement reaches, from behind its instruction."""


def build_patch(
    site: Site,
    event_id: int,
    arguments: tuple[Argument, ...],
    window: Window,
    allocator: Allocator,
    form: StubForm,
    ring: RingLayout | None,
    paced: bool = True,
    code_map: CodeMap | None = None,
) -> Patch:
    """The patch for ``window`` of ``site``. The stub's room stays taken in ``allocator`` unless this fails.

    ``code_map`` is asked where else the function can be probed, should there be no room. Raises RefusedError
    (no-stub-space, or what the displaced code does not allow) and StubError (what the arguments do not allow).
    """
    request = StubRequest(
        form=form,
        event_id=event_id,
        arguments=arguments,
        stub_addr=window.site_addr,
        site_addr=window.site_addr,
        displaced=window.displaced,
        continue_addr=window.continue_addr,
        paced=paced,
        ring=ring,
    )
    size = stub_size_bound(request)
    lowest, highest = stub_range(window, size)
    addr = allocator.allocate(size, lowest, highest, near=window.site_addr)
    if addr is None:
        elsewhere = nearest_window(code_map, site) if code_map else None
        where = f"between {lowest:#x} and {highest:#x}"
        if lowest >= highest:
            where = f"at {lowest:#x}, the only place where a jump that fits here can lead"
        detail = f"no free {size} bytes for the stub {where}"
        raise refused(site, window.displaced, RefusalReason.NO_STUB_SPACE, detail, elsewhere=elsewhere)
    try:
        stub = assemble(replace(request, stub_addr=addr))
        new = jump_to(window, addr)
    except BaseException as error:
        allocator.release(addr, size)
        if isinstance(error, NativeError):
            raise _not_movable(site, window, error) from error
        raise
    allocator.shrink(addr, size, len(stub.code))
    return Patch(site, event_id, window, stub, old=window.displaced[: window.written], new=new)


def stub_range(window: Window, size: int) -> tuple[int, int]:
    """The lowest and highest address for a stub of ``size`` bytes that the jump, the jump back and what the displaced
    code names relative to its place allow."""
    lowest, highest = window.target_min, window.target_max
    for target in [window.continue_addr, *relative_operands(window.displaced, window.site_addr)]:
        lowest = max(lowest, target - REACH + 1)
        highest = min(highest, target + REACH - size)
    return lowest, highest


def jump_to(window: Window, addr: int) -> bytes:
    """The bytes to write: a jump to ``addr``, or for a pun the part of it that is not there already."""
    after = window.site_addr + JUMP
    jump = b"\xe9" + (addr - after).to_bytes(4, "little", signed=True)
    new = jump[: window.written]
    # What stands behind the written bytes is the same for every target of the window.
    behind = (window.target_max - after).to_bytes(4, "little", signed=True)[window.written - 1 :]
    whole = new + behind
    if relative_operands(whole, window.site_addr) != [addr] or len(disassemble(whole, window.site_addr)) != 1:
        raise AssertionError(f"{whole.hex()} at {window.site_addr:#x} is not a jump to {addr:#x}")
    return new


def _not_movable(site: Site, window: Window, error: NativeError) -> RefusedError:
    kind, message, _ = error.args
    if kind == "out-of-reach":
        return refused(site, window.displaced, RefusalReason.NO_STUB_SPACE, message)
    return refused(site, window.displaced, RefusalReason(kind), message)
