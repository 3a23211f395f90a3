"""The same program under ptwprobe and under the kernel's uprobe: the same sequence of (thread, arguments)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import cli
from tests.live.oracle_cases import CASES, Case, fill_in, write_input
from tests.oracle import ENVIRONMENT, Observation, by_thread, observe
from tests.symbols import function
from tests.tracefs import Uprobe, setarch_no_aslr

pytestmark = pytest.mark.needs("root", "uprobes", "setarch")


@pytest.fixture(scope="module")
def input_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_input(tmp_path_factory.mktemp("input") / "input.txt")


def under_ptwprobe(command: list[str], case: Case, file: Path, session: Path) -> Observation:
    """Runs ``command`` as :func:`tests.oracle.observe` does, with ptwprobe in the uprobe's place."""
    probe = f"oracle/e={file.name}:{case.symbol} {case.args}"
    options = ["record", "-o", str(session), "-e", probe, "--channel", "ring", "--json", "--", *command]
    done = cli.run(*options, stdin=case.stdin, env=ENVIRONMENT, wrap=setarch_no_aslr([])).good()
    hits = cli.hits(session)
    assert done.totals.hits == len(hits)
    assert (done.totals.lost, done.totals.torn, done.totals.errors) == (0, 0, 0)
    assert {hit["event"] for hit in hits} <= {"oracle/e"}
    pid = hits[0]["pid"]
    sequences = by_thread(pid, ((hit["tid"], "e", cli.arguments(hit)) for hit in hits))
    return Observation(sequences, done.own_output, done.summary["exit_status"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sees_what_the_kernels_uprobe_sees(
    case: Case, progs: Callable[..., Path], input_file: Path, tmp_path: Path
) -> None:
    command, file = fill_in(case, progs, input_file)
    uprobe = Uprobe("e", file, function(file, case.symbol)[1], case.fetch)
    expected = observe(command, [uprobe], stdin=case.stdin)
    assert expected.exit_code == 0
    assert expected.hits >= case.least
    seen = under_ptwprobe(command, case, file, tmp_path / "case.ptw")
    assert seen.stdout == expected.stdout
    assert seen.exit_code == expected.exit_code
    assert {thread: len(hits) for thread, hits in seen.threads.items()} == {
        thread: len(hits) for thread, hits in expected.threads.items()
    }
    # Compared thread by thread, so that a failure shows the first difference and not 100,000 lines.
    for thread, sequence in expected.threads.items():
        for number, (hit, other) in enumerate(zip(seen.threads[thread], sequence, strict=True)):
            assert hit == other, f"thread {thread}, hit {number}"


def test_the_oracle_itself_gives_the_same_twice(progs: Callable[..., Path], input_file: Path) -> None:
    case = next(case for case in CASES if "threads" in case.name)
    command, file = fill_in(case, progs, input_file)
    uprobe = Uprobe("e", file, function(file, case.symbol)[1], case.fetch)
    assert observe(command, [uprobe]) == observe(command, [uprobe])
