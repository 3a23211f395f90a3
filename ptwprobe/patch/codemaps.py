"""One code map per file and process of ours: reading one takes tens of milliseconds, asking it microseconds."""

from __future__ import annotations

from threading import Lock

from ptwprobe._native import CodeMap, NativeError
from ptwprobe.errors import InputError
from ptwprobe.model import ObjectFile

_LIMIT = 256
"""Files that are remembered; a map takes about as much memory as the file's code."""

_maps: dict[tuple[str, int, int], CodeMap] = {}
_lock = Lock()


def code_map(file: ObjectFile) -> CodeMap:
    """The code map of ``file``, from the cache if the same file was asked for before.

    Raises InputError where it is not an ELF file that can be read.
    """
    key = (file.build_id, file.device, file.inode)
    with _lock:
        if found := _maps.get(key):
            return found
    try:
        read = CodeMap(file.open_path)
    except NativeError as error:
        kind, message, offset = error.args
        place = "" if offset is None else f" at file offset {offset:#x}"
        if kind == "io":
            raise InputError(f"cannot read {file.path}: {message}", "is the file still there and readable?") from error
        raise InputError(f"{file.path}{place}: {message}", "only whole x86-64 ELF files can be probed") from error
    with _lock:
        while len(_maps) >= _LIMIT:
            _maps.pop(next(iter(_maps)))
        return _maps.setdefault(key, read)
