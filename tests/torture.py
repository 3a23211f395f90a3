"""A program under torture: ``tests/progs/torture.c`` and what must hold of it after everything that was done to it.

All of it is read from ``/proc`` and the files themselves, without a line of the package.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from tests.targets import Target

WELL_BEHAVED = ("plain", "wild", "second_byte", "first_byte", "repeats")
"""Functions of torture.c that can be probed wherever the program is loaded."""
_SETTLED_SECONDS = 10.0


@dataclass(frozen=True)
class Report:
    """What the program says of itself: calls so far, wrong results among them, timer signals."""

    calls: int
    wrong: int
    alarms: int


class Torture:
    """A running ``torture``, and how its memory looked before anybody touched it.

    ``pid``: where the process that was started is not the program itself, but has started it.
    """

    def __init__(self, target: Target, pid: int | None = None) -> None:
        self.target = target
        self.pid = target.pid if pid is None else pid
        self.memory = areas(self.pid)
        self.files = open_files(self.pid)
        self._calls = 0

    def report(self) -> Report:
        """Asks the program, which must answer."""
        return _parsed(self.target.ask())

    def check(self, what: str = "") -> None:
        """The program lives, works, and computes right."""
        report = self.report()
        end = time.monotonic() + _SETTLED_SECONDS
        while report.calls == self._calls:
            assert time.monotonic() < end, f"{what}: no call in {_SETTLED_SECONDS} s"
            report = self.report()
        assert report.wrong == 0, f"{what}: {report}"
        self._calls = report.calls

    def check_untouched(self, what: str = "", seconds: float = _SETTLED_SECONDS) -> None:
        """As :meth:`check`; and within ``seconds`` there is nothing of ours in its memory, and nobody traces it."""
        end = time.monotonic() + seconds
        while differences := self._differences():
            assert self.target.exit_code is None, f"{what}: ended with {self.target.exit_code}"
            assert time.monotonic() < end, f"{what}: " + "; ".join(differences)
            time.sleep(0.002)
        self.check(what)

    def _differences(self) -> list[str]:
        now = areas(self.pid)
        found = [f"new {area}" for area in now if area not in self.memory]
        found += [f"gone {area}" for area in self.memory if area not in now]
        found += [f"open {file}" for file in open_files(self.pid) if file not in self.files]
        found += changed_code(self.pid)
        found += [f"thread {tid} is traced" for tid in traced_threads(self.pid)]
        return found

    def finish(self) -> Report:
        """Ends the program, whose exit code must be 0."""
        last = _parsed(self.target.finish().splitlines()[-1])
        assert self.target.exit_code == 0
        assert last.wrong == 0
        return last


def _parsed(line: str) -> Report:
    return Report(*(int(word.split("=")[1]) for word in line.split()))


@dataclass(frozen=True)
class Area:
    """A stretch of a process's memory; neighbours that continue each other count as one."""

    start: int
    end: int
    access: str
    offset: int
    device: str
    inode: int
    path: str

    def continues_in(self, other: Area) -> bool:
        """Whether ``other`` is the next part of the same."""
        alike = (self.access, self.inode, self.path) == (other.access, other.inode, other.path)
        in_order = not self.inode or self.offset + self.end - self.start == other.offset
        return alike and in_order and self.end == other.start

    def __str__(self) -> str:
        return f"{self.start:x}-{self.end:x} {self.access} {self.offset:x} {self.path}"


def areas(pid: int) -> list[Area]:
    """The memory of a process, but for heap and stack, which grow."""
    found: list[Area] = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        span, access, offset, device, inode, *path = line.split(maxsplit=5)
        start, end = (int(word, 16) for word in span.split("-"))
        area = Area(start, end, access, int(offset, 16), device, int(inode), path[0] if path else "")
        if area.path in ("[heap]", "[stack]"):
            continue
        last = found[-1] if found else None
        if last and last.continues_in(area):
            found[-1] = replace(last, end=end)
            continue
        found.append(area)
    return found


def open_files(pid: int) -> list[str]:
    """Every open descriptor with what it is open on."""
    return [f"{link.name} {link.readlink()}" for link in Path(f"/proc/{pid}/fd").iterdir()]


def ours(pid: int) -> list[Area]:
    """What a process has mapped of ptwprobe's, but for its anonymous pages."""
    return [area for area in areas(pid) if "memfd:" in area.path]


def changed_code(pid: int) -> list[str]:
    """Where the code of a process is not that of the files it was mapped from."""
    found = []
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for area in areas(pid):
            if "x" not in area.access or not area.inode or not area.path.startswith("/"):
                continue
            if not Path(area.path).is_file():
                continue
            with Path(area.path).open("rb") as file:
                wanted = os.pread(file.fileno(), area.end - area.start, area.offset)
            try:
                has = os.pread(memory.fileno(), len(wanted), area.start)
            except OSError:
                # Something changes just now.
                found.append(f"{area} cannot be read")
                continue
            if has != wanted:
                at = next(i for i in range(len(wanted)) if has[i : i + 1] != wanted[i : i + 1])
                found.append(
                    f"{Path(area.path).name} at {area.start + at:#x}: {has[at : at + 8].hex()},"
                    f" not {wanted[at : at + 8].hex()}"
                )
    return found


def traced_threads(pid: int) -> list[int]:
    """Threads of a process that somebody traces."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            status = (task / "status").read_text()
        except OSError:
            continue
        if "TracerPid:\t0\n" not in status:
            found.append(int(task.name))
    return found
