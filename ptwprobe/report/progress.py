"""How far long work is, for somebody who waits at a terminal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.console
import rich.progress

_AFTER = 1.0
"""Seconds before anything is shown."""


@contextmanager
def progress_bar(text: str, progress: Callable[[], tuple[int, int]], fd: int) -> Iterator[Callable[[], None]]:
    """Yields what is to be called now and then; ``progress`` tells (done, all) in bytes.

    Shown on stderr if that is a terminal and the output ``fd`` is none: lines there are progress enough.
    """
    console = rich.console.Console(stderr=True)
    if not console.is_terminal or os.isatty(fd):
        yield lambda: None
        return
    columns = (
        *(rich.progress.TextColumn("{task.description}"), rich.progress.BarColumn()),
        *(rich.progress.DownloadColumn(), rich.progress.TimeRemainingColumn()),
    )
    begun = time.monotonic()
    with rich.progress.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(text, total=None, visible=False)

        def tick() -> None:
            done, total = progress()
            bar.update(task, completed=done, total=total, visible=time.monotonic() - begun > _AFTER)

        yield tick
