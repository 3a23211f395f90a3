"""A live process as /proc shows it: its threads, mappings, namespaces and memory. Nothing here stops or changes it.

Sources: proc(5), proc_pid_maps(5), proc_pid_map_files(5). Every method reads anew; a process that has gone raises
:class:`TargetGoneError`, one that is not ours :class:`PermissionDeniedError`.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import psutil

from ptwprobe.errors import PermissionDeniedError, RefusalReason, RefusedError, TargetGoneError, UnsupportedError

_MAPS_LINE = re.compile(
    rb"([0-9a-f]+)-([0-9a-f]+) ([rwxps-]{4}) ([0-9a-f]+) ([0-9a-f]+):([0-9a-f]+) ([0-9]+) *(.*)", re.DOTALL
)
_DELETED = " (deleted)"
_CODE_NAME = re.compile(r"/memfd:ptwprobe-code:([0-9a-f]+):([0-9a-f]+):([0-9]+):(-?[0-9a-f]+):(.*)", re.DOTALL)
_MEMFD_NAME_BYTES = 249
"""Of a memfd's name at most, memfd_create(2)."""
_ELF_CLASS_64, _ELF_LITTLE, _EM_X86_64 = 2, 1, 62
_AT_ENTRY = 9
PERMISSION_HINT = "run as root, with CAP_SYS_PTRACE, or as the target's user where kernel.yama.ptrace_scope is 0"


@dataclass(frozen=True)
class Mapping:
    """One line of ``/proc/PID/maps``: runtime addresses ``[start, end)``, ``offset`` in bytes into the file.

    ``path`` is unescaped and without " (deleted)", as the target sees it (for a target in a mere chroot: as we see it);
    "" for anonymous memory, "[vdso]" and the like for what the kernel names. ``device`` is as ``os.makedev`` makes it.

    Code pages that ptwprobe has switched to a copy (``CodeRange``) show as the file's, with ``aside``: where the file's
    own pages are mapped meanwhile. The mapping there has ``is_aside`` and counts neither as a file's nor as code.
    """

    start: int
    end: int
    perms: str
    offset: int
    device: int
    inode: int
    path: str
    deleted: bool
    aside: Mapping | None = None
    is_aside: bool = False

    @property
    def executable(self) -> bool:
        return self.perms[2] == "x" and not self.is_aside

    @property
    def is_file(self) -> bool:
        return self.inode != 0 and self.path.startswith("/") and not self.is_aside


def parse_maps(text: bytes) -> tuple[Mapping, ...]:
    """The mappings in the text of a ``maps`` file; lines that are none are left out. Switched code is seen through."""
    out = []
    for line in text.split(b"\n"):
        found = _MAPS_LINE.fullmatch(line)
        if found is None:
            continue
        start, end, perms, offset, major, minor, inode, raw = found.groups()
        # The kernel escapes a newline in a path as \012, and nothing else.
        path = os.fsdecode(raw.replace(b"\\012", b"\n"))
        deleted = path.endswith(_DELETED)
        out.append(
            Mapping(
                int(start, 16),
                int(end, 16),
                perms.decode(),
                int(offset, 16),
                os.makedev(int(major, 16), int(minor, 16)),
                int(inode),
                path[: -len(_DELETED)] if deleted else path,
                deleted,
            )
        )
    return _see_through(out)


def code_name(mapping: Mapping, delta: int) -> str:
    """The name of a memfd that takes the place of code of ``mapping``, a file's, at the file's own offsets.

    ``delta``: from a page's own address to the one where the file's page is meanwhile.
    """
    device = f"{os.major(mapping.device):x}:{os.minor(mapping.device):x}"
    name = os.fsencode(f"ptwprobe-code:{device}:{mapping.inode}:{delta:x}:{mapping.path}")
    return os.fsdecode(name[:_MEMFD_NAME_BYTES])


def file_of_code(mapping: Mapping) -> tuple[int, int] | None:
    """(device, inode) of the file that a copy of code stands for, by its name; None for what is no such copy."""
    found = _CODE_NAME.fullmatch(mapping.path)
    return (os.makedev(int(found[1], 16), int(found[2], 16)), int(found[3])) if found else None


def _see_through(mappings: list[Mapping]) -> tuple[Mapping, ...]:
    """Show switched code as what it stands for, if the pages that its name tells of are there."""
    switched = [(i, m, found) for i, m in enumerate(mappings) if (found := _CODE_NAME.fullmatch(m.path))]
    if switched:
        starts = [m.start for m in mappings]
        for i, m, found in switched:
            major, minor, inode, delta = (int(found[n], base) for n, base in ((1, 16), (2, 16), (3, 10), (4, 16)))
            at = bisect_right(starts, m.start + delta) - 1
            aside = mappings[at]
            identity = (os.makedev(major, minor), inode, m.offset - (m.start + delta))
            if (
                at < 0
                or aside.end <= m.start + delta
                or identity != (aside.device, aside.inode, aside.offset - aside.start)
            ):
                continue
            if not aside.is_aside:
                mappings[at] = aside = replace(aside, is_aside=True)
            shown = replace(aside, start=m.start, end=m.end, perms=m.perms, offset=m.offset)
            mappings[i] = replace(shown, aside=aside, is_aside=False)
    return tuple(mappings)


class Process:
    """The process ``pid`` (in our PID namespace).

    Raises:
        TargetGoneError: there is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        try:
            self._psutil = psutil.Process(pid)
        except (psutil.NoSuchProcess, ValueError, OverflowError):
            raise self._gone() from None
        except psutil.AccessDenied:
            raise self._denied("its status") from None

    def __repr__(self) -> str:
        return f"Process({self.pid})"

    # ------------------------------------------------------------ who it is

    @property
    def exists(self) -> bool:
        """Whether the very process of the constructor runs: not a zombie, not a reused pid."""
        try:
            return self._psutil.is_running() and self._psutil.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    @property
    def comm(self) -> str:
        """Name of the main thread, as the kernel keeps it (15 bytes)."""
        return self._text("comm").rstrip("\n")

    @property
    def exe(self) -> str:
        """Path of the program as the target sees it, without " (deleted)"."""
        with self._guard("exe"):
            path = str(self._proc("exe").readlink())
        return path.removesuffix(_DELETED)

    @property
    def cmdline(self) -> list[str]:
        words = self._text("cmdline").split("\0")
        return words[:-1] if words and not words[-1] else words

    @property
    def start_time(self) -> int:
        """When it started, in clock ticks since boot: with the pid, an identity that is never reused."""
        # Field 22; counted from the last ')' because comm may hold anything.
        return int(self._text("stat").rpartition(")")[2].split()[19])

    # ------------------------------------------------------------ threads

    def threads(self) -> list[int]:
        """The thread ids, main thread first, others in order."""
        with self._guard("task"):
            tids = sorted(int(entry.name) for entry in self._proc("task").iterdir())
        if not tids:
            raise self._gone()
        return tids

    def thread_name(self, tid: int) -> str:
        """``comm`` of a thread; "" once it has ended."""
        try:
            return self._text(f"task/{tid}/comm").rstrip("\n")
        except TargetGoneError:
            return ""

    def namespace_tid(self, tid: int) -> int:
        """The thread id that the thread itself sees (innermost PID namespace)."""
        return int(self._status_field("NSpid", f"task/{tid}/status").split()[-1])

    # ------------------------------------------------------------ memory

    def maps(self) -> tuple[Mapping, ...]:
        """All mappings, in address order. Empty for a zombie or a kernel thread."""
        return parse_maps(self._bytes("maps"))

    def wiped_on_fork(self) -> list[tuple[int, int]]:
        """[start, end) of the private anonymous memory that fork children find empty (MADV_WIPEONFORK)."""
        out = []
        start, end = 0, 0
        for line in self._bytes("smaps").split(b"\n"):
            if line.startswith(b"VmFlags:"):
                if b"wf" in line.split()[1:]:
                    out.append((start, end))
            elif found := _MAPS_LINE.fullmatch(line):
                start, end = int(found[1], 16), int(found[2], 16)
        return out

    @property
    def has_locked_memory(self) -> bool:
        """Whether any of its memory is locked, so that it is never paged out (mlock(2))."""
        return self._status_field("VmLck", "status").partition(" ")[0] not in ("", "0")

    def locked_mappings(self) -> set[int]:
        """Where the locked mappings start. Slow: the kernel looks at every page for it."""
        locked, start = set(), 0
        for line in self._text("smaps").splitlines():
            word, _, rest = line.partition(" ")
            if word == "VmFlags:" and "lo" in rest.split():
                locked.add(start)
            elif "-" in word and not word.endswith(":"):
                start = int(word.partition("-")[0], 16)
        return locked

    def mapped_path(self, mapping: Mapping) -> str:
        """A path by which we can open the very file of ``mapping``, deleted or in another mount namespace or not.

        Raises:
            RefusedError: IDENTITY_CHANGED, another file is at that path now and the mapped one cannot be reached.
            PermissionDeniedError: it can be reached with more rights only.
        """
        source = mapping.aside or mapping
        exact = self._proc(f"map_files/{source.start:x}-{source.end:x}")
        if _readable_file(exact):
            return str(exact)
        # A target in its own mount namespace shows its own paths, one in a mere chroot ours.
        by_name = [self.root_path(mapping.path), mapping.path]
        for path in by_name:
            if _leads_to(Path(path), mapping):
                return path
        # Without the right to follow map_files, exe still leads to the program itself.
        program = self._proc("exe")
        if _leads_to(program, mapping):
            return str(program)
        if not self.exists:
            raise self._gone()
        if not mapping.deleted and any(Path(path).exists() for path in by_name):
            raise RefusedError(
                RefusalReason.IDENTITY_CHANGED,
                f"process {self.pid}: {mapping.path} is not the file that is mapped (inode {mapping.inode})",
                "restart the target, or run with CAP_CHECKPOINT_RESTORE to reach the mapped file",
            )
        raise PermissionDeniedError(
            f"process {self.pid}: the mapped file {mapping.path} cannot be opened"
            + (", it was deleted" if mapping.deleted else ""),
            "run as root, or with CAP_CHECKPOINT_RESTORE, to reach it through /proc/PID/map_files",
        )

    def open_mapped(self, mapping: Mapping) -> BinaryIO:
        """The very file of ``mapping``, open for reading; errors as :meth:`mapped_path`."""
        path = self.mapped_path(mapping)
        with self._guard(f"the mapped file {mapping.path}"):
            return Path(path).open("rb")

    def root_path(self, path: str) -> str:
        """``path`` (absolute, as the target sees it) as a path for us."""
        return f"{self._proc('root')}/{path.lstrip('/')}"

    def read(self, addr: int, size: int) -> bytes:
        """``size`` bytes at runtime address ``addr``.

        Raises:
            PermissionDeniedError: the memory is not ours to read, or not mapped.
        """
        data = self.read_some(addr, size)
        if len(data) == size:
            return data
        raise PermissionDeniedError(
            f"process {self.pid}: the {size} bytes at {addr:#x} are not readable", "they have to be mapped"
        )

    def read_some(self, addr: int, size: int) -> bytes:
        """Same, up to the first page that cannot be read: it is not mapped, or behind the end of the mapped file.

        Raises:
            PermissionDeniedError: the memory is not ours to read.
        """
        with self._guard(f"the memory at {addr:#x}"):
            fd = os.open(self._proc("mem"), os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.pread(fd, size, addr)
        except (OSError, OverflowError):
            data = b""
        finally:
            os.close(fd)
        if len(data) < size and not self.exists:
            raise self._gone()
        return data

    def entry_point(self) -> int:
        """Runtime address of the program's entry (AT_ENTRY); 0 where it is not told."""
        for kind, value in struct.iter_unpack("<QQ", self._auxv()):
            if kind == _AT_ENTRY:
                return int(value)
        return 0

    def _auxv(self) -> bytes:
        data = self._bytes("auxv")
        return data[: len(data) & ~15]

    # ------------------------------------------------------------ what may be done to it

    def check_architecture(self) -> None:
        """Raises:
        UnsupportedError: it is not a 64-bit x86 program.
        """
        try:
            with self._guard("exe"):
                fd = os.open(self._proc("exe"), os.O_RDONLY | os.O_CLOEXEC)
        except TargetGoneError:
            if not self._proc("stat").exists():
                raise
            what = "is a kernel thread: it has no program" if self.exists else "has ended and waits for its parent"
            raise UnsupportedError(f"process {self.pid} {what}", "give the pid of a running program") from None
        with os.fdopen(fd, "rb") as file:
            header = file.read(20)
        if len(header) < 20 or header[:4] != b"\x7fELF":
            raise UnsupportedError(f"process {self.pid}: its program is no ELF file", "ptwprobe probes ELF programs")
        machine = struct.unpack_from("<H", header, 18)[0]
        if header[4] != _ELF_CLASS_64:
            # x32 programs have this class too, and their pointers do not fit our stubs either.
            raise UnsupportedError(f"process {self.pid} is a 32-bit program", "only 64-bit x86 programs can be probed")
        if header[5] != _ELF_LITTLE or machine != _EM_X86_64:
            raise UnsupportedError(f"process {self.pid} is no x86 program (ELF machine {machine})", "x86-64 is needed")

    @property
    def seccomp_mode(self) -> int:
        """0 none, 1 strict, 2 filter: the strictest of all threads."""
        modes = [0]
        for tid in self.threads():
            try:
                modes.append(int(self._status_field("Seccomp", f"task/{tid}/status") or 0))
            except TargetGoneError:
                continue  # this thread ended meanwhile
        return max(modes)

    @property
    def is_traced_by(self) -> int:
        """Pid of the ptrace tracer of any of its threads (a debugger, say), 0 if there is none."""
        for tid in self.threads():
            try:
                tracer = int(self._status_field("TracerPid", f"task/{tid}/status") or 0)
            except TargetGoneError:
                continue
            if tracer:
                return tracer
        return 0

    @property
    def in_same_pid_namespace(self) -> bool:
        with self._guard("ns/pid"):
            return self._proc("ns/pid").stat().st_ino == Path("/proc/self/ns/pid").stat().st_ino

    @property
    def rlimit_stack(self) -> int | None:
        """Soft limit of the main thread's stack in bytes, None for unlimited."""
        for line in self._text("limits").splitlines():
            if line.startswith("Max stack size"):
                soft = line.split()[3]
                return None if soft == "unlimited" else int(soft)
        return None

    # ------------------------------------------------------------ reading /proc

    def _proc(self, name: str) -> Path:
        return Path(f"/proc/{self.pid}/{name}")

    def _bytes(self, name: str) -> bytes:
        with self._guard(name):
            return self._proc(name).read_bytes()

    def _text(self, name: str) -> str:
        return os.fsdecode(self._bytes(name))

    def _status_field(self, field: str, name: str) -> str:
        for line in self._text(name).splitlines():
            if line.startswith(f"{field}:"):
                return line.partition(":")[2].strip()
        return ""

    @contextmanager
    def _guard(self, what: str) -> Iterator[None]:
        """Turns errors of /proc into ours."""
        try:
            yield
        except (FileNotFoundError, ProcessLookupError):
            if what == "exe" and self.exists:
                raise UnsupportedError(
                    f"process {self.pid} runs no program of its own", "kernel threads have no code to probe"
                ) from None
            raise self._gone() from None
        except PermissionError:
            raise self._denied(what) from None

    def _gone(self) -> TargetGoneError:
        return TargetGoneError(f"process {self.pid} does not exist (any more)", "look up its pid again")

    def _denied(self, what: str) -> PermissionDeniedError:
        return PermissionDeniedError(f"process {self.pid}: no permission to read {what}", PERMISSION_HINT)


def process_of_thread(tid: int) -> int:
    """The process (thread group) that the thread ``tid`` belongs to. Raises TargetGoneError."""
    try:
        status = Path(f"/proc/{tid}/status").read_text()
    except OSError:
        raise TargetGoneError(f"thread {tid} does not exist (any more)", "look up its tid again") from None
    return int(status.partition("Tgid:")[2].split()[0])


def _readable_file(path: Path) -> bool:
    """Whether ``path`` leads to a regular file that we may read (a FIFO or device is never opened)."""
    try:
        return stat.S_ISREG(path.stat().st_mode) and os.access(path, os.R_OK)
    except OSError:
        return False


def _leads_to(path: Path, mapping: Mapping) -> bool:
    try:
        found = path.stat()
    except (OSError, ValueError):
        return False
    # btrfs and overlayfs tell stat() another device than they show in maps, one without a major number.
    same_device = found.st_dev == mapping.device or os.major(found.st_dev) == os.major(mapping.device) == 0
    return same_device and found.st_ino == mapping.inode
