"""The command as users call it: runs ``ptwprobe`` and takes its output apart."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

COMMAND = [str(Path(sys.executable).parent / "ptwprobe")]
_TOTALS = re.compile(r"hits=(\d+) lost=(\d+) torn=(\d+) stray=(\d+) errors=(\d+)")


@dataclass(frozen=True)
class Totals:
    """The closing line."""

    hits: int
    lost: int
    torn: int
    stray: int
    errors: int


@dataclass(frozen=True)
class Done:
    """A finished call."""

    exit_code: int
    stdout: bytes
    stderr: str

    @property
    def totals(self) -> Totals:
        """What the last line on stderr says; every verb that reads or writes a trace ends with it."""
        last = self.stderr.strip().splitlines()[-1] if self.stderr.strip() else ""
        match = _TOTALS.fullmatch(last)
        assert match, f"the last line on stderr is {last!r}; all of it:\n{self.stderr}"
        return Totals(*(int(number) for number in match.groups()))

    @property
    def summary(self) -> dict[str, Any]:
        """What ``record --json`` says at the end of standard output, after a recorded command's own."""
        value: dict[str, Any] = json.loads(self.stdout[self._summary_at() :])
        return value

    @property
    def own_output(self) -> bytes:
        """What a recorded command printed itself (with ``--json``)."""
        return self.stdout[: self._summary_at()]

    def _summary_at(self) -> int:
        at = self.stdout.rfind(b'{"output":')
        assert at >= 0, f"no JSON in {self.stdout[-200:]!r}; stderr:\n{self.stderr}"
        return at

    def good(self) -> Done:
        """Itself, after a check that the exit code is 0."""
        assert self.exit_code == 0, f"exit code {self.exit_code}:\n{self.stderr}"
        return self


def run(
    *words: str | Path,
    stdin: bytes = b"",
    env: dict[str, str] | None = None,
    wrap: list[str] | None = None,
    seconds: float = 120,
) -> Done:
    """``ptwprobe WORDS...`` to its end. ``wrap``: words before the command, such as those of setarch."""
    command = [*(wrap or []), *COMMAND, *(str(word) for word in words)]
    done = subprocess.run(command, input=stdin, capture_output=True, env=env, timeout=seconds, check=False)
    return Done(done.returncode, done.stdout, done.stderr.decode())


class Recording:
    """``ptwprobe record -p PID ...`` in the background, from the moment when its probes are in.

    Inside the context it records; :meth:`stop` is Ctrl-C, :meth:`finish` waits for an end that comes by itself.
    """

    def __init__(self, *words: str | Path, wait_s: float = 60) -> None:
        self._wait_s = wait_s
        self.process = subprocess.Popen(
            [*COMMAND, "record", *(str(word) for word in words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._stderr = b""

    def __enter__(self) -> Recording:
        assert self.process.stderr is not None
        # It says so once the probes are in.
        for line in self.process.stderr:
            self._stderr += line
            if b": recording into " in line:
                return self
        self.process.wait()
        raise AssertionError(f"record ended at once, exit code {self.process.returncode}: {self._stderr.decode()}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            # Ctrl-C first, so that a target is not left patched by a failing test.
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    def stop(self) -> Done:
        self.process.send_signal(signal.SIGINT)
        return self.finish()

    def finish(self) -> Done:
        out, err = self.process.communicate(timeout=self._wait_s)
        return Done(self.process.returncode, out, (self._stderr + err).decode())


def events(session: Path, *words: str) -> Iterator[dict[str, Any]]:
    """Every object of ``script --format jsonl``."""
    for line in run("script", session, "--format", "jsonl", *words).good().stdout.splitlines():
        yield json.loads(line)


def hits(session: Path, *words: str) -> list[dict[str, Any]]:
    """The objects that are hits, in time order."""
    return [event for event in events(session, *words) if event["type"] == "hit"]


def arguments(hit: dict[str, Any]) -> tuple[int, ...]:
    """A hit's values in order; integers beyond 2^53 come as strings."""
    return tuple(int(value) for value in hit["args"].values())
