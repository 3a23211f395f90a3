"""A recording beside what else is done with the same code: the kernel's uprobes on it, its being locked in memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ptwprobe.probe import elf, spec
from ptwprobe.process import Process
from tests import cli
from tests.cli import Recording
from tests.targets import Target
from tests.tracefs import Uprobe, Uprobes

pytestmark = pytest.mark.needs("root", "uprobes")

PROBE = "probe_me a=$arg1:s64 b=$arg2:s64"
RESULT = "ready\ncalls=80000 checksum="
INSIDE = 4
"""Where the second instruction of ``probe_me`` begins, of those that a patch displaces."""
each_place = pytest.mark.parametrize("offset", [0, INSIDE], ids=["on-the-site", "inside-the-window"])


@pytest.fixture
def hot(progs: Callable[..., Path], start: Callable[..., Target]) -> Target:
    return start(progs("calls"), "2", "40000", "20000")


def uprobe(target: Target, path: Path, offset: int) -> Uprobe:
    site = elf.resolve(spec.parse(PROBE), Process(target.pid))[0]
    return Uprobe("there", path, site.file_offset + offset, "")


@pytest.mark.parametrize("ours_goes_first", [True, False], ids=["ours-goes-first", "the-uprobe-goes-first"])
@each_place
def test_values_go_on_when_a_uprobe_comes_to_a_probed_function(
    hot: Target, progs: Callable[..., Path], tmp_path: Path, offset: int, ours_goes_first: bool
) -> None:
    session = tmp_path / "s.ptw"
    with Recording("-p", str(hot.pid), "-e", PROBE, "-o", session) as recording:
        # The function is found while it is switched, too.
        theirs = Uprobes([uprobe(hot, progs("calls"), offset)])
        hot.go()
        time.sleep(0.1)
        with theirs:
            time.sleep(0.1)
            assert theirs.count() == 0
            if ours_goes_first:
                done = recording.stop().good()
                time.sleep(0.05)
                assert theirs.count() > 0
        if not ours_goes_first:
            time.sleep(0.05)
            done = recording.stop().good()
    assert "in place" not in done.stderr
    hits = cli.hits(session)
    assert int(hits[-1]["time"]) - int(hits[0]["time"]) > 150_000_000
    assert hot.finish().startswith(RESULT)
    assert hot.exit_code == 0


@each_place
def test_refusal_foreign_probe_where_a_uprobe_was_before(
    start: Callable[..., Target], progs: Callable[..., Path], tmp_path: Path, offset: int
) -> None:
    hot = start(progs("calls"), "2", "100000", "20000")
    before = Path(f"/proc/{hot.pid}/maps").read_text()
    hot.go()
    with Uprobes([uprobe(hot, progs("calls"), offset)]) as theirs:
        words = ("record", "-p", str(hot.pid), "-e", PROBE, "-o", tmp_path / "s.ptw", "--duration", "0.1")
        done = cli.run(*words)
        assert done.exit_code == 4 and "foreign-probe" in done.stderr
        assert "memfd" not in before and "memfd" not in Path(f"/proc/{hot.pid}/maps").read_text()
        assert theirs.count() > 0
    assert cli.run(*words).good().totals.hits > 0
    assert hot.finish().startswith("ready\ncalls=200000 checksum=")
    assert hot.exit_code == 0


LOCKED = """\
import ctypes, time
assert ctypes.CDLL(None).mlockall(3) == 0
print("ready", flush=True)
while True:
    time.sleep(0.001)
"""


def test_code_that_is_locked_in_memory_stays_so_and_is_written_in_place(tmp_path: Path) -> None:
    with Target([sys.executable, "-c", LOCKED]) as target:

        def locked() -> tuple[set[int], str]:
            return Process(target.pid).locked_mappings(), Path(f"/proc/{target.pid}/maps").read_text()

        before = locked()
        words = ("-e", "libc:clock_nanosleep", "-o", tmp_path / "s.ptw", "--duration", "0.3")
        done = cli.run("record", "-p", str(target.pid), *words).good()
        assert "written in place" in done.stderr and done.totals.hits > 10
        assert locked() == before
        assert target.exit_code is None
