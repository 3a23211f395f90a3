"""A probed program keeps its registers, flags, red zone and errno, at sites of every shape."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli import Recording, hits
from tests.targets import Target

pytestmark = pytest.mark.needs("root")

# The probe goes behind a leading endbr64.
OFFSETS = {"site_endbr": "+0x4"}


@pytest.fixture
def sites() -> list[str]:
    """Every site of keep_sites.h."""
    header = Path(__file__).parent.parent / "progs/keep_sites.h"
    lines = header.read_text().splitlines()
    return [f"site_{line[5:].split(',')[0]}" for line in lines if line.startswith("SITE(")]


@pytest.mark.parametrize("options", [[], ["signals"]], ids=["plain", "signals"])
def test_nothing_of_the_programs_state_changes(
    progs: Callable[..., Path],
    start: Callable[..., Target],
    sites: list[str],
    tmp_path: Path,
    options: list[str],
    full: bool,
) -> None:
    # Constants, registers, stack and memory, so that every way of fetching a value runs at every site.
    arguments = "di=%di:u64 top=$stack0:x64 five=\\5:u8 data=+0(%rsi):u64 r15=%r15:x64"
    probes = [w for site in sites for w in ("-e", f"{site}={site}{OFFSETS.get(site, '')} {arguments}")]
    target = start(progs("keep"), "2", *options)
    session = tmp_path / "keep.ptw"
    with Recording("-p", str(target.pid), *probes, "-o", session, "-m", "64M", "--json") as recording:
        target.go()
        time.sleep(30 if full else 1)
        output = target.finish()
        done = recording.finish().good()
    assert target.errors == ""
    assert output.endswith("failures=0\n")
    assert target.exit_code == 0
    calls = {line.split()[0]: int(line.split()[1]) for line in output.splitlines() if line.startswith("site_")}
    totals = done.summary["totals"]
    assert totals["hits"] + totals["lost"] == sum(calls.values())
    assert done.summary["refused"] == 0


def test_the_values_at_each_site_are_the_registers_of_the_site(
    progs: Callable[..., Path], start: Callable[..., Target], sites: list[str], tmp_path: Path
) -> None:
    probes = [w for s in sites for w in ("-e", f"{s}={s}{OFFSETS.get(s, '')} rdi=%di:x64 rsi=%si:x64 zero=+0(%si):u64")]
    target = start(progs("keep"), "1")
    session = tmp_path / "values.ptw"
    with Recording("-p", str(target.pid), *probes, "-o", session, "--json") as recording:
        target.go()
        time.sleep(0.1)
        target.finish()
        recording.finish().good()
    seen: dict[str, set[int]] = {}
    for hit in hits(session):
        rdi, rsi, zero = (int(value) for value in hit["args"].values())
        # keep.c points rsi and rdi 64 bytes apart into zeros.
        assert rdi - rsi == 64
        assert zero == 0
        seen.setdefault(hit["event"].split("/")[1], set()).add(rsi)
    assert sorted(seen) == sorted(sites)
    assert len(set().union(*seen.values())) == 1
