"""Which bytes a patch may take at a site, and by which tactic; or a named refusal. Nothing is written here.

The bytes are judged as the file has them, and have to stand in the target's memory just so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeAlias

from ptwprobe._native import CodeMap, NativeError, decode, relocate
from ptwprobe.errors import RefusalReason, RefusedError
from ptwprobe.model import Site, Tactic, Window
from ptwprobe.patch.pages import crosses_page
from ptwprobe.patch.refusals import MAY_NOT_CROSS, Obstacle, refused

JUMP = 5
"""Bytes of ``jmp rel32``."""
PAGE = 4096
LOWEST, HIGHEST = 0x1000, (1 << 47) - 1
"""Addresses that a process can have at all; what is free of them is the allocator's business."""
ENDBR64 = bytes.fromhex("f30f1efa")
LOOKAHEAD = 64
"""Bytes that are read at a site: more than any window needs (four instructions of 15 bytes)."""

ReadMemory: TypeAlias = Callable[[int, int], bytes]
"""(runtime address, length) → that many bytes of the target."""

_NOT_MOVABLE = {
    "call": (RefusalReason.CALL_IN_WINDOW, "a call would have to return into the jump"),
    "system": (RefusalReason.SYSCALL_IN_WINDOW, "a system call may be restarted where the jump stands"),
    "trap": (RefusalReason.SYSCALL_IN_WINDOW, "a breakpoint reports the address it stands at"),
    "fixed": (RefusalReason.NOT_RELOCATABLE, "an instruction that cannot run elsewhere"),
    "endbr": (RefusalReason.JUMP_TARGET_IN_WINDOW, "endbr64 marks a place that indirect jumps land on"),
}
_ENDS_FLOW = {"jump", "indirect", "return", "undefined"}


def plan_window(
    site: Site, read_memory: ReadMemory, code_map: CodeMap, can_switch: Callable[[int], bool] | None = None
) -> Window:
    """The window for a probe at ``site``: NOP, then one instruction, then several, then punning.

    ``can_switch``: whether a page (by its runtime address) can be exchanged; None: all can.

    Raises RefusedError if no tactic is safe. The caller has to look after overlaps with its own patches
    (:class:`Taken`) and to find a place for the stub within the window's target range.
    """
    code = code_map.bytes(site.vaddr, LOOKAHEAD)
    if not code:
        raise refused(site, code, RefusalReason.NOT_EXECUTABLE, "the file has no code there")
    memory = read_memory(site.runtime_addr, len(code))
    found = find_window(code_map, site.vaddr, site.object.bias)
    needed = JUMP if isinstance(found, Obstacle) else max(JUMP, len(found.displaced))
    if memory[:needed] != code[:needed]:
        detail = f"the file has {code[:needed].hex(' ')} there; another tool has patched it"
        raise refused(site, memory, RefusalReason.FOREIGN_PROBE, detail, "let the other tool take its probe away first")
    if isinstance(found, Window) and can_switch and crosses_page(found):
        page = found.site_addr & -PAGE
        if not (can_switch(page) and can_switch(page + PAGE)):
            found = find_window(code_map, site.vaddr, site.object.bias, may_cross=False)
    if isinstance(found, Obstacle):
        raise refused(site, code, found.reason, found.detail, elsewhere=nearest_window(code_map, site))
    return found


def find_window(code_map: CodeMap, vaddr: int, bias: int, may_cross: bool = True) -> Window | Obstacle:
    """The window at ``vaddr`` of a file that is mapped at ``bias``, going by the file alone.

    ``may_cross``: whether what is written may lie in two pages.
    """
    if not code_map.is_boundary(vaddr):
        return Obstacle(RefusalReason.NOT_AN_INSTRUCTION, "no instruction begins there")
    code = code_map.bytes(vaddr, LOOKAHEAD)
    instructions = decode(code, vaddr)
    _, length, kind = instructions[0]
    if kind == "endbr":
        return Obstacle(RefusalReason.NOT_RELOCATABLE, "endbr64 has to stay where indirect jumps land")
    if kind in _NOT_MOVABLE:
        return Obstacle(*_NOT_MOVABLE[kind])
    window = _jump_window(code_map, vaddr, bias, code, instructions)
    if isinstance(window, Window) and not may_cross and crosses_page(window):
        window = MAY_NOT_CROSS
    if isinstance(window, Window) or length >= JUMP:
        return window
    punned = _punned_window(code_map, vaddr, bias, code, length)
    if isinstance(punned, Window) and (may_cross or not crosses_page(punned)):
        return punned
    return window


def _jump_window(
    code_map: CodeMap, vaddr: int, bias: int, code: bytes, instructions: list[tuple[int, int, str]]
) -> Window | Obstacle:
    """Room for a whole ``jmp rel32``: a NOP or a run of them, one instruction, or several."""
    taken = _take(code_map, vaddr, instructions)
    if isinstance(taken, Obstacle):
        return taken
    count, size = taken
    if inside := code_map.targets(vaddr, vaddr + JUMP):
        target, why = inside[0]
        return Obstacle(RefusalReason.JUMP_TARGET_IN_WINDOW, f"byte {target - vaddr} is the target of a {why}")
    if count > 1 and code_map.has_unknown_jumps(vaddr):
        return Obstacle(RefusalReason.UNKNOWN_TARGETS, "the function jumps to computed addresses")
    addr = vaddr + bias
    if obstacle := _check_relocation(code[:size], addr):
        return obstacle
    if all(kind == "nop" for _, _, kind in instructions[:count]):
        tactic = Tactic.NOP
    else:
        tactic = Tactic.SINGLE if count == 1 else Tactic.WINDOW
    after = addr + JUMP
    lowest, highest = max(LOWEST, after - (1 << 31)), min(HIGHEST, after + (1 << 31) - 1)
    return Window(tactic, addr, code[:size], JUMP, lowest, highest)


def _take(code_map: CodeMap, vaddr: int, instructions: list[tuple[int, int, str]]) -> tuple[int, int] | Obstacle:
    """How many instructions, and bytes, make room for the jump."""
    bounds = code_map.function_bounds(vaddr)
    ended = False
    for count, (offset, length, kind) in enumerate(instructions, 1):
        at = vaddr + offset
        outside = offset > 0 and (bounds is None or at >= bounds[1])
        if outside or ended:
            # Filling between functions, or after a jump: nothing that anybody could still need.
            filling = kind == "nop" or (kind == "trap" and ended)
            if not filling and code_map.targets(at - 1, at + 1):
                return Obstacle(RefusalReason.JUMP_TARGET_IN_WINDOW, f"other code begins at byte {offset}")
            if not filling and outside:
                return Obstacle(RefusalReason.FUNCTION_TOO_SHORT, f"the function ends after {offset} bytes")
            if not filling:
                return Obstacle(RefusalReason.UNKNOWN_TARGETS, f"byte {offset} is reached in a way that is not known")
        elif kind in _NOT_MOVABLE:
            return Obstacle(*_NOT_MOVABLE[kind])
        if offset + length >= JUMP:
            return count, offset + length
        ended = ended or kind in _ENDS_FLOW
    return Obstacle(RefusalReason.FUNCTION_TOO_SHORT, "the code ends before there is room for a jump")


def _punned_window(code_map: CodeMap, vaddr: int, bias: int, code: bytes, length: int) -> Window | Obstacle:
    """Only the instruction's own bytes change; what follows is the top of the jump's displacement."""
    addr = vaddr + bias
    above = code[length:JUMP]
    if len(code) < JUMP:
        return Obstacle(RefusalReason.FUNCTION_TOO_SHORT, "the code ends before there is room for a jump")
    if inside := code_map.targets(vaddr, vaddr + length):
        target, why = inside[0]
        return Obstacle(RefusalReason.JUMP_TARGET_IN_WINDOW, f"byte {target - vaddr} is the target of a {why}")
    if obstacle := _check_relocation(code[:length], addr):
        return obstacle
    free_bits = 8 * (length - 1)
    lowest = addr + JUMP + (int.from_bytes(above, "little", signed=True) << free_bits)
    highest = lowest + (1 << free_bits) - 1
    if highest < LOWEST or lowest > HIGHEST:
        return Obstacle(RefusalReason.NO_STUB_SPACE, "the punned jump would leave the address space")
    return Window(Tactic.PUN, addr, code[:length], length, max(lowest, LOWEST), min(highest, HIGHEST))


def _check_relocation(code: bytes, addr: int) -> Obstacle | None:
    try:
        relocate(code, addr, addr + PAGE)
    except NativeError as error:
        kind, message, offset = error.args
        # Reach depends on where the stub will be: the allocator keeps to it.
        if kind != "out-of-reach":
            return Obstacle(RefusalReason(kind), f"byte {offset}: {message}")
    return None


def nearest_window(code_map: CodeMap, site: Site, tries: int = 64) -> int | None:
    """Offset from the site of the nearest instruction of its function that takes a patch without punning."""
    bounds = code_map.function_bounds(site.vaddr)
    if bounds is None:
        return None
    start, end = bounds
    boundaries = [start + offset for offset, _, _ in decode(code_map.bytes(start, end - start), start)]
    after = [b for b in boundaries if b > site.vaddr][:tries]
    before = [b for b in reversed(boundaries) if b < site.vaddr][:tries]
    for vaddr in after + before:
        window = find_window(code_map, vaddr, site.object.bias)
        if isinstance(window, Window) and window.tactic is not Tactic.PUN:
            return vaddr - site.vaddr
    return None


def entry_after_endbr(site: Site, code: bytes) -> Site:
    """The same site behind a leading ``endbr64``, which stays for indirect calls; ``code`` is what is there."""
    if not code.startswith(ENDBR64):
        return site
    skip = len(ENDBR64)
    return replace(
        site,
        vaddr=site.vaddr + skip,
        file_offset=site.file_offset + skip,
        runtime_addr=site.runtime_addr + skip,
    )


def footprint(window: Window) -> tuple[int, int]:
    """[start, end) of the runtime addresses whose bytes the patch changes or relies on."""
    return window.site_addr, window.site_addr + max(JUMP, len(window.displaced))


class Taken:
    """The bytes of one process that patches of ours change or rely on; their footprints never overlap."""

    def __init__(self, windows: Iterable[Window] = ()) -> None:
        footprints = sorted(footprint(window) for window in windows)
        self._starts = [start for start, _ in footprints]
        self._ends = [end for _, end in footprints]

    def take(self, site: Site, window: Window) -> None:
        """Have the bytes of ``window``. Raises RefusedError (already-probed) if a patch of ours needs one of them."""
        start, end = footprint(window)
        at = bisect_left(self._starts, end)
        if at and self._ends[at - 1] > start:
            detail = f"a probe at {self._starts[at - 1]:#x} has these bytes"
            hint = "record both values with one probe, or take the other probe away"
            raise refused(site, window.displaced, RefusalReason.ALREADY_PROBED, detail, hint)
        self._starts.insert(at, start)
        self._ends.insert(at, end)


__all__ = [
    "Obstacle",
    "ReadMemory",
    "RefusedError",
    "Taken",
    "entry_after_endbr",
    "find_window",
    "footprint",
    "nearest_window",
    "plan_window",
]
