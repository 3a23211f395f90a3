"""Attaching to running programs, and every way in which a recording ends: the session can be read up to there, the
target (if it lives) runs on unpatched and says what it would have said."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import cli
from tests.cli import Recording
from tests.symbols import function, memory, runtime_address
from tests.targets import Target

pytestmark = pytest.mark.needs("root")

Programs = Callable[..., Path]
Start = Callable[..., Target]

PROBE = "probe_me a=$arg1:s64 b=$arg2:s64"


def code_at(target: Target, binary: Path) -> bytes:
    """The first bytes of ``probe_me`` in the running target."""
    return memory(target.pid, runtime_address(target.pid, binary, function(binary, "probe_me")[0]), 16)


def result_of(command: list[str]) -> str:
    """What ``calls`` prints when nobody looks, at whatever speed."""
    command = [*command[:-1], "0"]
    return subprocess.run(command, input="", capture_output=True, text=True, check=True).stdout


def check_whole(target: Target, binary: Path) -> None:
    """The target's code is the file's again, and it comes to the right result."""
    offset = function(binary, "probe_me")[1]
    assert code_at(target, binary) == binary.read_bytes()[offset : offset + 16]
    assert target.exit_code is None, "the target ended before it could be looked at"
    assert target.finish() == result_of(target.command)
    assert target.exit_code == 0


@pytest.fixture
def calls(progs: Programs, start: Start) -> Target:
    """Two threads at 10,000 calls a second each for 10 s."""
    return start(progs("calls"), "2", "100000", "10000")


def test_duration(progs: Programs, calls: Target, tmp_path: Path) -> None:
    session = tmp_path / "s.ptw"
    calls.go()
    begun = time.monotonic()
    done = cli.run("record", "-p", str(calls.pid), "-e", PROBE, "-o", session, "--duration", "0.5", "--json").good()
    assert 0.5 <= time.monotonic() - begun < 10
    assert done.summary["end"] == "duration"
    hits = cli.hits(session)
    # Both threads at 10,000 a second for half a second, give or take a loaded machine.
    assert len(hits) == done.totals.hits > 2_000
    by_thread: dict[int, list[int]] = {}
    for hit in hits:
        thread, number = cli.arguments(hit)
        by_thread.setdefault(thread, []).append(number)
    for numbers in by_thread.values():
        # No gap from the first to the last.
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    check_whole(calls, progs("calls"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda s: s.name)
def test_signals(progs: Programs, calls: Target, tmp_path: Path, number: signal.Signals) -> None:
    session = tmp_path / "s.ptw"
    with Recording("-p", str(calls.pid), "-e", PROBE, "-o", session, "--json") as recording:
        calls.go()
        time.sleep(0.3)
        recording.process.send_signal(number)
        done = recording.finish().good()
    assert done.summary["end"] == "interrupt"
    assert len(cli.hits(session)) == done.totals.hits > 0
    check_whole(calls, progs("calls"))


def test_a_second_recording_finds_the_target_as_the_first_did(progs: Programs, calls: Target, tmp_path: Path) -> None:
    calls.go()
    for turn in range(3):
        session = tmp_path / f"{turn}.ptw"
        done = cli.run("record", "-p", str(calls.pid), "-e", PROBE, "-o", session, "--duration", "0.2").good()
        assert len(cli.hits(session)) == done.totals.hits > 0
    check_whole(calls, progs("calls"))


def test_a_killed_recorder_leaves_a_target_that_computes_on(progs: Programs, calls: Target, tmp_path: Path) -> None:
    with Recording("-p", str(calls.pid), "-e", PROBE, "-o", tmp_path / "s.ptw") as recording:
        calls.go()
        time.sleep(0.3)
        recording.process.kill()
        recording.process.wait()
    assert calls.finish() == result_of(calls.command)


@pytest.mark.parametrize("how", ["exit", "kill", "abort", "segv", "thread-exit"])
def test_target_ends(progs: Programs, start: Start, tmp_path: Path, how: str) -> None:
    session = tmp_path / "s.ptw"
    plain = start(progs("dies"), how, "1000", ready=None)
    plain.finish()
    target = start(progs("dies"), how, "1000")
    with Recording("-p", str(target.pid), "-e", PROBE, "-o", session, "--json") as recording:
        target.go()
        done = recording.finish().good()
    assert done.summary["end"] == "exit"
    assert target.finish() == plain.output
    assert target.exit_code == plain.exit_code
    assert [cli.arguments(hit) for hit in cli.hits(session)] == [(1, i) for i in range(1000)]


def test_target_executes_another_program(progs: Programs, start: Start, tmp_path: Path) -> None:
    session = tmp_path / "s.ptw"
    target = start(progs("execs"), "1000")
    with Recording("-p", str(target.pid), "-e", PROBE, "-o", session, "--json") as recording:
        target.go()
        done = recording.finish().good()
    assert done.summary["end"] == "exec"
    assert [cli.arguments(hit) for hit in cli.hits(session)] == [(1, i) for i in range(1000)]
    # The new image runs unprobed, and to its end, which comes with that of its stdin.
    assert target.finish() == "ready\nimage=1 sum=1000502500\nimage=2 sum=2000505500\n"
    assert target.exit_code == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_disk_full(progs: Programs, start: Start, small_disk: Path) -> None:
    session = small_disk / "s.ptw"
    target = start(progs("calls"), "2", "2000000", "400000")
    with Recording("-p", str(target.pid), "-e", PROBE, "-o", session, "--json") as recording:
        target.go()
        done = recording.finish()
    check_whole(target, progs("calls"))
    assert done.exit_code == 1
    assert done.summary["end"] == "disk-full"
    seen = cli.hits(session)
    assert len(seen) > 1_000
    assert done.totals.hits == len(seen)


def test_one_threads_hits_only(progs: Programs, start: Start, tmp_path: Path) -> None:
    target = start(progs("calls"), "3", "1000", "0")
    tids = sorted(int(task.name) for task in Path(f"/proc/{target.pid}/task").iterdir())
    session = tmp_path / "s.ptw"
    with Recording("-t", str(tids[2]), "-e", PROBE, "-o", session, "--json") as recording:
        target.go()
        recording.finish().good()
    hits = cli.hits(session)
    assert {hit["tid"] for hit in hits} == {tids[2]}
    # The first of the tids is the main thread, which makes no calls.
    assert [cli.arguments(hit) for hit in hits] == [(1, i) for i in range(1000)]


def test_two_processes(progs: Programs, start: Start, tmp_path: Path) -> None:
    first = start(progs("calls"), "1", "1000", "0")
    second = start(progs("calls"), "2", "500", "0")
    session = tmp_path / "s.ptw"
    pids = ["-p", str(first.pid), "-p", str(second.pid)]
    with Recording(*pids, "-e", PROBE, "-o", session, "--json") as recording:
        first.go()
        first.finish()
        second.go()
        second.finish()
        recording.finish().good()
    by_pid: dict[int, list[tuple[int, ...]]] = {}
    for hit in cli.hits(session):
        by_pid.setdefault(hit["pid"], []).append(cli.arguments(hit))
    assert by_pid[first.pid] == [(0, i) for i in range(1000)]
    assert sorted(by_pid[second.pid]) == [(thread, i) for thread in range(2) for i in range(500)]


_RUNNING = {
    "python3": ["/usr/bin/python3", "-u", "-c", "print('ready')\nwhile input():\n  print(len(bytes(3) * 40000))"],
    "sqlite3": ["/usr/bin/sqlite3", ":memory:"],
    "openssl": ["/usr/bin/openssl", "enc", "-aes-256-ctr", "-K", "00" * 32, "-iv", "00" * 16],
    "gzip": ["/usr/bin/gzip", "-c", "-n"],
}


@pytest.mark.parametrize("name", _RUNNING)
def test_a_running_program_by_its_pid(start: Start, tmp_path: Path, name: str) -> None:
    """Each waits for its stdin when the probe goes in, and reads more than once after that."""
    lines = b"1\n" * 10_000 + b"\n" if name == "python3" else b"select hex(zeroblob(5000));\n" * 50
    plain = subprocess.run(_RUNNING[name], input=lines, capture_output=True, check=False)
    target = start(*_RUNNING[name], ready=None)
    wait_until_it_reads(target)
    session = tmp_path / "s.ptw"
    probe = "libc:read fd=$arg1:s32 size=$arg3:u64"
    with Recording("-p", str(target.pid), "-e", probe, "-o", session, "--json") as recording:
        out, _ = target.process.communicate(lines, timeout=60)
        done = recording.finish().good()
    assert out == plain.stdout
    assert target.exit_code == plain.returncode
    hits = cli.hits(session)
    assert done.totals.hits == len(hits) > 0
    assert {hit["args"]["fd"] for hit in hits} == {0}
    assert {hit["comm"] for hit in hits} == {name}


def wait_until_it_reads(target: Target) -> None:
    """Until the program is blocked in a system call on its stdin (read is 0 on x86-64, and fd 0 its first argument)."""
    end = time.monotonic() + 20
    while not Path(f"/proc/{target.pid}/syscall").read_text().startswith("0 0x0 "):
        assert time.monotonic() < end, f"{target.process.args!r} does not read its stdin"
        time.sleep(0.02)
