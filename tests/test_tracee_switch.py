"""Code that is switched by the page: what the target, other tools and a reader of its mappings see of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ptwprobe._native import Tracer
from ptwprobe.errors import RefusalReason, RefusedError, TargetError
from ptwprobe.model import Patch
from ptwprobe.patch import switch
from ptwprobe.patch.install import Target
from ptwprobe.patch.pages import CodePages
from ptwprobe.process import Process
from tests import targets
from tests.test_tracee_install import hand_made_patch, maps, read, tracer
from tests.tracefs import Uprobe, Uprobes

Start = Callable[..., targets.Target]
Programs = Callable[..., Path]
needs_uprobes = pytest.mark.needs("root", "uprobes")
__all__ = ["tracer"]


class Hot:
    """Two threads in little functions, with a patch ready for each; the stubs hold the displaced code only."""

    def __init__(self, program: targets.Target, path: Path, tracer: Tracer) -> None:
        self.program = program
        self.pid = program.pid
        self.path = path
        self.sites = tuple(int(word, 16) for word in program.output.split()[1:4])
        self.before = maps(program.pid)
        self.text = self.code()
        self.target = Target(tracer, program.pid)
        space = (self.sites[0] & ~0xFFF) - (1 << 24)
        self.target.map_stub_space([(space, 4096)])
        self.patches = [hand_made_patch(program.pid, site, space + 64 * i) for i, site in enumerate(self.sites)]
        for patch in self.patches:
            self.target.write_stub(patch.stub.addr, patch.stub.code)

    @property
    def nop(self) -> Patch:
        return self.patches[0]

    @property
    def window(self) -> Patch:
        return self.patches[1]

    @property
    def crossing(self) -> Patch:
        return self.patches[2]

    def code(self) -> list[bytes]:
        return [read(self.pid, site & ~0xFFF, 8192) for site in self.sites]

    def uprobe(self, addr: int) -> Uprobe:
        here = next(m for m in Process(self.pid).maps() if m.start <= addr < m.end)
        return Uprobe("there", self.path, addr - here.start + here.offset, "")

    def switched(self) -> list[str]:
        return [line for line in maps(self.pid).splitlines() if "/memfd:ptwprobe-code:" in line]

    def write(self, addr: int, data: bytes) -> None:
        with Path(f"/proc/{self.pid}/mem").open("r+b", buffering=0) as memory:
            os.pwrite(memory.fileno(), data, addr)

    def apply(self, patches: list[Patch]) -> int:
        return _patiently(lambda: self.target.apply(patches))

    def undo(self, patches: list[Patch]) -> int:
        return _patiently(lambda: self.target.undo(patches))

    def leaves_nothing(self) -> None:
        assert self.target.leave() is True
        kernels = ("[uprobes]", "[uprobes-trampoline]")
        now = [line for line in maps(self.pid).splitlines() if not line.endswith(kernels)]
        assert now == self.before.splitlines()
        assert self.code() == self.text

    def runs_right(self) -> None:
        self.program.go()
        assert " wrong=0 " in self.program.finish()
        assert self.program.exit_code == 0


def _patiently(change: Callable[[], int]) -> int:
    """On a machine that is busy a thread may not come to a stand in time."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return change()
        except RefusedError as error:
            if error.reason is not RefusalReason.BUSY or time.monotonic() > deadline:
                raise


@pytest.fixture
def hot(start: Start, progs: Programs, tracer: Tracer) -> Iterator[Hot]:
    path = progs("tracee_hot")
    yield Hot(start(path, "2", "0"), path, tracer)


def test_the_mappings_tell_what_is_switched_and_are_seen_through(hot: Hot) -> None:
    assert hot.apply(hot.patches) > 0
    assert hot.switched()
    assert all(read(hot.pid, p.site.runtime_addr, 5) == p.new for p in hot.patches)
    process = Process(hot.pid)
    for patch in hot.patches:
        here = next(m for m in process.maps() if m.start <= patch.site.runtime_addr < m.end)
        assert here.path == str(hot.path) and here.executable and here.aside is not None and here.aside.is_aside
        with process.open_mapped(here) as file:
            file.seek(patch.site.runtime_addr - here.start + here.offset)
            assert file.read(5) == patch.old
    assert [r.file_inode for r in hot.target.code.ranges] == [hot.path.stat().st_ino] * len(hot.target.code.ranges)
    assert not hot.target.code.notes
    hot.leaves_nothing()
    hot.runs_right()


def test_some_patches_come_out_and_go_in_again_while_others_stay(hot: Hot) -> None:
    hot.apply([hot.nop])
    for _ in range(20):
        hot.apply([hot.window, hot.crossing])
        hot.undo([hot.nop, hot.crossing])
        assert read(hot.pid, hot.nop.site.runtime_addr, 5) == hot.nop.old
        assert read(hot.pid, hot.window.site.runtime_addr, 5) == hot.window.new
        hot.apply([hot.nop])
        hot.undo([hot.window])
    assert len(hot.target.code.ranges) == 1
    hot.undo([hot.nop])
    assert not hot.target.code.ranges
    hot.leaves_nothing()
    hot.runs_right()


@needs_uprobes
@pytest.mark.parametrize(("which", "offset"), [(0, 0), (1, 0), (1, 3), (2, 0), (2, 3)])
def test_a_uprobe_that_comes_later_does_no_harm_and_fires_when_we_have_left(hot: Hot, which: int, offset: int) -> None:
    hot.apply(hot.patches)
    addr = hot.sites[which] + offset
    with Uprobes([hot.uprobe(addr)]) as there:
        time.sleep(0.02)
        assert read(hot.pid, hot.sites[which], 5) == hot.patches[which].new
        assert there.count() == 0
        assert hot.target.leave() is True
        # The kernel makes a call of a breakpoint that stands for a 5-byte NOP.
        assert read(hot.pid, addr, 1) in (b"\xcc", b"\xe8")
        time.sleep(0.02)
        assert there.count() > 0
    assert hot.code() == hot.text
    hot.runs_right()


@needs_uprobes
@pytest.mark.parametrize(("which", "offset"), [(0, 0), (1, 3), (2, 3)])
def test_a_uprobe_that_comes_and_goes_meanwhile_leaves_everything_as_it_was(hot: Hot, which: int, offset: int) -> None:
    hot.apply(hot.patches)
    with Uprobes([hot.uprobe(hot.sites[which] + offset)]):
        hot.undo([hot.patches[1 - which % 2]])
        time.sleep(0.02)
    hot.leaves_nothing()
    hot.runs_right()


@needs_uprobes
def test_a_uprobe_that_is_there_before_refuses_its_site_and_nothing_is_changed(hot: Hot) -> None:
    for offset in (0, 3):
        with Uprobes([hot.uprobe(hot.sites[1] + offset)]):
            with pytest.raises(RefusedError) as error:
                hot.apply([hot.window])
            assert error.value.reason is RefusalReason.FOREIGN_PROBE
            assert not hot.switched()
    hot.apply([hot.window])
    hot.leaves_nothing()
    hot.runs_right()


@needs_uprobes
@pytest.mark.parametrize("ours_goes_first", [True, False])
def test_beside_a_uprobe_on_the_same_page_bytes_are_written_in_place_and_told(hot: Hot, ours_goes_first: bool) -> None:
    uprobes = Uprobes([hot.uprobe(hot.sites[1])])
    with uprobes:
        hot.apply([hot.nop])
        assert not hot.switched()
        assert "written in place" in hot.target.code.notes[0]
        assert read(hot.pid, hot.sites[0], 5) == hot.nop.new
        counted = uprobes.count()
        time.sleep(0.02)
        assert uprobes.count() > counted
        if ours_goes_first:
            assert hot.target.leave() is True
    if not ours_goes_first:
        assert hot.target.leave() is True
    assert hot.code() == hot.text
    hot.runs_right()


@needs_uprobes
def test_refusal_crosses_page_beside_a_uprobe(hot: Hot) -> None:
    border = (hot.sites[2] & ~0xFFF) + 0x1000
    with Uprobes([hot.uprobe(border + 2)]):  # the ret, behind the window
        assert not CodePages(Process(hot.pid)).can_switch(border)
        with pytest.raises(RefusedError) as error:
            hot.apply([hot.nop, hot.crossing])
        assert error.value.reason is RefusalReason.CROSSES_PAGE
        assert read(hot.pid, hot.sites[0], 5) == hot.nop.old
    hot.leaves_nothing()
    hot.runs_right()


def test_code_that_changes_between_the_copy_and_the_stop_is_copied_anew(
    hot: Hot, monkeypatch: pytest.MonkeyPatch
) -> None:
    enter = switch.Prepared.__enter__
    changes: list[int] = []

    def change_meanwhile(prepared: switch.Prepared) -> switch.Prepared:
        if not changes:
            changes.append(hot.sites[1] + 16)
            hot.write(changes[0], b"\xcc")
        return enter(prepared)

    monkeypatch.setattr(switch.Prepared, "__enter__", change_meanwhile)
    hot.apply([hot.nop, hot.crossing])
    # The page is not the file's any more, so it is written in place.
    assert read(hot.pid, changes[0], 1) == b"\xcc"
    assert "written in place" in hot.target.code.notes[0] and len(hot.switched()) == 1
    assert hot.target.leave() is True
    assert read(hot.pid, changes[0], 1) == b"\xcc" and not hot.switched()
    hot.runs_right()


def test_what_a_debugger_writes_into_our_copy_is_there_when_we_have_left(hot: Hot) -> None:
    hot.apply(hot.patches)
    beside = hot.sites[1] + 16
    hot.write(beside, b"\xcc\x12")
    hot.undo([hot.crossing])
    assert hot.target.leave() is True
    assert read(hot.pid, beside, 2) == b"\xcc\x12"
    hot.write(beside, read(hot.pid, beside + 2, 2))
    hot.runs_right()


@pytest.fixture
def no_copy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Our copy is not where it should be, which shows when the pages have been moved away."""
    native = type.__getattribute__(switch.Exchange, "native")
    monkeypatch.setattr(switch.Exchange, "native", property(lambda e: (*native.__get__(e)[:6], 0x1000)))
    yield
    monkeypatch.undo()


@pytest.mark.usefixtures("no_copy")
def test_a_switch_that_fails_half_way_is_gone_back_and_the_bytes_are_written_in_place(hot: Hot) -> None:
    hot.apply([hot.nop, hot.window])
    assert not hot.switched()
    assert "Bad address" in hot.target.code.notes[0]
    hot.leaves_nothing()
    hot.runs_right()


def test_a_new_copy_that_fails_half_way_leaves_the_old_one(hot: Hot, request: pytest.FixtureRequest) -> None:
    hot.apply(hot.patches)
    mappings = maps(hot.pid)
    patched = hot.code()
    request.getfixturevalue("no_copy")
    with pytest.raises(TargetError, match="Bad address"):
        hot.undo([hot.window])
    assert maps(hot.pid) == mappings
    assert hot.code() == patched
    hot.leaves_nothing()
    hot.runs_right()
