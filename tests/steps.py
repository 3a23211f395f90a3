"""The command, killed at an exact step: ``python -m tests.steps NTH WHO VERB WORDS...``.

A step is one thing that the tracer is asked for, or one system call of those that a target makes for it. The ``NTH``
(from 0) is not done any more: the recorder is killed (WHO ``recorder``; its tracing task cleans up), or before it the
tracing task too (``both``). Ends with exit code 0 where there are no more than ``NTH`` steps.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from ptwprobe import _native, cli

_NO_STEPS = ("changed_ns", "close", "events", "exit_status", "next_mapping_event", "take_ended", "threads")
"""What changes nothing, and may be asked for any number of times."""


class Dying:
    """A tracer with so many steps to go."""

    def __init__(self, steps: int, both: bool) -> None:
        self._tracer = _real()
        self._left = steps
        self._both = both

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._tracer, name)
        if not callable(value) or name in _NO_STEPS:
            return value
        return self._remote if name == "remote" else self._counted(value)

    def _counted(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if self._left == 0:
                self._die()
            self._left -= 1
            return method(*args, **named)

        return call

    def _remote(self, pid: int, calls: list[Any], scratch: Any = None, keep: Any = ()) -> Any:
        if self._left < len(calls):
            if self._left:
                # Without the last call (the file is closed by it), there is nothing to keep yet.
                self._tracer.remote(pid, calls[: self._left], scratch)
            self._die()
        self._left -= len(calls)
        return self._tracer.remote(pid, calls, scratch, keep)

    def _die(self) -> None:
        if self._both:
            os.kill(self._tracer.pid, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


_real = _native.Tracer


def main() -> None:
    steps, who = int(sys.argv[1]), sys.argv[2]
    sys.argv = ["ptwprobe", *sys.argv[3:]]
    vars(_native)["Tracer"] = lambda: Dying(steps, who == "both")
    cli.main()


if __name__ == "__main__":
    main()
