"""Other tools, run beside ours on the same programs.

Each module has a class with ``name``; ``missing()``, which says why it cannot run here, or ""; and ``attached(target,
binary, functions)``, a context manager inside which the functions of the running target are probed with their first
two arguments, and which gives a function that tells the hits so far.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from tests.symbols import function, memory, runtime_address
from tests.targets import Target

# How many hits there were, or None where nothing can count them.
Hits = Callable[[], "int | None"]


class Peer(Protocol):
    @property
    def name(self) -> str: ...

    def missing(self) -> str: ...

    def attached(self, target: Target, binary: Path, functions: list[str]) -> AbstractContextManager[Hits]: ...


def change_of(target: Target, binary: Path, functions: list[str]) -> Callable[[], None]:
    """Remembers the first byte of every function; the function that it gives waits until all of them have changed.

    Tools tell in many ways, and often too early, that they have attached; the target's code tells the truth.
    """
    sites = [runtime_address(target.pid, binary, function(binary, name)[0]) for name in functions]
    before = [memory(target.pid, site, 1) for site in sites]

    def wait(seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while any(memory(target.pid, site, 1) == byte for site, byte in zip(sites, before, strict=True)):
            if time.monotonic() > end:
                raise TimeoutError(f"{', '.join(functions)}: not all are probed after {seconds} s")
            time.sleep(0.01)

    return wait
