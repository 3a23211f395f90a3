"""Programs that use all that they may have (stack, heap, mappings, red zone, a sanitizer) run on under probe."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import cli
from tests.targets import Target

pytestmark = pytest.mark.needs("root")

Programs = Callable[..., Path]
Start = Callable[..., Target]

ALL = ("-e", "f1??? x=%di", "-e", "f2??? x=%di")
"""All 2,000 functions of the program ``bounds``."""
LOADING = ("-e", "f1000 x=%di y=+0(%di)", "-e", "f1001 x=%di")


def counts(output: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(-?\d+)", output.splitlines()[-1])}


def test_a_heap_grows_by_a_gigabyte_after_2000_probes(progs: Programs, start: Start, tmp_path: Path) -> None:
    target = start(progs("bounds"), "brk", "1024")
    session = tmp_path / "s.ptw"
    with cli.Recording("-p", str(target.pid), *ALL, "-o", session, "--json") as recording:
        target.go()
        seen = counts(target.finish())
        done = recording.finish().good()
    assert target.exit_code == 0 and seen["wrong"] == 0
    assert seen["grown"] == 1 << 30
    assert done.summary["refused"] == 0 and len(done.summary["events"]) == 2000


@pytest.mark.parametrize(("limit_kib", "use_mib"), [("8192", 0), ("65536", 0), ("unlimited", 512)])
def test_a_stack_grows_to_its_limit(
    progs: Programs, start: Start, tmp_path: Path, limit_kib: str, use_mib: int
) -> None:
    command = f"ulimit -s {limit_kib}; exec {progs('bounds')} stack {use_mib}"
    target = start("/bin/sh", "-c", command)
    session = tmp_path / "s.ptw"
    with cli.Recording("-p", str(target.pid), *LOADING, "-o", session) as recording:
        target.go()
        seen = counts(target.finish())
        recording.finish().good()
    assert target.exit_code == 0 and seen["wrong"] == 0
    assert seen["grown"] > ((use_mib << 20) or (int(limit_kib) << 10)) - (300 << 10)
    assert cli.hits(session)


def mappings(pid: int) -> int:
    return Path(f"/proc/{pid}/maps").read_text().count("\n")


def test_a_program_that_has_few_mappings_left_is_refused_and_keeps_them(
    progs: Programs, start: Start, tmp_path: Path
) -> None:
    target = start(progs("bounds"), "maps", "30")
    before = mappings(target.pid)
    done = cli.run("record", "-p", str(target.pid), *LOADING, "-o", tmp_path / "s.ptw", "--duration", "0.1")
    assert done.exit_code == 4
    assert "no-stub-space" in done.stderr and "vm.max_map_count" in done.stderr
    assert mappings(target.pid) == before
    target.go()
    assert counts(target.finish())["wrong"] == 0


def test_2000_probes_fit_into_few_hundred_mappings(progs: Programs, start: Start, tmp_path: Path) -> None:
    target = start(progs("bounds"), "maps", "400")
    before = mappings(target.pid)
    with cli.Recording("-p", str(target.pid), *ALL, "-o", tmp_path / "s.ptw") as recording:
        assert mappings(target.pid) - before < 100
        recording.stop().good()
    target.go()
    assert counts(target.finish())["wrong"] == 0
    assert target.exit_code == 0


@pytest.mark.parametrize("probe", ["leaf+0x52 v=%di", "leaf+0x52 v=%di bad=+0(%dx)", "leaf+0x52 v=%di top=+0($stack)"])
def test_a_leaf_function_lives_in_its_red_zone_with_signals_on_an_alternate_stack(
    progs: Programs, start: Start, tmp_path: Path, probe: str
) -> None:
    target = start(progs("redzone"))
    session = tmp_path / "s.ptw"
    cli.run("record", "-p", str(target.pid), "-e", probe, "-o", session, "--duration", "0.5", "-m", "1M").good()
    target.go()
    seen = counts(target.finish())
    assert target.exit_code == 0 and seen["wrong"] == 0
    assert 0 < seen["signals"] == seen["on_stack"]
    values = [cli.arguments(hit) for hit in cli.hits(session)]
    assert values and [v[0] for v in values] == sorted(v[0] for v in values)


@pytest.mark.parametrize("probe", ["use words=%di n=%si", "use words=%di n=%si first=+0(%di)"])
def test_a_program_under_a_sanitizer_runs_on(progs: Programs, start: Start, tmp_path: Path, probe: str) -> None:
    # At its end the leak checker stops the program itself, as a debugger would.
    target = start(progs("sanitized"), env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"})
    session = tmp_path / "s.ptw"
    cli.run("record", "-p", str(target.pid), "-e", probe, "-o", session, "--duration", "0.3").good()
    target.go()
    assert counts(target.finish())["wrong"] == 0
    assert target.exit_code == 0 and not target.errors
    assert cli.hits(session)


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A memory control group of either version, empty."""
    roots = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup")]
    for root in roots:
        folder = root / f"ptwprobe-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        if any((folder / name).exists() for name in ("memory.usage_in_bytes", "memory.current")):
            yield folder
            folder.rmdir()
            return
        folder.rmdir()
    pytest.skip("needs a memory control group")


def test_the_rings_memory_is_not_the_targets(progs: Programs, start: Start, tmp_path: Path, memory_group: Path) -> None:
    target = start(progs("calls"), "1", "100000000", "1000")
    target.go()
    (memory_group / "cgroup.procs").write_text(str(target.pid))
    name = "memory.current" if (memory_group / "memory.current").exists() else "memory.usage_in_bytes"
    before = int((memory_group / name).read_text())
    session = tmp_path / "s.ptw"
    with cli.Recording("-p", str(target.pid), "-e", "probe_me a=$arg1", "-o", session, "-m", "64M") as recording:
        time.sleep(0.3)
        grown = int((memory_group / name).read_text()) - before
        recording.stop().good()
    target.process.kill()
    target.process.wait()
    # Page tables and what the kernel keeps for the mappings; the rings are 64 MiB for each CPU.
    assert grown < 4 << 20
    assert cli.hits(session)
