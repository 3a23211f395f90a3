"""The lines of ``ptwprobe script``. The formats are written in native code; here they get their words."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ptwprobe import _native
from ptwprobe.errors import UsageError
from ptwprobe.model import Totals
from ptwprobe.report.output import output_errors
from ptwprobe.trace.native import input_errors
from ptwprobe.trace.open import Trace

FORMATS = ("text", "jsonl", "csv")
_TIME = re.compile(r"(\d+)(?:\.(\d*))?", re.ASCII)
_MAX_NS = (1 << 64) - 1


def parse_time_range(text: str) -> tuple[int | None, int | None]:
    """``A,B`` in ns, each end included; an end with a dot is in seconds, an empty one is open."""
    start, comma, end = text.partition(",")
    if not comma:
        raise UsageError(f"--time {text}: not two times", "write A,B, A, or ,B: ns, or seconds with a dot")
    return _parse_time(start, text), _parse_time(end, text)


def _parse_time(part: str, text: str) -> int | None:
    part = part.strip()
    if not part:
        return None
    match = _TIME.fullmatch(part)
    if match is None:
        raise UsageError(f"--time {text}: {part!r} is no time", "ns as an integer, or seconds with a dot")
    whole, fraction = match.groups()
    ns = int(whole) if fraction is None else int(whole) * 10**9 + int(fraction[:9].ljust(9, "0"))
    return min(ns, _MAX_NS)


def write(
    trace: Trace,
    fd: int,
    format: str = "text",
    events: Sequence[str] = (),
    tids: Sequence[int] = (),
    time: str | None = None,
) -> Totals:
    """Writes the entries of ``trace`` to ``fd``, one a line, and returns what it wrote in numbers.

    ``format``: one of FORMATS; ``events``: globs (``*``, ``?``) over ``group/name``, or over the name alone; ``time``:
    as :func:`parse_time_range` takes it. What is lost or wrong is written with any ``events``. A reader that goes away
    (EPIPE) ends it quietly; other errors of ``fd`` are raised as OutputError.
    """
    start, end = parse_time_range(time) if time else (None, None)
    with input_errors(trace.path):
        writer = _native.ScriptWriter(
            os.fspath(trace.path), trace.native_events, fd, format, list(events), list(tids), start, end
        )
    more = True
    try:
        while more:
            try:
                with input_errors(trace.path):
                    more = writer.read()
            finally:
                with output_errors():
                    writer.write()
    except BrokenPipeError:
        pass
    return Totals(*writer.totals())
