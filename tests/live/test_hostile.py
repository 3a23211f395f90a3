"""Circumstances that are against us: whatever comes in between, an attempt to record works or is refused by name, and
the target comes to its right end."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ptwprobe
from ptwprobe.errors import PtwprobeError, RefusalReason, RefusedError
from tests import cli
from tests.live.oracle_cases import write_input
from tests.targets import Target
from tests.torture import WELL_BEHAVED, Torture, changed_code, ours, traced_threads

pytestmark = pytest.mark.needs("root")

Programs = Callable[..., Path]
Start = Callable[..., Target]
CALL = "probe_me a=$arg1 b=$arg2"
BAD = "probe_me bad=+0($arg1) worse=+8(+0($arg2))"
MALLOC = "libc:malloc size=$arg1:u64"


def attempt(pid: int, probes: list[str], folder: Path, seconds: float) -> str:
    """One short recording: "recorded", "nothing" (no hit) or the kind of the error that a user would see."""
    output = folder / "attempt.ptw"
    shutil.rmtree(output, ignore_errors=True)
    try:
        session = ptwprobe.Session(pid=pid, output=output, ring_bits=16)
        for probe in probes:
            session.add(probe)
        totals = session.run(seconds)
    except RefusedError as error:
        return error.reason.value
    except PtwprobeError as error:
        return type(error).__name__
    assert totals.stray == 0
    return "recorded" if totals.hits + totals.lost else "nothing"


def attempts_until(target: Target, probes: list[str], folder: Path, seconds: float = 600) -> list[str]:
    """Recordings of up to 20 ms, one after another, until the target has ended or ``seconds`` have passed."""
    found = []
    end = time.monotonic() + seconds
    while target.exit_code is None and time.monotonic() < end:
        found.append(attempt(target.pid, probes, folder, random.uniform(0, 0.02)))
    return found


def check_clean(pid: int) -> None:
    assert not ours(pid)
    assert not traced_threads(pid)
    # A program that loads and unloads objects may do so at the very moment of a look.
    looks = (changed_code(pid) for _ in range(20))
    changed = next((found for found in looks if not any("cannot be read" in text for text in found)), ["never at rest"])
    assert not changed


# ---------------------------------------------------------------- ends and new beginnings


@pytest.mark.parametrize("probe", [CALL, BAD], ids=["good-pointers", "bad-pointers"])
def test_exec_at_every_moment(progs: Programs, start: Start, tmp_path: Path, full: bool, probe: str) -> None:
    target = start(progs("reexecs"), "200" if full else "15", "40")
    found = attempts_until(target, [probe], tmp_path)
    assert "recorded" in found, found
    assert target.finish() == "ready\ndone\n"
    assert target.exit_code == 0


@pytest.mark.parametrize("probe", [CALL, BAD], ids=["good-pointers", "bad-pointers"])
def test_the_target_ends_at_every_moment(progs: Programs, start: Start, tmp_path: Path, full: bool, probe: str) -> None:
    for turn in range(100 if full else 10):
        calls = random.randint(1, 200)
        target = start(progs("calls"), "3", str(calls * 1000), "1000000")
        target.go()
        found = attempts_until(target, [probe], tmp_path)
        assert target.finish().startswith(f"ready\ncalls={3000 * calls} "), f"turn {turn}, {found[-3:]}"
        assert target.exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM], ids=lambda n: n.name)
def test_the_target_is_killed_at_every_moment(progs: Programs, tmp_path: Path, full: bool, number: int) -> None:
    for _ in range(50 if full else 4):
        with Target([str(progs("torture")), "4", "1000"]) as target:
            timer = threading.Timer(random.uniform(0, 0.15), target.process.send_signal, [number])
            timer.start()
            attempts_until(target, ["plain a=+0($arg1)"], tmp_path)
            timer.join()
            # It has a handler for SIGSEGV, which ends it so.
            assert target.exit_code == (3 if number == signal.SIGSEGV else -number)


def test_an_object_is_unloaded_at_every_moment(progs: Programs, start: Start, tmp_path: Path, full: bool) -> None:
    target = start(progs("reloads"), progs("libctors"))
    probes = ["libctors:ctor_called who=$arg1 bad=+0($arg2)"]
    found = attempts_until(target, probes, tmp_path, 60 if full else 3)
    assert "recorded" in found, found
    check_clean(target.pid)
    assert target.finish() == "ready\nwrong=0 again=1\n"


# ---------------------------------------------------------------- threads


def test_threads_that_end_during_every_stop(progs: Programs, start: Start, tmp_path: Path, full: bool) -> None:
    command = [str(progs("comers")), "60000" if full else "6000"]
    plain = subprocess.run(command, input="\n\n", capture_output=True, text=True, check=False).stdout
    target = start(*command)
    target.go()
    target.go()
    found = attempts_until(target, [BAD], tmp_path)
    assert "recorded" in found, found
    assert target.finish() == plain
    assert target.exit_code == 5


def test_two_hundred_threads_at_full_speed(progs: Programs, start: Start, tmp_path: Path, full: bool) -> None:
    # As nice as can be, since two hundred against one would be what takes the time.
    torture = Torture(start("nice", "-n", "19", progs("torture"), "200", "1000", wait_s=120))
    probes = [f"{function} a=$arg1 b=$arg2" for function in WELL_BEHAVED]
    found = [attempt(torture.pid, probes, tmp_path, 0.05) for _ in range(50 if full else 2)]
    # Two hundred threads on few CPUs may well be too slow for a stop: then nothing is changed; or one waits long for a
    # CPU inside a stub, which stays mapped. At the end all that is left to a later command.
    assert set(found) <= {"recorded", "busy"}
    end = time.monotonic() + 120
    while cli.run("detach", "-p", str(torture.pid)).exit_code == 4:
        assert time.monotonic() < end
        torture.check()
    torture.check_untouched()
    torture.finish()


@pytest.mark.parametrize("threads", ["1", "8"])
def test_job_control_at_every_moment(progs: Programs, start: Start, tmp_path: Path, full: bool, threads: str) -> None:
    torture = Torture(start(progs("torture"), threads, "1000"))
    over = threading.Event()

    def stop_and_go() -> None:
        while not over.is_set():
            for number in (signal.SIGSTOP, signal.SIGCONT):
                os.kill(torture.pid, number)
                time.sleep(random.uniform(0, 0.004))

    sender = threading.Thread(target=stop_and_go)
    sender.start()
    try:
        probes = ["plain a=$arg1", "wild bad=+0($arg1)"]
        found = attempts_until(torture.target, probes, tmp_path, 60 if full else 2)
    finally:
        over.set()
        sender.join()
    assert "recorded" in found, found
    torture.check_untouched()
    torture.finish()


def test_a_stopped_target_stays_stopped_and_emits_when_it_goes_on(
    progs: Programs, start: Start, tmp_path: Path
) -> None:
    torture = Torture(start(progs("torture"), "4", "1000"))
    os.kill(torture.pid, signal.SIGSTOP)
    assert attempt(torture.pid, ["plain a=$arg1"], tmp_path, 0.1) == "nothing"
    assert "State:\tT" in Path(f"/proc/{torture.pid}/status").read_text()
    session = ptwprobe.Session(pid=torture.pid, output=tmp_path / "s.ptw")
    session.add("plain a=$arg1")
    session.start()
    os.kill(torture.pid, signal.SIGCONT)
    session.wait(0.1)
    assert session.stop().hits > 0
    torture.check_untouched()
    torture.finish()


def test_32_python_threads_while_malloc_is_probed_again_and_again(start: Start, tmp_path: Path, full: bool) -> None:
    program = (
        "import sys, threading, zlib, json\nover = threading.Event(); wrong = []\n"
        "def work(k):\n text = json.dumps(list(range(k * 50))); good = zlib.crc32(text.encode())\n"
        " while not over.is_set():\n  if zlib.crc32(json.dumps(json.loads(text)).encode()) != good: wrong.append(k)\n"
        "threads = [threading.Thread(target=work, args=(k,)) for k in range(32)]\n"
        "for t in threads: t.start()\n"
        "print('ready', flush=True); input(); over.set()\n"
        "for t in threads: t.join()\n"
        "print(wrong)\n"
    )
    target = start("/usr/bin/python3", "-I", "-S", "-c", program)
    for turn in range(200 if full else 10):
        found = attempt(target.pid, [MALLOC, "libc:free bad=+8(+0($arg1))"], tmp_path, 0.01)
        assert found in ("recorded", "busy"), f"turn {turn}: {found}"
        check_clean(target.pid)
    target.go()
    assert target.finish() == "ready\n[]\n"
    assert target.exit_code == 0


# ---------------------------------------------------------------- real programs


READS_STDIN = "0 0x0 "
"""In /proc/PID/syscall: the program and its objects are loaded, and it waits for its input."""


@pytest.fixture(scope="module")
def big_input(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_input(tmp_path_factory.mktemp("input") / "input.txt")


_SQL = "with recursive n(i) as (select 1 union all select i + 1 from n where i < 20000) select sum(i) from n;\n"
_WORKERS = {
    "sqlite3": (["/usr/bin/sqlite3", ":memory:"], "libsqlite3:sqlite3_step s=+0($arg1)", _SQL),
    "gzip": (["/usr/bin/gzip", "-9cn"], "libc:read fd=$arg1:s32 bad=+0($arg3)", ""),
    "openssl": (["/usr/bin/openssl", "enc", "-aes-256-ctr", "-K", "00" * 32, "-iv", "00" * 16], MALLOC, ""),
}


@pytest.mark.parametrize("name", _WORKERS)
def test_a_real_program_attached_to_fifty_times(name: str, big_input: Path, tmp_path: Path, full: bool) -> None:
    """It gets its input piece by piece, a piece for each recording."""
    command, probe, text = _WORKERS[name]
    turns = 200 if full else 50
    pieces = [text.encode() or big_input.read_bytes()[: 1 << 18]] * turns
    plain = subprocess.run(command, input=b"".join(pieces), capture_output=True, check=True).stdout
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=file)
    assert process.stdin is not None
    while not Path(f"/proc/{process.pid}/syscall").read_text().startswith(READS_STDIN):
        time.sleep(0.005)
    found = []
    for piece in pieces:
        writer = threading.Thread(target=process.stdin.write, args=(piece,))
        writer.start()
        found.append(attempt(process.pid, [probe], tmp_path, 0.005))
        writer.join()
    process.stdin.flush()
    check_clean(process.pid)
    process.stdin.close()
    assert process.wait(60) == 0
    assert output.read_bytes() == plain
    assert set(found) <= {"recorded", "nothing"}


# ---------------------------------------------------------------- where it lives


@pytest.fixture
def elsewhere(progs: Programs, tmp_path: Path) -> Iterator[Path]:
    """A folder that is a root of its own, with ``torture`` and its libraries in it."""
    root = tmp_path / "root"
    binary = progs("torture")
    words = subprocess.run(["ldd", str(binary)], capture_output=True, text=True, check=True).stdout.split()
    for file in {Path(word) for word in words if word.startswith("/")}:
        there = root / file.relative_to("/")
        there.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, there)
    shutil.copy(binary, root / "torture")
    (root / "proc").mkdir()
    yield root


@pytest.mark.parametrize(
    "wrap",
    [
        ["chroot", "{root}"],
        ["unshare", "--mount", "chroot", "{root}"],
        ["unshare", "--mount", "--pid", "--fork", "--mount-proc={root}/proc", "chroot", "{root}"],
        [
            "unshare",
            "--mount",
            "--pid",
            "--ipc",
            "--uts",
            "--net",
            "--user",
            "--map-root-user",
            "--fork",
            "chroot",
            "{root}",
        ],
    ],
    ids=["chroot", "mount-namespace", "pid-namespace", "user-namespace"],
)
def test_a_target_with_another_root(elsewhere: Path, start: Start, tmp_path: Path, wrap: list[str]) -> None:
    words = [word.replace("{root}", str(elsewhere)) for word in wrap]
    target = start(*words, "/torture", "2", "1000")
    # unshare --fork waits for its child.
    torture = Torture(target, next(p for p in (target.pid, *descendants(target.pid)) if comm(p) == "torture"))
    assert attempt(torture.pid, ["plain a=$arg1", "wild bad=+0($arg1)", "libc:read"], tmp_path, 0.05) == "recorded"
    hits = list(itertools.islice(ptwprobe.open(tmp_path / "attempt.ptw").hits(), 1000))
    assert {hit.event for hit in hits} >= {"probe_torture/plain", "probe_torture/wild"}
    assert {hit.tid for hit in hits} <= {int(task.name) for task in Path(f"/proc/{torture.pid}/task").iterdir()}
    torture.check_untouched()
    torture.finish()


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def descendants(pid: int) -> list[int]:
    found = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [one for child in found for one in descendants(child)]


@pytest.mark.parametrize("how", ["deleted", "replaced", "overmounted"])
def test_the_program_file_is_no_more(progs: Programs, start: Start, tmp_path: Path, how: str) -> None:
    binary = tmp_path / "torture"
    shutil.copy(progs("torture"), binary)
    torture = Torture(start(binary, "2", "1000"))
    if how == "overmounted":
        subprocess.run(["mount", "--bind", "/bin/true", str(binary)], check=True)
    else:
        binary.unlink()
        if how == "replaced":
            shutil.copy("/bin/true", binary)
    try:
        found = attempt(torture.pid, ["plain a=$arg1", "wild bad=+0($arg1)"], tmp_path, 0.05)
    finally:
        if how == "overmounted":
            subprocess.run(["umount", str(binary)], check=True)
    assert found in ("recorded", RefusalReason.IDENTITY_CHANGED.value)
    assert not ours(torture.pid)
    torture.check()
    torture.finish()
