"""Tasks that share a target's memory without being threads of it stand still with them, or nothing is changed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ptwprobe._native import NativeError, Tracer
from tests import cli
from tests.targets import Target

pytestmark = pytest.mark.needs("root")

Programs = Callable[..., Path]
Start = Callable[..., Target]
PROBE = "slow bytes=$arg2:u64"


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    made = Tracer()
    yield made
    made.close()


@pytest.mark.parametrize("generations", ["1", "2"], ids=["child", "childs-child"])
def test_a_child_in_the_same_memory_computes_on(
    progs: Programs, start: Start, tmp_path: Path, generations: str
) -> None:
    target = start(progs("tracee_sibling"), generations)
    for turn in range(3):
        session = tmp_path / f"{turn}.ptw"
        done = cli.run("record", "-p", str(target.pid), "-e", PROBE, "-o", session, "--duration", "0.2").good()
        hits = cli.hits(session)
        assert len(hits) == done.totals.hits > 0
        assert {hit["args"]["bytes"] for hit in hits} == {1 << 20}
    target.go()
    assert target.finish().endswith("status 0 worked 1\n")


def test_the_parent_of_the_named_process_stands_still_too(progs: Programs, start: Start, tmp_path: Path) -> None:
    target = start(progs("tracee_sibling"), "1")
    child = target.output.split()[1]
    session = tmp_path / "s.ptw"
    cli.run("record", "-p", child, "-e", PROBE, "-o", session, "--duration", "0.2").good()
    assert cli.hits(session)
    target.go()
    assert target.finish().endswith("status 0 worked 1\n")


def test_a_child_in_the_same_memory_that_cannot_be_stopped_is_busy(
    progs: Programs, start: Start, tmp_path: Path, tracer: Tracer
) -> None:
    target = start(progs("tracee_sibling"), "1")
    child = int(target.output.split()[1])
    tracer.attach(child)
    done = cli.run("record", "-p", str(target.pid), "-e", PROBE, "-o", tmp_path / "s.ptw", "--duration", "0.2")
    assert done.exit_code == 4
    assert "busy" in done.stderr and f"process {child} " in done.stderr
    assert "memfd" not in Path(f"/proc/{target.pid}/maps").read_text()
    tracer.detach(child)
    target.go()
    assert target.finish().endswith("status 0 worked 1\n")


def test_a_child_in_the_same_memory_that_ends_or_executes_while_traced(tracer: Tracer) -> None:
    """By vfork, which shares the memory up to the exec: it neither holds up stops nor is held up."""
    code = (
        "import subprocess,threading\nprint('ready',flush=True)\n"
        "def spawn():\n while not stop: subprocess.run(['true'],check=True)\n"
        "stop=[]\nt=[threading.Thread(target=spawn) for _ in range(2)]\n[x.start() for x in t]\n"
        "input()\nstop.append(1)\n[x.join() for x in t]\nprint('done')"
    )
    with Target([sys.executable, "-c", code]) as target:
        tracer.attach(target.pid)
        stops, busy = 0, 0
        end = time.monotonic() + 2
        while time.monotonic() < end:
            try:
                tracer.threads_in_ranges(target.pid, [(1, 2)])
                stops += 1
            except NativeError as error:
                assert error.args[0] == "busy"
                busy += 1
        assert stops > 10 * busy
        tracer.detach(target.pid)
        target.go()
        assert target.finish() == "ready\ndone\n"
        assert target.exit_code == 0
