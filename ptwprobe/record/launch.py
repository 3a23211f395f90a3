"""Starting a command so that its probes are in before the code of their objects runs.

The command is stopped at exec and then stepped from one change of its address space to the next until every probe has
gone in; from there on it runs untouched. What an object's own constructors do is seen; what the dynamic linker did
before is not.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from ptwprobe import _native
from ptwprobe.errors import TargetError
from ptwprobe.model import Probe
from ptwprobe.patch.install import Target
from ptwprobe.patch.remote import native_errors
from ptwprobe.process import Process

_PATIENCE = 2
"""Events after the first thread's TLS is there in which its tid must show up in it; a libc writes it at once."""


class Launching:
    """A started command whose probes are not all in yet."""

    def __init__(self, tracer: _native.Tracer, command: Sequence[str], probes: Sequence[Probe]) -> None:
        """Start ``command``, stopped at exec. Raises TargetError when it cannot be executed."""
        self._tracer = tracer
        try:
            self.pid: int = tracer.launch(list(command), [f"{k}={v}" for k, v in os.environ.items()], str(Path.cwd()))
        except _native.NativeError as error:
            raise TargetError(error.args[1], "give a program that can be executed") from error
        self.process = Process(self.pid)
        self.pending = list(probes)
        self.seen: set[str] = set()
        """Names of the objects that were mapped."""
        self.gone = False
        self.told = False
        """Whether the user knows that probes are waiting."""
        self._started = time.monotonic()
        self._ready = False
        self._events_with_tls = 0

    def step(self, timeout_ms: int) -> list[Probe]:
        """Let the command run to its next change of mappings, at most ``timeout_ms``; the probes that may go in now.

        The command stands still while the caller tries them. Call ``arrived`` for each that went in.
        """
        with native_errors(self.pid):
            event = self._tracer.next_mapping_event(self.pid, timeout_ms)
        if event == "exit":
            self.gone = True
        if event != "mapped" or not self._threads_can_be_told():
            return []
        self.seen |= {Path(m.path).name for m in self.process.maps() if m.is_file and m.executable and not m.deleted}
        return list(self.pending)

    def age(self) -> float:
        """Seconds since the start of the command."""
        return time.monotonic() - self._started

    def arrived(self, probe: Probe) -> None:
        """``probe`` is in."""
        self.pending.remove(probe)

    def run(self) -> None:
        """Let the command run on, still traced, without looking for its mappings."""
        with native_errors(self.pid):
            self._tracer.resume(self.pid)

    def kill(self) -> None:
        """End the command, which has not run any code of its own yet."""
        with contextlib.suppress(TargetError), native_errors(self.pid):
            self._tracer.kill(self.pid)

    def _threads_can_be_told(self) -> bool:
        """Whether the first thread has its thread-local storage, from which stubs read the thread id."""
        if not self._ready:
            with native_errors(self.pid):
                threads = self._tracer.threads(self.pid)
            if threads and threads[0][3]:
                self._events_with_tls += 1
                known = Target.known_thread_id_offset(self._tracer, self.process) is not None
                self._ready = known or self._events_with_tls > _PATIENCE
        return self._ready
