"""Free address space and the allocator of stub room."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from itertools import pairwise

from ptwprobe.patch.place import (
    BRK_ROOM,
    GO_ARENAS,
    HIGHEST,
    PAGE,
    STACK_ROOM,
    AddressSpace,
    Allocator,
    lowest_mappable,
    mappings_left,
    read_brk_start,
    stub_mappings,
)
from ptwprobe.process import Process

REACH = 1 << 31


@dataclass
class Line:
    start: int
    end: int
    path: str = ""


PIE = [
    Line(0x5555_5555_4000, 0x5555_5556_0000, "/bin/prog"),
    Line(0x5555_5657_0000, 0x5555_5659_1000, "[heap]"),
    Line(0x7FFF_F7C0_0000, 0x7FFF_F7E0_0000, "/lib/libc.so.6"),
    Line(0x7FFF_F7F0_0000, 0x7FFF_F7FF_F000, "/lib/ld.so"),
    Line(0x7FFF_FFFD_E000, 0x7FFF_FFFF_F000, "[stack]"),
    Line(0xFFFF_FFFF_FF60_0000, 0xFFFF_FFFF_FF60_1000, "[vsyscall]"),
]
FIXED = [
    Line(0x40_0000, 0xA0_0000, "/usr/bin/prog"),
    Line(0x123_4000, 0x1334_5000, "[heap]"),
    *PIE[2:],
]


def allocator(lines: list[Line], **options: int) -> Allocator:
    return Allocator(AddressSpace.of(lines, 0, STACK_ROOM), **options)


def is_free(lines: list[Line], addr: int, size: int) -> bool:
    return all(addr + size <= line.start or line.end <= addr for line in lines)


def test_free_ranges_keep_a_page_from_every_mapping() -> None:
    free = AddressSpace.of(PIE, 0, STACK_ROOM).free()
    assert free == sorted(free)
    for start, end in free:
        assert 0 < start < end < HIGHEST
        assert start % PAGE == end % PAGE == 0
        assert is_free(PIE, start - PAGE, end - start + 2 * PAGE)
    assert free[0][0] == 0x10000


def test_the_heap_and_the_stack_can_grow() -> None:
    for limit, room in ((STACK_ROOM // 2, STACK_ROOM), (64 << 20, 64 << 20), (None, 1 << 30)):
        for start, end in AddressSpace.of(PIE, 0, limit).free():
            assert end <= 0x5555_5657_0000 or start >= 0x5555_5659_1000 + BRK_ROOM
            assert end <= 0x7FFF_FFFF_F000 - room - (1 << 20) or start >= 0x7FFF_FFFF_F000
            assert end <= 0x7FFF_F7FF_F000 or start >= 0x7FFF_FFFF_F000, "the gap below the stack is all the stack's"


def test_a_fixed_programs_heap_can_grow_by_a_gigabyte_and_there_is_room_for_2000_stubs() -> None:
    room = allocator(FIXED)
    places = [room.allocate(400, 0x10000, REACH - 1, near=0x40_0000) for _ in range(2000)]
    assert None not in places
    assert not any(0x123_4000 <= place < 0x1334_5000 + (1 << 30) for place in places if place)


def test_stubs_leave_most_of_the_mappings_to_the_program() -> None:
    assert [stub_mappings(left) for left in (0, 3, 400, 65_000)] == [0, 0, 100, 4096]
    assert mappings_left(1 << 40) == 0 < mappings_left(50)
    assert allocator(PIE, max_mappings=0).allocate(16, 0, HIGHEST, near=0) is None


def test_a_heap_that_is_not_there_yet_can_grow() -> None:
    lines = [line for line in PIE if line.path != "[heap]"]
    brk = 0x5555_5657_0000
    free = AddressSpace.of(lines, brk, STACK_ROOM).free()
    assert all(end <= brk or start >= brk + BRK_ROOM for start, end in free)


def test_go_arenas_are_left_alone_where_there_are_any() -> None:
    lines = [*FIXED, Line(0xC0_0000_0000, 0xC0_0400_0000)]
    assert all(end <= GO_ARENAS[0] or start >= GO_ARENAS[1] for start, end in AddressSpace.of(lines, 0, None).free())
    assert any(start < GO_ARENAS[0] < end for start, end in AddressSpace.of(FIXED, 0, None).free())


def test_stubs_of_a_pie_lie_below_it_side_by_side() -> None:
    made = allocator(PIE)
    site = 0x5555_5555_5000
    addrs = [made.allocate(200, site - REACH, site + REACH, site) for _ in range(100)]
    assert all(addr is not None and addr % 16 == 0 and addr < site for addr in addrs)
    [(start, length)] = made.ranges()
    assert length == -(-100 * 208 // PAGE) * PAGE
    assert start >= 0x5555_5555_4000 - (1 << 20) - PAGE


def test_stubs_of_a_program_at_a_fixed_address_do_not_take_the_heaps_room() -> None:
    made = allocator(FIXED)
    site = 0x60_0000
    low = made.allocate(200, 0, site + REACH, site)
    assert low is not None and 0x10000 <= low < 0x40_0000
    high = made.allocate(200, 0x4000_0000, site + REACH, site)
    assert high is not None and high >= 0x1334_5000 + BRK_ROOM


def test_no_room_is_told() -> None:
    made = allocator(PIE)
    assert made.allocate(64, 0x7FFF_F7D0_0000, 0x7FFF_F7D0_FFFF, 0x7FFF_F7D0_0000) is None
    assert made.allocate(64, 0x1000, 0x8000, 0x1000) is None
    assert made.allocate(64, 10, 9, 0) is None
    assert made.ranges() == []


def test_an_exact_place_is_taken_once() -> None:
    made = allocator(PIE)
    exact = 0x1234_5677
    assert made.allocate(64, exact, exact, 0) == exact
    assert made.allocate(64, exact + 8, exact + 8, 0) is None
    assert made.ranges() == [(0x1234_5000, PAGE)]
    made.release(exact, 64)
    assert made.ranges() == []
    assert made.allocate(64, exact + 8, exact + 8, 0) == exact + 8


def test_what_a_stub_did_not_need_is_used_again() -> None:
    made = allocator(PIE)
    first = made.allocate(5000, 0x1000_0000, 0x1000_FFFF, 0)
    assert first is not None and sum(length for _, length in made.ranges()) == 2 * PAGE
    made.shrink(first, 5000, 100)
    assert made.ranges() == [(first // PAGE * PAGE, PAGE)]
    second = made.allocate(64, 0x1000_0000, 0x1000_FFFF, 0)
    assert second is not None and first < second < first + PAGE


def test_mappings_are_bounded() -> None:
    made = allocator(PIE, max_mappings=3)
    spots = [0x1000_0000 + i * 0x10_0000 for i in range(5)]
    assert [made.allocate(32, spot, spot, 0) for spot in spots] == [*spots[:3], None, None]
    # Next to one that is there already is no new mapping.
    assert made.allocate(32, spots[0] + PAGE, spots[0] + PAGE, 0) == spots[0] + PAGE
    assert len(made.ranges()) == 3
    made.release(spots[1], 32)
    assert made.allocate(32, spots[4], spots[4], 0) == spots[4]


def test_random_use_never_overlaps_and_counts_right() -> None:
    chosen = random.Random(5)
    made = allocator(PIE)
    live: list[tuple[int, int]] = []
    for _ in range(3000):
        if live and chosen.random() < 0.3:
            made.release(*live.pop(chosen.randrange(len(live))))
            continue
        near = chosen.choice([0x5555_5555_5000, 0x7FFF_F7C1_0000])
        size = chosen.choice([40, 200, 300, 5000])
        lowest, highest = near - REACH + 1, near + REACH - size
        if chosen.random() < 0.5:
            lowest = chosen.randrange(lowest, near)
            highest = lowest + chosen.choice([0, 255, 65535])
        addr = made.allocate(size, lowest, highest, near)
        if addr is None:
            continue
        assert lowest <= addr <= highest and is_free(PIE, addr - PAGE, size + 2 * PAGE)
        live.append((addr, size))
    live.sort()
    assert all(a + size <= b for (a, size), (b, _) in pairwise(live))
    pages = {page for addr, size in live for page in range(addr // PAGE, (addr + size - 1) // PAGE + 1)}
    ranges = made.ranges()
    assert {p for start, length in ranges for p in range(start // PAGE, (start + length) // PAGE)} == pages
    assert made._mappings == len(ranges)
    for addr, size in live:
        made.release(addr, size)
    assert made.ranges() == [] and made._mappings == 0
    assert list(zip(made._starts, made._ends, strict=True)) == AddressSpace.of(PIE, 0, STACK_ROOM).free()


def test_a_thousand_stubs_are_placed_in_no_time_even_when_punned() -> None:
    made = allocator(PIE)
    for i in range(1000):
        lowest = 0x5555_0000_0000 + i * 0x1_0000
        assert made.allocate(220, lowest, lowest + 0xFF, lowest)
    assert len(made.ranges()) == 1000


def test_a_live_process() -> None:
    process = Process(os.getpid())
    brk = read_brk_start(os.getpid())
    space = AddressSpace.of(process.maps(), brk, process.rlimit_stack, lowest_mappable())
    heap = [m for m in process.maps() if m.path == "[heap]"]
    assert brk and all(m.start == brk for m in heap)
    assert space.lowest >= 0x10000
    made = Allocator(space)
    for mapping in process.maps():
        if mapping.executable and mapping.is_file:
            site = mapping.start
            assert made.allocate(300, site - REACH + 5000, site + REACH - 5000, site)
    assert read_brk_start(0) == 0
