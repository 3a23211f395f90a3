"""A running test program: started, waited for until it is ready, let go, ended."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Callable
from types import TracebackType


class Target:
    """A child process whose stdout is collected. Programs of ``tests/progs`` print ``ready`` and then wait for a byte.

    ``ready``: the start of the line to wait for, or None where the program has no such line. ``wait_s``: how long to
    wait at most, there and in :meth:`finish`.
    """

    def __init__(
        self,
        command: list[str],
        *,
        ready: str | None = "ready",
        wait_s: float = 60.0,
        env: dict[str, str] | None = None,
    ) -> None:
        self.command = command
        self.wait_s = wait_s
        self._output = b""
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0, env=env
        )
        if ready is not None:
            self.wait_for(ready)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        """What the program has printed so far, as far as it has been read."""
        return self._output.decode()

    def wait_for(self, start: str) -> str:
        """Reads output until there is a whole line that begins with ``start``, and returns the first such line."""

        def found() -> str | None:
            lines = self._output.decode().split("\n")[:-1]
            return next((line for line in lines if line.startswith(start)), None)

        self._read_until(lambda: found() is not None, repr(start))
        return found() or ""

    def _read_until(self, enough: Callable[[], bool], what: str) -> None:
        assert self.process.stdout is not None
        end = time.monotonic() + self.wait_s
        while not enough():
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise TimeoutError(f"no {what} from {self.process.args!r} in {self.wait_s} s; got {self._output!r}")
            piece = os.read(self.process.stdout.fileno(), 65536)
            if not piece:
                raise EOFError(f"{self.process.args!r} ended before {what}; got {self._output!r}")
            self._output += piece

    def peek(self) -> str:
        """All output up to now, without waiting for more."""
        assert self.process.stdout is not None
        while select.select([self.process.stdout], [], [], 0)[0]:
            piece = os.read(self.process.stdout.fileno(), 65536)
            if not piece:
                break
            self._output += piece
        return self.output

    def go(self) -> None:
        """The byte that the program waits for."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    def ask(self) -> str:
        """Sends an empty line, and returns the next whole line of output."""
        lines = self._output.count(b"\n")
        self.go()
        self._read_until(lambda: self._output.count(b"\n") > lines, "an answer")
        return self._output.decode().split("\n")[lines]

    def finish(self) -> str:
        """Closes stdin, waits for the end, and returns all of stdout. Raises TimeoutError if there is no end."""
        try:
            out, err = self.process.communicate(timeout=self.wait_s)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"{self.command!r} did not end in {self.wait_s} s") from error
        self._output += out
        self.errors = err.decode()
        return self.output

    @property
    def exit_code(self) -> int | None:
        """As subprocess has it: the exit code, or minus the number of the signal that killed it."""
        return self.process.poll()

    def is_alive(self) -> bool:
        """True; raises AssertionError, which says how it ended, where it has."""
        code = self.process.poll()
        assert code is None, f"{self.command!r} ended with {code}; got {self.peek()!r}"
        return True

    def __enter__(self) -> Target:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream is not None and not stream.closed:
                stream.close()
