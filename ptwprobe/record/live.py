"""A target while it is recorded: has it ended, is its address space still the one that was patched."""

from __future__ import annotations

import os
import select
from pathlib import Path

from ptwprobe.errors import TargetGoneError
from ptwprobe.record.instrument import Instrumented


class Live:
    """Watches one instrumented process without stopping it."""

    def __init__(self, instrumented: Instrumented) -> None:
        self.instrumented = instrumented
        self.pid = instrumented.process.pid
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError as error:
            raise TargetGoneError(f"process {self.pid} is gone") from error
        try:
            self._memory_fd = os.open(f"/proc/{self.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            os.close(self.pidfd)
            raise TargetGoneError(f"process {self.pid} is gone") from error

    def exited(self) -> bool:
        """Whether the process has ended (all of its threads)."""
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def replaced(self) -> bool:
        """Whether another program runs in the process (exec): the address space that was patched is gone.

        A read from an address space that is gone gives nothing at all. A process that is about to end has none any
        more, either; it then has no program.
        """
        try:
            # Where there is an address space, a read at 0 is an error or gives a byte.
            gone = os.pread(self._memory_fd, 1, 0) == b""
            return gone and Path(f"/proc/{self.pid}/exe").readlink() is not None
        except OSError:
            return False

    def close(self) -> None:
        """Stop watching."""
        os.close(self.pidfd)
        os.close(self._memory_fd)
