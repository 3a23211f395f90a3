"""Where lines go: what is wrong with it is an error of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ptwprobe.errors import OutputError


@contextmanager
def output_errors() -> Iterator[None]:
    """OSError inside becomes OutputError; a reader that went away stays BrokenPipeError."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as e:
        raise OutputError(f"cannot write the output: {e.strerror or e}") from e
