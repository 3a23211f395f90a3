"""Programs that fault on purpose, in instructions that a probe displaces and elsewhere, see what they see without us.

"Traced" are sessions whose probes read memory; they catch the faults of that themselves.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import cli
from tests.targets import Target

pytestmark = pytest.mark.needs("root")

Programs = Callable[..., Path]
Start = Callable[..., Target]

SITES = {
    "first": "first+0x0",
    "later": "later+0x0",
    "divide": "divide+0x5",
    "illegal": "illegal+0x5",
    "elsewhere": "elsewhere+0x0",
}
ENDING = {"first", "later", "divide", "illegal"}
"""Where the instruction that faults shares its window with others."""


def counts(output: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", output.splitlines()[-1])}


@pytest.mark.parametrize("how", ["retry", "skip", "jump"])
@pytest.mark.parametrize("what", SITES)
def test_a_traced_programs_handler_sees_the_original_address(
    progs: Programs, start: Start, tmp_path: Path, what: str, how: str
) -> None:
    target = start(progs("displaced_faults"), what, how)
    session = tmp_path / "s.ptw"
    with cli.Recording(
        "-p", str(target.pid), "-e", f"{SITES[what]} v=+0(%di) p=%di", "-o", session, "--json"
    ) as recording:
        time.sleep(0.3)
        done = recording.stop().good()
    target.go()
    seen = counts(target.finish())
    assert target.exit_code == 0
    assert seen["handled"] > 20 and seen["on_stack"] == seen["handled"]
    assert (seen["wrong_rip"], seen["wrong_addr"], seen["wrong_value"]) == (0, 0, 0)
    ended = [note for note in done.summary["notes"] if "ended: an instruction that it displaced faulted" in note]
    assert len(ended) == (what in ENDING)
    hits = [cli.arguments(hit) for hit in cli.hits(session)]
    # A patch may have ended before it emitted anything.
    assert len(hits) == done.totals.hits and (hits or what in ENDING)
    # A fault of the stub's own load of the same pointer never reaches the program.
    assert {value for value, pointer in hits if pointer == 8} <= {0}


@pytest.mark.parametrize("what", ["first", "later", "divide", "illegal"])
def test_the_default_action_is_taken_and_the_core_is_of_the_signal(
    progs: Programs, start: Start, tmp_path: Path, what: str
) -> None:
    target = start(progs("displaced_faults"), what, "die")
    probe = f"{SITES[what]} v=+0(%di)"
    with cli.Recording("-p", str(target.pid), "-e", probe, "-o", tmp_path / "s.ptw") as recording:
        target.go()
        target.finish()
        recording.finish().good()
    wanted = {"divide": signal.SIGFPE, "illegal": signal.SIGILL}.get(what, signal.SIGSEGV)
    assert target.exit_code == -wanted


@pytest.mark.parametrize("what", ["first", "later", "divide", "elsewhere"])
def test_an_untraced_programs_handler_returns_into_the_stub_and_the_program_goes_on(
    progs: Programs, start: Start, tmp_path: Path, what: str
) -> None:
    target = start(progs("displaced_faults"), what, "retry")
    session = tmp_path / "s.ptw"
    cli.run("record", "-p", str(target.pid), "-e", f"{SITES[what]} p=%di", "-o", session, "--duration", "0.3").good()
    target.go()
    seen = counts(target.finish())
    assert target.exit_code == 0
    assert seen["handled"] > 20 and seen["wrong_value"] == 0
    assert (seen["wrong_rip"] == 0) == (what == "elsewhere")
    assert cli.hits(session)
