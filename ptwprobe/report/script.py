"""The lines of ``ptwprobe script``. The formats are written in native code; here they get their words."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ptwprobe import _native
from ptwprobe.errors import UsageError
from ptwprobe.model import Totals
from ptwprobe.report.output import output_errors
from ptwprobe.report.progress import progress_bar
from ptwprobe.trace.native import input_errors
from ptwprobe.trace.open import Trace

FORMATS = ("text", "jsonl", "csv")
SHOWN = ("hits", "branches", "calls", "returns", "jumps", "syscalls", "interrupts", "trace", "events", "errors")
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


@dataclass(frozen=True)
class FlowView:
    """How control flow is shown. ``show``: words or letters as ``--only`` takes them, None for all; ``indent``:
    branches by the depth of calls; ``stack``: the calls that led to each hit.
    """

    show: str | None = None
    indent: bool = False
    stack: bool = False


def write(
    trace: Trace,
    fd: int,
    format: str = "text",
    events: Sequence[str] = (),
    tids: Sequence[int] = (),
    time: str | None = None,
    flow: FlowView | None = None,
    on_note: Callable[[str], None] = lambda text: None,
) -> Totals:
    """Writes the entries of ``trace`` to ``fd``, one a line, and returns what it wrote in numbers.

    ``format``: one of FORMATS; ``events``: globs (``*``, ``?``) over ``group/name``, or over the name alone; ``time``:
    as :func:`parse_time_range` takes it; ``flow``: branches too. What is lost or wrong is written with any ``events``.
    A reader that goes away (EPIPE) ends it quietly; other errors of ``fd`` are raised as OutputError.
    """
    start, end = parse_time_range(time) if time else (None, None)
    filters = (fd, format, list(events), list(tids), start, end)
    if flow is None:
        with input_errors(trace.path):
            writer = _native.ScriptWriter(os.fspath(trace.path), trace.native_events, *filters)
        _write_all(trace, writer, lambda: None)
        return Totals(*writer.totals())
    reader = trace.merged_reader()
    try:
        flow_writer = _native.FlowScript(reader, *filters, show=flow.show, indent=flow.indent, stack=flow.stack)
    except _native.NativeError as e:
        raise UsageError(
            f"--only {flow.show}: not known", f"{', '.join(SHOWN)}, or letters as of perf's --itrace"
        ) from e
    with progress_bar("following control flow", flow_writer.progress, fd) as tick:
        _write_all(trace, flow_writer, tick)
    for note in flow_writer.notes():
        on_note(note)
    if not flow_writer.branches():
        on_note(_no_flow(trace))
    return Totals(*flow_writer.totals())


def _no_flow(trace: Trace) -> str:
    how = f": it was recorded through channel {trace.session.channel}" if trace.session else ""
    return f"{trace.path}: no control flow in it{how}"


def _write_all(trace: Trace, writer: _native.ScriptWriter | _native.FlowScript, tick: Callable[[], None]) -> None:
    more = True
    try:
        while more:
            try:
                with input_errors(trace.path):
                    more = writer.read()
            finally:
                with output_errors():
                    writer.write()
            tick()
    except BrokenPipeError:
        pass
