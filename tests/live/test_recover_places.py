"""Recovery where journals cannot be kept, for other users, and for targets in namespaces of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import cli
from tests.cli import Recording
from tests.recorders import kill_both, layout, status_of
from tests.targets import Target

pytestmark = pytest.mark.needs("root", "unshare", "setpriv")

Programs = Callable[..., Path]
Start = Callable[..., Target]
PROBE = "probe_me a=$arg1:s64 b=$arg2:s64"


@pytest.fixture
def worker(progs: Programs, start: Start) -> Target:
    """Calls ``probe_me`` until its stdin ends, checks what it returns."""
    return start(progs("forks_on"))


def test_recording_is_refused_where_no_journal_can_be_kept(worker: Target, tmp_path: Path) -> None:
    before = layout(worker.pid)
    script = (
        "mkdir -p /tmp/ptwprobe-0; for f in /run /tmp/ptwprobe-0; do mount -t tmpfs -o ro x $f || exit 9; done; exec "
        f"{cli.COMMAND[0]} record -p {worker.pid} -e probe_me -o {tmp_path}/s.ptw --duration 0.1"
    )
    # In a mount namespace of its own the recorder can write neither folder.
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "no place for the journal" in done.stderr
    assert layout(worker.pid) == before


def detach_inside(pid: int) -> subprocess.CompletedProcess[str]:
    """``detach -p 1`` in the namespaces of ``pid``."""
    command = ["nsenter", "-m", "-p", "-t", str(pid), *cli.COMMAND, "detach", "-p", "1"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_target_in_other_namespaces(progs: Programs, start: Start, tmp_path: Path) -> None:
    """As in a container: its own mounts, /run among them, and pids of its own."""
    shutil.copy(progs("forks_on"), tmp_path / "forks_on")
    words = ["unshare", "-m", "-p", "--fork", "--mount-proc", "sh", "-c"]
    mounted = f"mount -t tmpfs none /run && exec {tmp_path}/forks_on"
    outer = start(*words, mounted)
    pid = int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()[0])
    with Recording("-p", str(pid), "-e", PROBE, "-o", tmp_path / "s.ptw") as recording:
        child_of_outer = status_of(pid)
        assert child_of_outer is not None
        assert (child_of_outer["state"], child_of_outer["recorder"]) == ("recorded", recording.process.pid)
        # From inside, where the journal is not to be seen, the recorder is still known to be there.
        inside = detach_inside(pid)
        assert inside.returncode == 4, inside.stderr
        assert "in the hands" in inside.stderr
        kill_both(recording.process)
    left = status_of(pid)
    assert left is not None
    assert left["state"] == "left-over"
    inside = detach_inside(pid)
    assert inside.returncode == 0, inside.stderr
    assert "1 site restored, 5 mappings taken out" in inside.stdout
    assert status_of(pid) is None
    assert outer.finish().endswith("wrong=0 bad=0\n")


# The interpreter of the tests may lie in somebody's home: to read files is all that this capability allows.
READS = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
NOBODY = ["setpriv", *READS, "--reuid=65534", "--regid=65534", "--clear-groups", "env", "-u", "XDG_RUNTIME_DIR"]


def test_another_user(progs: Programs, start: Start, tmp_path: Path) -> None:
    """Its journals are in a folder of its own; root finds what it left, by the process itself."""
    home = Path("/tmp/ptwprobe-test-nobody")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    os.chown(home, 65534, 65534)
    shutil.copy(progs("forks_on"), home / "forks_on")
    try:
        target = start(*NOBODY, home / "forks_on")
        recorder = subprocess.Popen(
            [*NOBODY, *cli.COMMAND, "record", "-p", str(target.pid), "-e", PROBE, "-o", home / "s.ptw"],
            stderr=subprocess.PIPE,
        )
        assert recorder.stderr is not None
        assert any(b"recording into" in line for line in recorder.stderr)
        own = Path("/tmp/ptwprobe-65534")
        assert own.stat().st_mode & 0o777 == 0o700
        assert [f.name for f in own.iterdir() if f.name.startswith(f"{target.pid}-") and f.suffix == ".json"]
        found = status_of(target.pid)
        assert found is not None
        assert (found["state"], found["recorder"]) == ("recorded", recorder.pid)
        assert cli.run("detach", "-p", str(target.pid)).exit_code == 4
        kill_both(recorder)
        recorder.stderr.close()
        found = status_of(target.pid)
        assert found is not None
        assert found["state"] == "left-over"
        done = cli.run("detach", "-p", str(target.pid), wrap=NOBODY).good()
        assert "1 site restored, 5 mappings taken out" in done.stdout.decode()
        assert target.finish().endswith("wrong=0 bad=0\n")
        assert not [f for f in own.iterdir() if f.name.startswith(f"{target.pid}-")]
    finally:
        shutil.rmtree(home)
