"""The kernel's own uprobes, in a trace instance of our own: what the bench compares with and the oracle reads.

Events are global in tracefs while instances are not, so every event has a group that names our process. Whatever an
earlier run left behind when it was killed is removed first.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

TRACING = Path("/sys/kernel/tracing")
_PREFIX = "ptwtest"
_serial = itertools.count()
_LINE = re.compile(r"^.*-(?P<tid>\d+)\s+\[\d+\]\s.*?: (?P<event>\w+): \(0x[0-9a-f]+\)(?P<args>.*)$")


@dataclass(frozen=True)
class Uprobe:
    """One event: ``name``, the file and the file offset, and FETCHARGS in tracefs' own language (``n=%di:u64``)."""

    name: str
    path: Path
    file_offset: int
    fetch: str


@dataclass(frozen=True)
class KernelHit:
    tid: int
    event: str
    args: tuple[int, ...]


class Uprobes:
    """Context manager: the events exist and are enabled inside it, in an instance whose buffer holds
    ``buffer_kb`` KiB a CPU. Those of one name are one event with several places. With ``follow``, nothing is recorded
    before :meth:`follow` says of whom.
    """

    def __init__(self, events: list[Uprobe], *, buffer_kb: int = 32768, follow: bool = False) -> None:
        self.name = f"{_PREFIX}_{os.getpid()}_{next(_serial)}"
        self.events = events
        self._buffer_kb = buffer_kb
        self._follow = follow
        self._followed = 0
        self._instance = TRACING / "instances" / self.name

    def __enter__(self) -> Uprobes:
        _remove_leftovers()
        try:
            self._instance.mkdir()
            self._write("buffer_size_kb", str(self._buffer_kb))
            if self._follow:
                # Nothing until somebody is followed: an empty set_event_pid means everybody.
                self._write("tracing_on", "0")
                self._write("options/event-fork", "1")
                self._write("events/sched/sched_process_exec/enable", "1")
            for e in self.events:
                _append(f"p:{self.name}/{e.name} {e.path.resolve()}:{e.file_offset:#x} {e.fetch}")
            self._write(f"events/{self.name}/enable", "1")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def follow(self, pid: int) -> None:
        """Keeps hits of this process and of what it forks and no others, from the program on that it executes next."""
        self._followed = pid
        self._write("set_event_pid", str(pid))
        self._write("tracing_on", "1")

    def hits(self) -> list[KernelHit]:
        """All hits so far, in time order. Recording is over then; raises when the buffer was too small."""
        self._write("tracing_on", "0")
        for cpu in (self._instance / "per_cpu").iterdir():
            stats = dict(line.split(":", 1) for line in (cpu / "stats").read_text().splitlines())
            for loss in ("overrun", "dropped events", "commit overrun"):
                if int(stats[loss]):
                    raise RuntimeError(f"{cpu.name}: {loss} {stats[loss]}: the buffer is too small")
        found: list[KernelHit] = []
        with (self._instance / "trace").open() as trace:
            for line in trace:
                match = _LINE.match(line)
                if "sched_process_exec:" in line and f" pid={self._followed} " in line:
                    found.clear()
                elif match:
                    values = (int(word.split("=", 1)[1], 0) for word in match["args"].split())
                    found.append(KernelHit(int(match["tid"]), match["event"], tuple(values)))
        return found

    def count(self) -> int:
        """How many hits the buffer has taken so far, overwritten ones included."""
        total = 0
        for cpu in (self._instance / "per_cpu").iterdir():
            stats = dict(line.split(":", 1) for line in (cpu / "stats").read_text().splitlines())
            total += int(stats["entries"]) + int(stats["overrun"])
        return total

    def _write(self, name: str, text: str) -> None:
        (self._instance / name).write_text(text)

    def _remove(self) -> None:
        _remove_instance(self._instance)
        _remove_events(self.name)


def available() -> bool:
    return os.access(TRACING / "uprobe_events", os.W_OK)


def _append(line: str) -> None:
    # Appending keeps what others have defined. Not by open("a"), which seeks, and the file does not let it.
    file = os.open(TRACING / "uprobe_events", os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, line.encode() + b"\n")
    finally:
        os.close(file)


def _remove_instance(instance: Path) -> None:
    if not instance.exists():
        return
    (instance / "tracing_on").write_text("0")
    (instance / "events" / "enable").write_text("0")
    instance.rmdir()


def _remove_events(group: str) -> None:
    lines = (TRACING / "uprobe_events").read_text().splitlines()
    for event in {line.split()[0].split(":", 1)[1] for line in lines}:
        if event.startswith(f"{group}/"):
            _append(f"-:{event}")


def _remove_leftovers() -> None:
    for instance in (TRACING / "instances").glob(f"{_PREFIX}_*"):
        if not _owner_lives(instance.name):
            _remove_instance(instance)
    lines = (TRACING / "uprobe_events").read_text().splitlines()
    for group in {line.split()[0].split(":", 1)[1].split("/")[0] for line in lines}:
        if group.startswith(f"{_PREFIX}_") and not _owner_lives(group):
            _remove_events(group)


def _owner_lives(name: str) -> bool:
    return Path("/proc", name.split("_")[1]).exists()


def setarch_no_aslr(command: list[str]) -> list[str]:
    """``command`` with address space randomisation off, so that two runs have the same addresses."""
    tool = shutil.which("setarch")
    if tool is None:
        raise RuntimeError("setarch is missing (package util-linux)")
    return [tool, "x86_64", "-R", *command]
