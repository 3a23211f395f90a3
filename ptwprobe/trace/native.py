"""Errors of the native reader as those of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ptwprobe._native import NativeError
from ptwprobe.errors import InputError, PermissionDeniedError

_HINTS = {"no-trace": "record with ptwprobe, or with perf record -e intel_pt//"}


@contextmanager
def input_errors(path: Path) -> Iterator[None]:
    """What goes wrong with ``path`` inside becomes an InputError, or a PermissionDeniedError, that names it."""
    try:
        yield
    except NativeError as e:
        kind, message, offset = e.args
        place = "" if offset is None else f" (byte {offset})"
        raise InputError(f"{path}: {message}{place}", _HINTS.get(kind, "")) from e
    except PermissionError as e:
        raise PermissionDeniedError(
            f"{path}: {e.strerror}", "sessions are private to the user who recorded them"
        ) from e
    except OSError as e:
        raise InputError(f"{path}: {e.strerror or e}") from e
