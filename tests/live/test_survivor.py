"""SIGKILL of all that is ours while threads of the target execute calls for us: each goes on as if nothing had been."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ptwprobe._native import NativeError, Tracer
from tests.targets import Target

pytestmark = pytest.mark.needs("root")

Programs = Callable[..., Path]
Start = Callable[..., Target]

# Each borrower is a fork of a process that has imported everything.
CONTEXT = get_context("forkserver")
CONTEXT.set_forkserver_preload(["ptwprobe", __name__])
KILLS, KILLS_FULL = 8, 40
"""Of each kind and mix of threads."""
MOST_DELAY = 0.03
END_S = 30

MMAP, GETPID, MUNMAP = 9, 39, 11


def borrow(pid: int, kind: str, told: Connection) -> None:
    """What is killed: without end, calls on one borrowed thread. Tells the pid of its tracing task, then complaints."""
    tracer = Tracer()
    told.send(tracer.pid)
    while True:
        try:
            if kind == "running":
                # The others run on. The result of the first call is an argument of the last.
                tracer.remote(
                    pid, [(MMAP, [0, 4096, 3, 0x22, -1, 0]), (GETPID, []), (MUNMAP, [(0, 0), 4096])], b"hello"
                )
            else:
                tracer.attach(pid)
                tracer.threads(pid)
                tracer.remote(pid, [(GETPID, []), (GETPID, [])])
                tracer.detach(pid)
        except NativeError as error:
            # On a busy machine a thread may not stop in time, which is no mistake.
            if error.args[0] != "busy":
                told.send(str(error))


def kill_a_borrower(pid: int, kind: str, chance: random.Random) -> list[str]:
    """Starts one, kills it and its tracing task at a random moment; returns what it complained about."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    one = CONTEXT.Process(target=borrow, args=(pid, kind, theirs))
    one.start()
    theirs.close()
    owner = ours.recv()
    time.sleep(chance.uniform(0, MOST_DELAY))
    assert one.pid is not None
    for victim in chance.sample([owner, one.pid], 2):
        os.kill(victim, signal.SIGKILL)
    one.join()
    wait_for_end(owner)
    complaints = []
    with contextlib.suppress(EOFError), ours:
        while ours.poll():
            complaints.append(ours.recv())
    return complaints


def wait_for_end(pid: int) -> None:
    """Until the process is no more than a zombie, so that the target is nobody's tracee."""
    end = time.monotonic() + END_S
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < end, f"task {pid} lives on after SIGKILL"
            time.sleep(0.001)


@pytest.mark.parametrize(("spinning", "blocked"), [(2, 4), (3, 0), (0, 4)], ids=["mixed", "spinning", "blocked"])
@pytest.mark.parametrize("kind", ["running", "stopped"])
def test_threads_survive_our_death_while_they_are_borrowed(
    progs: Programs, start: Start, full: bool, kind: str, spinning: int, blocked: int
) -> None:
    """Registers, flags, red zone, vector registers, mask, alternate stack, calls' results and times, signals."""
    seed = time.time_ns()
    chance = random.Random(seed)
    target = start("nice", "-n", "5", progs("survivor"), str(spinning), str(blocked))
    complaints: Counter[str] = Counter()
    kills = KILLS_FULL if full else KILLS
    for turn in range(kills):
        complaints.update(kill_a_borrower(target.pid, kind, chance))
        assert target.exit_code is None, f"the target ended with {target.exit_code} after kill {turn} (seed {seed})"
    target.go()
    last = target.finish().splitlines()[-1]
    print(f"\n{kills} kills ({kind}, {spinning} spinning, {blocked} blocked): {last}")
    assert not complaints, f"{complaints} (seed {seed})"
    assert target.exit_code == 0, f"{target.errors} (seed {seed})"
    found = re.fullmatch(r"wrong=0 rounds=(\d+) signals=(\d+)", last)
    assert found, f"{last} {target.errors} (seed {seed})"
    assert int(found[1]) > 0
    assert int(found[2]) == spinning + blocked, "each thread still gets signals"
