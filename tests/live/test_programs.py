"""Programs that make life hard for whoever changes them while they run, each by name: recorded from their start and
attached to, they print and return what they do when nobody looks, and nothing of ours stays in them."""

from __future__ import annotations

import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import cli
from tests.cli import Recording
from tests.targets import Target
from tests.torture import changed_code, ours, traced_threads

pytestmark = pytest.mark.needs("root")

Programs = Callable[..., Path]
Start = Callable[..., Target]


@dataclass(frozen=True)
class Row:
    """The program works twice: it prints "ready", then for each line of stdin a line "worked ...".

    ``hits``: how many hits each event has in one of the two works; at least so many where it is negative. Events that
    are not named may have any number.
    """

    name: str
    command: tuple[str, ...]
    probes: tuple[str, ...]
    hits: dict[str, int]


def python(work: str) -> tuple[str, ...]:
    """A program whose work is ``work``, the indented body of a function that returns what is printed."""
    program = (
        f"import multiprocessing, os, subprocess, sys\ndef square(x):\n return x * x\ndef work():\n{work}\n"
        "if __name__ == '__main__':\n print('ready', flush=True)\n"
        " for _ in range(2):\n  input()\n  print('worked', work(), flush=True)\n sys.exit(5)\n"
    )
    return ("/usr/bin/python3", "-I", "{script}", program)


CALL = "probe_me a=$arg1 b=$arg2"
MALLOC = "libc:malloc size=$arg1:u64"

ROWS = [
    Row(
        "python3 with subprocess",
        python(" return [subprocess.run(['/bin/echo', str(i)], stdout=-1).stdout for i in range(10)]"),
        ("libc:vfork", "libc:execve path=$arg1", MALLOC),
        {"vfork": 10, "malloc": -1},
    ),
    Row(
        "python3 with subprocess and bad pointers",
        python(" return [subprocess.run(['/bin/echo', str(i)], stdout=-1).stdout for i in range(10)]"),
        ("libc:vfork top=+0(%di)", "libc:execve bad=+8(%ax)", "libc:dup2 bad=+0($arg1)", "libc:malloc bad=+0($arg1)"),
        {"vfork": 10, "malloc": -1, "dup2": -10},
    ),
    Row(
        "python3 with os.fork",
        python(
            " ends = []\n for i in range(10):\n  child = os.fork()\n  if child == 0:\n   bytes(9000)\n"
            "   os._exit(i)\n  ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n return ends"
        ),
        ("libc:fork", "libc:_exit status=$arg1:s32", MALLOC),
        {"fork": 10, "_exit": 0, "malloc": -1},
    ),
    Row(
        "python3 with multiprocessing by fork",
        python(" with multiprocessing.get_context('fork').Pool(3) as pool:\n  return pool.map(square, range(100))"),
        ("libc:fork", MALLOC),
        {"fork": 3, "malloc": -1},
    ),
    Row(
        "python3 with multiprocessing by spawn",
        python(" with multiprocessing.get_context('spawn').Pool(2) as pool:\n  return pool.map(square, range(100))"),
        ("libc:vfork", "libc:read fd=$arg1:s32", MALLOC),
        {"read": -1, "malloc": -1},
    ),
    Row("a vfork and exec loop", ("{spawns}", "30"), (CALL,), {"probe_me": 45}),
    Row(
        "a vfork and exec loop with bad pointers",
        ("{spawns}", "30"),
        ("probe_me bad=+0($arg1)", "libc:execve bad=+8(%ax)"),
        {"probe_me": 45},
    ),
    Row("a program under a seccomp filter", ("{filtered}", "1000"), (CALL,), {"probe_me": 1000}),
    Row(
        "a program under a seccomp filter and bad pointers",
        ("{filtered}", "1000"),
        ("probe_me bad=+0($arg2):u64 worse=+8(+0($arg1))",),
        {"probe_me": 1000},
    ),
    Row("threads that come and go", ("{comers}", "500"), (CALL,), {"probe_me": 500}),
    Row(
        "threads that come and go with bad pointers",
        ("{comers}", "500"),
        ("probe_me bad=+0($arg2)", "libc:pthread_create bad=+0($arg4)"),
        {"probe_me": 500, "pthread_create": 504},
    ),
]
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)


@dataclass(frozen=True)
class Once:
    """The program works from its start on, goes to its end when a byte comes, and counts what went wrong.

    ``right``: what it counts, in its last line. ``hits``: so many at least.
    """

    name: str
    command: tuple[str, ...]
    probes: tuple[str, ...]
    right: dict[str, int]
    hits: int = 20


STACK = 8 << 20

ONCE = [
    Once(
        "a program with a handler for SIGSEGV that faults on purpose",
        ("{displaced_faults}", "elsewhere", "jump"),
        ("elsewhere v=+0(%di)",),
        {"wrong_rip": 0, "wrong_addr": 0, "wrong_value": 0},
    ),
    Once(
        "a program with a handler for SIGSEGV that faults on purpose in what a probe displaces",
        ("{displaced_faults}", "first", "skip"),
        ("first v=+0(%di)",),
        {"wrong_rip": 0, "wrong_addr": 0, "wrong_value": 0},
        0,
    ),
    Once("a leaf function that lives in its red zone", ("{redzone}",), ("leaf+0x52 v=%di bad=+0(%dx)",), {"wrong": 0}),
    Once("a program with an alternate signal stack", ("{redzone}",), ("leaf v=%di",), {"wrong": 0, "off_stack": 0}),
    Once(
        "a program at its RLIMIT_STACK",
        ("/bin/sh", "-c", f"ulimit -s {STACK >> 10}; exec {{bounds}} stack"),
        ("f1000 x=%di y=+0(%di)", "f1001 x=%di"),
        {"wrong": 0},
    ),
    Once(
        "a program that grows brk by 1 GB after 2,000 probes",
        ("{bounds}", "brk", "1024"),
        ("f1??? x=%di", "f2??? x=%di"),
        {"wrong": 0, "grown": 1 << 30},
        2000,
    ),
    Once("a program with threads of the kernel's own", ("{workers}",), (CALL,), {"wrong": 0, "workers": 2}),
    Once("a program that fills a stack itself when it is touched", ("{lazystack}",), (CALL,), {"wrong": 0}),
    Once(
        "a program that fills a stack itself when it is touched, and bad pointers",
        ("{lazystack}",),
        ("probe_me bad=+0($arg1)",),
        {"wrong": 0},
    ),
]


def filled(row: Row | Once, progs: Programs, folder: Path) -> list[str]:
    """The command of ``row``: ``{NAME}`` is a program of tests/progs, ``{script}`` a file with the next word."""
    words: list[str] = []
    for word, after in zip(row.command, [*row.command[1:], ""], strict=True):
        if word == "{script}":
            # In a file, since multiprocessing's spawn starts it again.
            script = folder / "program.py"
            script.write_text(after)
            return [*words, str(script)]
        words.append(re.sub(r"\{(\w+)\}", lambda found: str(progs(found[1])), word))
    return words


def check_hits(session: Path, done: cli.Done, wanted: dict[str, int]) -> None:
    seen = Counter(hit["event"].split("/")[1] for hit in cli.hits(session))
    assert done.totals == cli.Totals(hits=seen.total(), lost=0, torn=0, stray=0, errors=0)
    for event, number in wanted.items():
        assert seen[event] == number if number >= 0 else seen[event] >= -number, (event, seen)


@each_row
def test_recorded_from_the_start(row: Row, progs: Programs, tmp_path: Path) -> None:
    command = filled(row, progs, tmp_path)
    plain = subprocess.run(command, input=b"\n\n", capture_output=True, check=False)
    assert plain.returncode == 5
    session = tmp_path / "s.ptw"
    probes = [word for probe in row.probes for word in ("-e", probe)]
    done = cli.run("record", *probes, "-o", session, "--json", "--", *command, stdin=b"\n\n").good()
    assert done.own_output == plain.stdout
    assert done.summary["exit_status"] == 5
    check_hits(session, done, {event: 2 * number for event, number in row.hits.items()})


@each_row
def test_attached_to(row: Row, progs: Programs, start: Start, tmp_path: Path) -> None:
    command = filled(row, progs, tmp_path)
    plain = subprocess.run(command, input="\n\n", capture_output=True, text=True, check=False)
    target = start(*command)
    session = tmp_path / "s.ptw"
    probes = [word for probe in row.probes for word in ("-e", probe)]
    with Recording("-p", str(target.pid), *probes, "-o", session, "--json") as recording:
        target.go()
        target.wait_for("worked")
        done = recording.stop().good()
    assert not ours(target.pid)
    assert not changed_code(target.pid)
    assert not traced_threads(target.pid)
    check_hits(session, done, row.hits)
    target.go()
    assert target.finish() == plain.stdout
    assert target.exit_code == 5


@pytest.mark.parametrize("row", ONCE, ids=lambda row: row.name)
def test_attached_to_up_to_its_end(row: Once, progs: Programs, start: Start, tmp_path: Path) -> None:
    target = start(*filled(row, progs, tmp_path))
    session = tmp_path / "s.ptw"
    probes = [word for probe in row.probes for word in ("-e", probe)]
    with Recording("-p", str(target.pid), *probes, "-o", session, "-m", "64M") as recording:
        time.sleep(0.2)
        target.go()
        output = target.finish()
        done = recording.finish().good()
    assert target.exit_code == 0 and not target.errors
    counts = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", output.splitlines()[-1])}
    assert {name: counts[name] for name in row.right} == row.right
    assert len(cli.hits(session)) == done.totals.hits >= row.hits
