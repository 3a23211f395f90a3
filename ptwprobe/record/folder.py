"""The session folder ``NAME.ptw/``: private to the user, made without following links, never over foreign files.

Only the folder, ``session.json`` and how files come into ``images/``; what stands in them is ``record.metadata``'s and
``record.images``', and perf.data is the recorder's.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from ptwprobe.errors import InputError, PermissionDeniedError, PtwprobeError, UsageError

SUFFIX = ".ptw"
OLD_SUFFIX = ".old"
DOCUMENT = "session.json"
PERF_DATA = "perf.data"
IMAGES = "images"
_NEW_DOCUMENT = f"{DOCUMENT}.new"
_FILES = frozenset({PERF_DATA, DOCUMENT, _NEW_DOCUMENT})
"""All that a session leaves in its folder, also one whose recorder was killed; and the folder ``IMAGES``."""

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

RESERVE_BYTES = 256 << 10
"""Kept back on the disk, so that the end of a session can still be told when recording has filled it."""


class SessionFolder:
    """A folder that was made for one session.

    Files in it are made by way of ``dir_fd``, wherever its name may lead by now.
    """

    def __init__(self, path: Path, dir_fd: int) -> None:
        self.path = path
        self._dir_fd = dir_fd
        self._real_path = os.readlink(f"/proc/self/fd/{dir_fd}")  # noqa: PTH115
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
            fd = os.open(path, _FOLDER_FLAGS)
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

    @property
    def images(self) -> Path:
        """Where ``write_image`` puts its files, as perf.data names them: an absolute path."""
        return Path(self._real_path) / IMAGES

    def write_image(self, name: str, content: bytes) -> None:
        """Make the new file ``name`` in ``images/``; nothing with half of its content stays."""
        with contextlib.suppress(FileExistsError):
            os.mkdir(IMAGES, 0o700, dir_fd=self._dir_fd)
        folder = os.open(IMAGES, _FOLDER_FLAGS, dir_fd=self._dir_fd)
        try:
            _write_new(folder, name, content)
        except OSError as error:
            raise _explain(self.path / IMAGES / name, error) from error
        finally:
            os.close(folder)

    def remove(self) -> None:
        """Take back a session that never began: only the files that were made here."""
        _remove_images(self._dir_fd)
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
        _write_new(self._dir_fd, temporary, content)
        try:
            os.replace(temporary, DOCUMENT, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
        except OSError:
            _unlink(self._dir_fd, temporary)
            raise


def _write_new(dir_fd: int, name: str, content: bytes) -> None:
    """Make the file, or none."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=dir_fd)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
    except OSError:
        _unlink(dir_fd, name)
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
        fd = os.open(path, _FOLDER_FLAGS)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            return False
        raise
    try:
        if not _only_session_files(fd):
            return False
        _remove_images(fd)
        for name in _FILES:
            _unlink(fd, name)
    finally:
        os.close(fd)
    path.rmdir()
    return True


def _only_session_files(fd: int) -> bool:
    """Whether the open folder is ours and has no files but those of a session; it may be empty."""
    names = set(_names_in(fd))
    if os.fstat(fd).st_uid != os.geteuid() or not names <= _FILES | {IMAGES}:
        return False
    if IMAGES in names:
        try:
            images = os.open(IMAGES, _FOLDER_FLAGS, dir_fd=fd)
        except OSError:
            return False
        try:
            if os.fstat(images).st_uid != os.geteuid() or not _all_files(images, _names_in(images)):
                return False
        finally:
            os.close(images)
    return _all_files(fd, names - {IMAGES})


def _all_files(fd: int, names: Iterable[str]) -> bool:
    return all(stat.S_ISREG(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode) for name in names)


def _remove_images(dir_fd: int) -> None:
    """Remove the folder of images, of which ``_only_session_files`` is true."""
    try:
        images = os.open(IMAGES, _FOLDER_FLAGS, dir_fd=dir_fd)
    except FileNotFoundError:
        return
    try:
        for name in _names_in(images):
            _unlink(images, name)
    finally:
        os.close(images)
    os.rmdir(IMAGES, dir_fd=dir_fd)


def _names_in(dir_fd: int) -> list[str]:
    return os.listdir(dir_fd)


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
