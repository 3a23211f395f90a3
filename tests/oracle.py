"""The second opinion: what the kernel's own uprobe sees of a program, as the sequence of (thread, arguments).

Run a program twice, once here and once under ptwprobe, both without address space randomisation and in the same
environment, and the sequences of each thread must be the same. Threads are numbered by creation.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.tracefs import KernelHit, Uprobe, Uprobes, setarch_no_aslr

# The environment of both runs. Nothing random: hash seeds, locales and search paths would show in the arguments.
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LC_ALL": "C",
    "HOME": "/",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}

Sequences = dict[int, list[tuple[str, tuple[int, ...]]]]


@dataclass(frozen=True)
class Observation:
    """One run: ``threads`` has, for each thread by creation, its (event, arguments) in order."""

    threads: Sequences
    stdout: bytes
    exit_code: int

    @property
    def hits(self) -> int:
        return sum(len(sequence) for sequence in self.threads.values())


def by_thread(pid: int, hits: Iterable[tuple[int, str, tuple[int, ...]]]) -> Sequences:
    """(tid, event, args) in time order → per thread, numbered by creation: thread 0 is the first one of ``pid``.

    Thread ids grow with creation, and start again from below at the system's limit.
    """
    limit = int(Path("/proc/sys/kernel/pid_max").read_text())
    sequences: Sequences = {}
    for tid, event, args in hits:
        sequences.setdefault((tid - pid) % limit, []).append((event, args))
    return {number: sequences[age] for number, age in enumerate(sorted(sequences))}


def observe(command: list[str], probes: list[Uprobe], *, stdin: bytes = b"") -> Observation:
    """Runs ``command`` under classic uprobes."""
    # Stopped before it becomes the program, so that the instance can be told whom to follow. A shell changes the
    # environment and its order; env puts it right.
    environment = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    waiting = setarch_no_aslr(["/bin/sh", "-c", 'kill -STOP $$; exec env -i "$@"', "sh", *environment, *command])
    with (
        Uprobes(probes, follow=True) as uprobes,
        subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT) as process,
    ):
        try:
            os.waitpid(process.pid, os.WUNTRACED)
            uprobes.follow(process.pid)
            os.kill(process.pid, signal.SIGCONT)
            out, _ = process.communicate(stdin, timeout=120)
        except BaseException:
            process.kill()
            raise
        return Observation(by_thread(process.pid, map(_plain, uprobes.hits())), out, process.returncode)


def _plain(hit: KernelHit) -> tuple[int, str, tuple[int, ...]]:
    return hit.tid, hit.event, hit.args
