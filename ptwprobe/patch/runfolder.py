"""The folder in which ptwprobe remembers what it is doing to processes, and one lock for each of them.

Responsible for files that are ours alone, replaced whole and found again after any death, and for locks that end with
their holder. What the files say is in ``patch.journal``.

A lock is a ``flock`` on a file of its own. The tracing task shares our descriptors, so it is held until that task has
ended, too, which is after it has restored the targets of a recorder that was killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from ptwprobe.errors import InputError, PermissionDeniedError

LOCK_SUFFIX = ".lock"
_NEW_SUFFIX = ".new"
_HALF_WRITTEN_SECONDS = 60.0
"""A file that is written takes its name within far less, unless its writer died."""
_MOST_BYTES = 64 << 20
"""Of a file that is read back; 2,000 probes take half a megabyte."""
_held: set[int] = set()
"""Descriptors of all locks of this process."""


def _let_go_after_fork() -> None:
    """A child of ours has the locks' descriptors, too, and may outlive us: it must not hold our locks."""
    for fd in list(_held):
        os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_after_fork)


@dataclass(frozen=True)
class Holder:
    """Who has a lock: ``pid`` 0 where it is not told."""

    pid: int


class Lock:
    """A lock that is held until ``release``, or until this process and its tracing task are gone."""

    def __init__(self, folder: RunFolder, name: str, fd: int) -> None:
        self._folder = folder
        self._name = name
        self._fd = fd
        _held.add(fd)

    def release(self) -> None:
        """May be called again. The file goes first, so that nobody finds one that nobody holds."""
        if self._fd in _held:
            with contextlib.suppress(OSError):
                os.unlink(self._name, dir_fd=self._folder.dir_fd)
            _held.discard(self._fd)
            os.close(self._fd)
        self._fd = -1

    def __del__(self) -> None:
        self.release()


class RunFolder:
    """An open folder that belongs to us and that nobody else can write to."""

    def __init__(self, path: Path, dir_fd: int) -> None:
        self.path = path
        self.dir_fd = dir_fd

    def __del__(self) -> None:
        os.close(self.dir_fd)

    @classmethod
    def open(cls, path: Path, create: bool) -> RunFolder:
        """Raises OSError (FileNotFoundError where it is not there and not to be made), PermissionDeniedError."""
        if create:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        status = os.fstat(fd)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            os.close(fd)
            owner = "others can write to it" if status.st_uid == os.geteuid() else f"it belongs to uid {status.st_uid}"
            raise PermissionDeniedError(f"{path} cannot be trusted: {owner}", f"remove {path}")
        return cls(path, fd)

    def names(self, suffix: str) -> list[str]:
        """The files whose names end so, without that end."""
        with os.scandir(self.dir_fd) as items:
            return sorted(item.name.removesuffix(suffix) for item in items if item.name.endswith(suffix))

    def read(self, name: str) -> bytes:
        """A file's content. Raises FileNotFoundError; InputError for what is no file of ours."""
        with os.fdopen(self._open(name, os.O_RDONLY), "rb") as file:
            return file.read(_MOST_BYTES)

    def write(self, name: str, content: bytes) -> None:
        """Replace a file at once, and on disk before this returns. Raises OSError."""
        temporary = name + _NEW_SUFFIX
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=self.dir_fd)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=self.dir_fd), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, name, src_dir_fd=self.dir_fd, dst_dir_fd=self.dir_fd)
        os.fsync(self.dir_fd)

    def try_writing(self) -> None:
        """Raises OSError: on a full or read-only file system the folder itself may be there all the same."""
        name = f"{os.getpid()}{_NEW_SUFFIX}"
        self.remove(name)
        fd = os.open(
            name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.dir_fd
        )
        try:
            os.write(fd, b"?")
        finally:
            os.close(fd)
            self.remove(name)

    def remove(self, name: str) -> None:
        """Also what somebody left of it who died while writing."""
        for file in (name, name + _NEW_SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file, dir_fd=self.dir_fd)

    def remove_half_written(self) -> None:
        """What was left by somebody who died while writing."""
        for name in self.names(_NEW_SUFFIX):
            with contextlib.suppress(OSError):
                status = os.stat(name + _NEW_SUFFIX, dir_fd=self.dir_fd, follow_symlinks=False)
                if time.time() - status.st_mtime > _HALF_WRITTEN_SECONDS:
                    self.remove(name + _NEW_SUFFIX)

    def lock(self, key: str) -> Lock | Holder:
        """The lock ``key``, or who has it now; never waits. Raises OSError, InputError."""
        name = key + LOCK_SUFFIX
        while True:
            fd = self._open(name, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_still(name, fd):
                    os.ftruncate(fd, 0)
                    os.write(fd, json.dumps({"pid": os.getpid()}).encode())
                    return Lock(self, name, fd)
            except BlockingIOError:
                holder = Holder(_pid_in(os.pread(fd, 4096, 0)))
                os.close(fd)
                return holder
            except BaseException:
                os.close(fd)
                raise
            # Its holder removed it between our opening and locking it.
            os.close(fd)

    def holder(self, key: str) -> Holder | None:
        """Who has the lock ``key``, without taking it for longer than that takes to see."""
        try:
            fd = self._open(key + LOCK_SUFFIX, os.O_RDONLY)
        except (OSError, InputError):
            return None
        try:
            # A shared lock, so that two who look do not take each other for a holder.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return Holder(_pid_in(os.pread(fd, 4096, 0)))
        except OSError:
            return None
        finally:
            os.close(fd)
        return None

    def _is_still(self, name: str, fd: int) -> bool:
        try:
            found = os.stat(name, dir_fd=self.dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(fd))

    def _open(self, name: str, flags: int) -> int:
        """Open a file that is nobody's but ours, never a link, a FIFO or a device."""
        try:
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(name, flags, 0o600, dir_fd=self.dir_fd)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
                raise
            raise InputError(f"{self.path / name}: {error.strerror}", "remove it") from error
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            os.close(fd)
            raise InputError(f"{self.path / name} is not a file that ptwprobe made", "remove it")
        return fd


def _pid_in(content: bytes) -> int:
    try:
        found = json.loads(content)["pid"]
    except (ValueError, KeyError, TypeError):
        return 0
    return found if isinstance(found, int) else 0


def candidates() -> list[Path]:
    """Where the folder may be for this user, best first."""
    uid = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    found = [Path("/run/ptwprobe")] if uid == 0 else []
    if uid != 0 and runtime.startswith("/"):
        found.append(Path(runtime) / "ptwprobe")
    return [*found, Path(f"/tmp/ptwprobe-{uid}")]


def writable() -> RunFolder:
    """The folder for a new journal. Raises PermissionDeniedError where no candidate will do."""
    problems = []
    for path in candidates():
        try:
            folder = RunFolder.open(path, create=True)
            folder.try_writing()
            return folder
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
        except PermissionDeniedError as error:
            problems.append(error.message)
    raise PermissionDeniedError(
        f"no place for the journal from which targets are restored after a crash ({'; '.join(problems)})",
        "make one of these folders usable: owned by you, mode 0700",
    )


def existing() -> list[RunFolder]:
    """The folders that are there and can be trusted."""
    found = []
    for path in candidates():
        with contextlib.suppress(OSError, PermissionDeniedError):
            found.append(RunFolder.open(path, create=False))
    return found
