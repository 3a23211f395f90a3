"""The session folder ``NAME.ptw/``: private to the user, made without following links, never over foreign files.

Only the folder and ``session.json``; what stands in it is ``record.metadata``, and perf.data is the recorder's.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from ptwprobe.errors import InputError, PermissionDeniedError, PtwprobeError, UsageError

SUFFIX = ".ptw"
OLD_SUFFIX = ".old"
DOCUMENT = "session.json"
PERF_DATA = "perf.data"
_NEW_DOCUMENT = f"{DOCUMENT}.new"
_FILES = frozenset({PERF_DATA, DOCUMENT, _NEW_DOCUMENT})
"""All that a session leaves in its folder, also one whose recorder was killed."""

RESERVE_BYTES = 256 << 10
"""Kept back on the disk, so that the end of a session can still be told when recording has filled it."""


class SessionFolder:
    """A folder that was made for one session.

    Files in it are made by way of ``dir_fd``, wherever its name may lead by now.
    """

    def __init__(self, path: Path, dir_fd: int) -> None:
        self.path = path
        self._dir_fd = dir_fd
        self._reserve_fd = _reserve(dir_fd)

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> SessionFolder:
        """Make ``path`` (mode 0700). An earlier session there is kept as ``path.old``, replacing the one before.

        Errors: UsageError if something else has the name, PermissionDeniedError, InputError for the rest.
        """
        path = Path(path)
        if path.name in ("", ".."):
            raise UsageError(f"{path} is no name for a session folder", "name a folder with -o, such as -o NAME.ptw")
        try:
            if _move_old_session(path):
                path.mkdir(mode=0o700)
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise _explain(path, error) from error
        try:
            _check_ours(path, fd)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd)

    @property
    def perf_data(self) -> Path:
        """Where the recorder makes its file: through the folder's descriptor, so that no link can lead elsewhere."""
        return Path(f"/proc/self/fd/{self._dir_fd}") / PERF_DATA

    def write_document(self, document: Mapping[str, object]) -> None:
        """Replace session.json at once: a reader sees the old one or the new one, whole."""
        text = json.dumps(document, indent=1).encode() + b"\n"
        try:
            self._replace_document(text)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or self._reserve_fd is None:
                raise _explain(self.path / DOCUMENT, error) from error
            os.close(self._reserve_fd)
            self._reserve_fd = None
            self._replace_document(text)

    def remove(self) -> None:
        """Take back a session that never began: only the files that were made here."""
        for name in _FILES:
            _unlink(self._dir_fd, name)
        self.close()
        self.path.rmdir()

    def close(self) -> None:
        """Let the descriptors go. May be called again."""
        for fd in (self._dir_fd, self._reserve_fd):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._dir_fd, self._reserve_fd = -1, None

    def __del__(self) -> None:
        self.close()

    def _replace_document(self, content: bytes) -> None:
        temporary = _NEW_DOCUMENT
        _unlink(self._dir_fd, temporary)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600, dir_fd=self._dir_fd)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(content)
            os.replace(temporary, DOCUMENT, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
        except OSError:
            _unlink(self._dir_fd, temporary)
            raise


def _move_old_session(path: Path) -> bool:
    """Clear the name for a new session. True if the folder is to be made, False if an empty one of ours is there."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return True
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise UsageError(f"{path} exists and is no session of yours", "choose another name with -o")
    if not _names(path):
        path.chmod(0o700)
        return False
    if not _is_session(path):
        raise UsageError(f"{path} exists and is no session folder", "choose another name with -o")
    old = path.with_name(path.name + OLD_SUFFIX)
    if (old.is_symlink() or old.exists()) and not _remove_session(old):
        raise UsageError(f"{old} is in the way of keeping the earlier session {path}", "move one of them away")
    path.rename(old)
    return True


def _is_session(path: Path) -> bool:
    """A folder of ours that holds what a session leaves, whatever else somebody put there."""
    return bool(_names(path) & _FILES)


def _remove_session(path: Path) -> bool:
    """Remove a folder of ours in which there is nothing but files that a session leaves; else touch nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            return False
        raise
    try:
        if not _only_session_files(fd):
            return False
        for name in _FILES:
            _unlink(fd, name)
    finally:
        os.close(fd)
    path.rmdir()
    return True


def _only_session_files(fd: int) -> bool:
    """Whether the open folder is ours and has no files but those of a session; it may be empty."""
    names = os.listdir(fd)
    if os.fstat(fd).st_uid != os.geteuid() or not _FILES.issuperset(names):
        return False
    return all(stat.S_ISREG(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode) for name in names)


def _names(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def _check_ours(path: Path, fd: int) -> None:
    """What was opened is what was made: nobody else's, for nobody else to write to, and empty."""
    status = os.fstat(fd)
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or os.listdir(fd):
        raise UsageError(f"{path} was changed while it was made", "choose a folder that only you can write to")


def _reserve(dir_fd: int) -> int | None:
    """An unnamed file of ``RESERVE_BYTES`` on the folder's disk; None where the file system has no such thing."""
    try:
        fd = os.open(".", os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    except OSError:
        return None
    try:
        os.posix_fallocate(fd, 0, RESERVE_BYTES)
    except OSError:
        os.close(fd)
        return None
    return fd


def _unlink(dir_fd: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=dir_fd)
    except FileNotFoundError:
        return


def _explain(path: Path, error: OSError) -> PtwprobeError:
    text = f"{path}: {error.strerror}"
    if isinstance(error, PermissionError):
        return PermissionDeniedError(text, "choose a place that you may write to with -o")
    return InputError(text, "choose another place with -o")
