"""Faults of loads through bad pointers: hidden while the tracer is there, and not risked when it is not."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ptwprobe._native import Tracer
from tests import targets

Start = Callable[..., targets.Target]
Programs = Callable[..., Path]
Load = tuple[int, int, int]
GATE, VALUE = 0x80, 0x88
FUTEX_OWNER_DIED = 0x4000_0000


class GatePage:
    """Our view of the page that the program's loads are gated by."""

    def __init__(self, pid: int, fd: int) -> None:
        with Path(f"/proc/{pid}/fd/{fd}").open("r+b", buffering=0) as file:
            self.memory = mmap.mmap(file.fileno(), 4096)
        self.addr = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))

    def word(self, offset: int) -> int:
        return int.from_bytes(self.memory[offset : offset + 4], "little")

    def open(self, tracer: Tracer) -> None:
        """Hold the gate, and tell the program which value that is."""
        self.memory[VALUE : VALUE + 4] = tracer.pid.to_bytes(4, "little")
        assert tracer.hold_gate(self.addr + GATE) == tracer.pid
        assert self.word(GATE) == tracer.pid


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    made = Tracer()
    yield made
    made.close()


def started(start: Start, progs: Programs, mode: str, limit: int = 0) -> tuple[targets.Target, Load, int]:
    program = start(progs("tracee_loads"), mode, str(limit))
    words = program.output.split()
    load, end, fixup = (int(word, 16) for word in words[1:4])
    return program, (load, end, fixup), int(words[4])


def results(output: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\w+)", output.splitlines()[-1]))


@pytest.mark.parametrize(
    ("mode", "segv", "blocked"),
    [
        ("default", "default", "0"),
        ("ignore", "ignored", "0"),
        ("block", "default", "1"),
        ("handler", "handler", "0"),
        ("both", "handler", "1"),
        ("lateignore", "ignored", "0"),
        ("lateblock", "default", "1"),
        ("latehandler", "handler", "0"),
        ("lateboth", "handler", "1"),
        ("undo", "default", "0"),
        ("thread", "default", "0"),
    ],
)
def test_a_fault_of_a_load_is_hidden_and_the_signal_stays_as_the_program_has_it(
    start: Start, progs: Programs, tracer: Tracer, mode: str, segv: str, blocked: str
) -> None:
    program, load, fd = started(start, progs, mode)
    page = GatePage(program.pid, fd)
    tracer.watch(program.pid, [load])
    page.open(tracer)
    time.sleep(0.3 + 0.6 * (mode.startswith("late") or mode in ("undo", "thread")))
    tracer.threads(program.pid)
    tracer.release_gate(page.addr + GATE)
    assert page.word(GATE) == 0
    tracer.detach(program.pid)
    time.sleep(0.05)
    program.go()
    got = results(program.finish())
    assert program.exit_code == 0
    assert int(got["loads"]) > 50 and int(got["closed"]) > 10
    assert (got["segv"], got["blocked"], got["trap"], got["handled"]) == (segv, blocked, "ignored", "own")


def test_the_gate_opens_and_closes_with_each_watch(start: Start, progs: Programs, tracer: Tracer) -> None:
    program, load, fd = started(start, progs, "default")
    page = GatePage(program.pid, fd)
    for _ in range(20):
        tracer.watch(program.pid, [load])
        page.open(tracer)
        time.sleep(0.01)
        tracer.release_gate(page.addr + GATE)
        tracer.detach(program.pid)
    program.go()
    assert int(results(program.finish())["loads"]) > 20
    assert program.exit_code == 0


def _recorder(program: targets.Target, load: Load, fd: int) -> targets.Target:
    script = (
        f"import sys,time\nsys.path.insert(0, {str(Path(__file__).parent.parent)!r})\n"
        "from ptwprobe._native import Tracer\nfrom tests.test_tracee_faults import GatePage\n"
        f"t=Tracer()\np=GatePage({program.pid},{fd})\nt.watch({program.pid},[{load}])\np.open(t)\n"
        "print('ready',t.pid,flush=True)\ntime.sleep(600)\n"
    )
    return targets.Target([sys.executable, "-c", script])


def test_a_program_with_bad_pointers_lives_on_when_the_recorder_is_killed(start: Start, progs: Programs) -> None:
    program, load, fd = started(start, progs, "ignore")
    page = GatePage(program.pid, fd)
    for attempt in range(10):
        with _recorder(program, load, fd) as recorder:
            owner = int(recorder.output.split()[1])
            assert page.word(GATE) == owner
            time.sleep(0.002 * attempt)
            os.kill(recorder.pid, signal.SIGKILL)
            recorder.process.wait()
            end = time.monotonic() + 5
            while f"TracerPid:\t{owner}\n" in Path(f"/proc/{program.pid}/status").read_text():
                assert time.monotonic() < end
                time.sleep(0.001)
        assert page.word(GATE) == 0
    program.go()
    got = results(program.finish())
    assert program.exit_code == 0
    assert int(got["loads"]) > 10 and (got["segv"], got["trap"]) == ("ignored", "ignored")


def test_the_kernel_marks_the_gate_when_the_owner_itself_is_killed(tracer: Tracer) -> None:
    fds = [os.memfd_create("gate") for _ in range(3)]
    pages = []
    for fd in fds:
        os.ftruncate(fd, 4096)
        pages.append(GatePage(os.getpid(), fd))
    for page in pages:
        page.open(tracer)
    tracer.release_gate(pages[1].addr + GATE)
    os.kill(tracer.pid, signal.SIGKILL)
    time.sleep(0.2)
    words = [page.word(GATE) for page in pages]
    assert words[1] == 0 and words[0] & FUTEX_OWNER_DIED and words[2] & FUTEX_OWNER_DIED
    assert tracer.pid not in words


def test_a_gate_word_in_private_memory_is_refused(tracer: Tracer) -> None:
    from ptwprobe._native import NativeError

    page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    addr = ctypes.addressof(ctypes.c_char.from_buffer(page))
    with pytest.raises(NativeError, match="shared mapping"):
        tracer.hold_gate(addr + GATE)
