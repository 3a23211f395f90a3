"""The lines of ``ptwprobe dump``: every packet with its offset in its chunk of trace."""

from __future__ import annotations

import os

from ptwprobe import _native
from ptwprobe.report.output import output_errors
from ptwprobe.trace.native import input_errors
from ptwprobe.trace.open import Trace


def write(trace: Trace, fd: int) -> int:
    """Writes every packet of ``trace`` to ``fd`` and returns how many errors there were: each is a line with "error".

    A reader that goes away (EPIPE) ends it quietly; other errors of ``fd`` are raised as OutputError.
    """
    with input_errors(trace.path):
        dump = _native.PacketDump(os.fspath(trace.path))
    while True:
        with input_errors(trace.path):
            lines = dump.next_lines()
        if not lines:
            return dump.errors()
        rest = lines.encode()
        try:
            with output_errors():
                while rest:
                    rest = rest[os.write(fd, rest) :]
        except BrokenPipeError:
            return dump.errors()
