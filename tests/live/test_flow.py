"""Control flow of live recordings."""

from __future__ import annotations

from pathlib import Path

from tests.cli import run


def test_a_recording_through_the_ring_says_that_it_has_no_control_flow(tmp_path: Path) -> None:
    folder = tmp_path / "s.ptw"
    probe = "libc:write count=$arg3:u64"
    run("record", "-o", folder, "-e", probe, "--", "/bin/sh", "-c", "echo a; echo bc").good()
    done = run("script", folder, "--flow", "--stack").good()
    assert done.totals.hits == 2
    assert done.stdout.count(b"count=") == 2
    assert f"{folder}/perf.data: no control flow in it: it was recorded through channel ring" in done.stderr
    branches = run("script", folder, "--only", "branches").good()
    assert branches.stdout == b""
