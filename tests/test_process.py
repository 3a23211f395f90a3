"""A live process as /proc shows it."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ptwprobe.errors import PermissionDeniedError, RefusalReason, RefusedError, TargetGoneError, UnsupportedError
from ptwprobe.process import Mapping, Process, code_name, parse_maps
from tests.elf_builds import WAIT, Start, compiled


@pytest.fixture
def waiting(tmp_path: Path) -> Path:
    return compiled(tmp_path / "waiting", WAIT + "int main(void) { ready(); return 0; }")


def test_who_it_is(waiting: Path, start: Start) -> None:
    child = start(waiting, "one", "two words", "")
    process = Process(child.pid)
    assert process.exists
    assert process.comm == "waiting"
    assert process.exe == str(waiting)
    assert process.cmdline == [str(waiting), "one", "two words", ""]
    assert process.start_time > 0
    assert process.threads() == [child.pid]
    assert process.thread_name(child.pid) == "waiting"
    assert process.namespace_tid(child.pid) == child.pid
    assert process.in_same_pid_namespace
    assert process.seccomp_mode == 0
    assert process.is_traced_by == 0
    process.check_architecture()


def test_threads_are_listed_with_their_names() -> None:
    ready, done = threading.Event(), threading.Event()
    tids = []

    def wait() -> None:
        tids.append(threading.get_native_id())
        Path(f"/proc/self/task/{tids[0]}/comm").write_text("a) b\n")
        ready.set()
        done.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    ready.wait()
    process = Process(os.getpid())
    assert tids[0] in process.threads()
    assert process.thread_name(tids[0]) == "a) b"
    done.set()
    thread.join()
    assert process.thread_name(tids[0]) in ("", "a) b")


def test_a_process_that_has_gone(waiting: Path, start: Start) -> None:
    child = start(waiting)
    process = Process(child.pid)
    child.process.kill()
    child.process.wait()
    assert not process.exists
    for use in (
        lambda: process.comm,
        process.threads,
        process.maps,
        lambda: process.read(0x1000, 8),
        process.check_architecture,
        lambda: Process(child.pid),
        lambda: Process(-1),
        lambda: Process(1 << 70),
    ):
        with pytest.raises(TargetGoneError):
            use()


def test_a_zombie_does_not_exist(waiting: Path, start: Start) -> None:
    child = start(waiting)
    process = Process(child.pid)
    child.process.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not process.exists
    assert process.maps() == ()


def test_odd_paths_in_maps() -> None:
    text = (
        b"7f00-7f10 r-xp 00001000 fd:0a 42                        /tmp/a b\\012c (deleted) (deleted)\n"
        b"7f10-7f20 rw-p 00000000 00:00 0 \n"
        b"7f20-7f30 r--p 00000000 00:00 0                          [vvar]\n"
        b"not a line\n"
        b"7f30-7f40 rwxs 00000000 00:01 7                          /memfd:x (deleted)\n"
    )
    first, anonymous, vvar, memfd = parse_maps(text)
    device = os.makedev(0xFD, 0x0A)
    assert first == Mapping(0x7F00, 0x7F10, "r-xp", 0x1000, device, 42, "/tmp/a b\nc (deleted)", True)
    assert first.executable
    assert first.is_file
    assert (anonymous.path, anonymous.is_file, anonymous.executable) == ("", False, False)
    assert (vvar.path, vvar.is_file) == ("[vvar]", False)
    assert (memfd.path, memfd.deleted) == ("/memfd:x", True)


def test_switched_code_shows_as_the_file_it_stands_for() -> None:
    name = code_name(Mapping(0x1000, 0x9000, "r-xp", 0, os.makedev(0xFE, 1), 42, "/lib/a:b (x).so", True), -0x800)
    text = (
        b"1000-3000 r-xp 00003000 fe:01 42 /lib/a:b (x).so (deleted)\n"  # the pages that were at 11000
        b"10000-11000 r-xp 00002000 fe:01 42 /lib/a:b (x).so (deleted)\n"
        b"11000-13000 r-xp 00003000 00:01 7 /memfd:ptwprobe-code:fe:1:42:-10000:/lib/a:b (x).so (deleted)\n"
        b"13000-14000 r-xp 00005000 00:01 7 /memfd:ptwprobe-code:fe:1:42:-10000:/lib/a:b (x).so (deleted)\n"
    )
    aside, before, switched, unbacked = parse_maps(text)
    assert name == "ptwprobe-code:fe:1:42:-800:/lib/a:b (x).so"
    assert aside.is_aside and not aside.executable and not aside.is_file
    assert switched == replace(before, start=0x11000, end=0x13000, offset=0x3000, aside=aside)
    # What cannot be what its name says is left as it is.
    assert unbacked.inode == 7 and unbacked.aside is None and unbacked.path.startswith("/memfd:")


def test_the_name_of_a_copy_is_cut_to_what_a_memfd_may_have() -> None:
    name = code_name(Mapping(0, 0x1000, "r-xp", 0, 1, 2, "/" + "\u00e4" * 200, False), 0x10)
    assert len(os.fsencode(name)) == 249
    os.close(os.memfd_create(name))


def test_maps_are_those_of_the_kernel(waiting: Path, start: Start) -> None:
    folder = waiting.parent / "odd (name)\nhere"
    folder.mkdir()
    moved = waiting.rename(folder / waiting.name)
    process = Process(start(moved).pid)
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    maps = process.maps()
    assert [f"{m.start:08x}-{m.end:08x} {m.perms} {m.offset:08x}" for m in maps] == [
        " ".join(line.split()[:3]) for line in lines
    ]
    code = next(m for m in maps if m.executable)
    found = moved.stat()
    assert (code.path, code.device, code.inode) == (str(moved), found.st_dev, found.st_ino)
    assert process.start_time > 0


def test_the_mapped_file_is_opened_after_it_was_deleted_or_replaced(waiting: Path, start: Start) -> None:
    original = waiting.read_bytes()
    process = Process(start(waiting).pid)
    waiting.unlink()
    code = next(m for m in process.maps() if m.executable)
    assert (code.deleted, code.path) == (True, str(waiting))
    with process.open_mapped(code) as file:
        assert file.read() == original
    waiting.write_bytes(b"something else")
    with process.open_mapped(code) as file:
        assert file.read() == original


def without_map_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is for a user who may not follow the links in map_files."""
    readable = "ptwprobe.process._readable_file"
    monkeypatch.setattr(readable, lambda path: False)


def test_without_map_files_the_same_inode_is_required(
    waiting: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Process(start(waiting).pid)
    code = next(m for m in process.maps() if m.executable)
    libc = next(m for m in process.maps() if m.path.endswith("libc.so.6"))
    without_map_files(monkeypatch)
    assert process.mapped_path(code) == f"/proc/{process.pid}/root{waiting}"
    waiting.unlink()
    waiting.write_bytes(b"another file")
    # The program itself can still be reached.
    assert process.mapped_path(code) == f"/proc/{process.pid}/exe"
    replaced = Mapping(libc.start, libc.end, "r-xp", 0, libc.device, libc.inode + 1, libc.path, False)
    with pytest.raises(RefusedError) as refused:
        process.mapped_path(replaced)
    assert refused.value.reason is RefusalReason.IDENTITY_CHANGED
    gone = Mapping(libc.start, libc.end, "r-xp", 0, libc.device, libc.inode + 1, "/no/such/lib.so", True)
    with pytest.raises(PermissionDeniedError, match="deleted"):
        process.mapped_path(gone)


def test_memory_is_read(waiting: Path, start: Start) -> None:
    process = Process(start(waiting).pid)
    first = process.maps()[0]
    assert process.read(first.start, 4) == b"\x7fELF"
    assert process.maps()[0].start <= process.entry_point()
    for addr in (0, 8, (1 << 64) - 4096):
        with pytest.raises(PermissionDeniedError, match="not readable"):
            process.read(addr, 8)


@pytest.mark.needs("root")
def test_another_users_process_is_denied_with_a_remedy() -> None:
    code = f"""
import ctypes
import mmap
import os
os.setgid(65534); os.setuid(65534)
from ptwprobe.errors import PermissionDeniedError
from ptwprobe.process import Process
process = Process({os.getpid()})
assert process.comm and process.threads()
for use in (lambda: process.exe, process.maps, lambda: process.read(4096, 8), process.check_architecture):
    try:
        use()
    except PermissionDeniedError as error:
        assert "root" in error.hint
    else:
        raise SystemExit("permitted")
"""
    # Imported before rights are dropped: the package may lie in a private folder.
    command = [sys.executable, "-c", "import ptwprobe.process, ptwprobe.errors\n" + code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout


def test_a_32_bit_program_is_unsupported(waiting: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    header = bytearray(waiting.read_bytes()[:20])
    header[4] = 1
    other = waiting.with_name("other")
    other.write_bytes(header)
    process = Process(start(waiting).pid)
    monkeypatch.setattr(process, "_proc", lambda name: other)
    with pytest.raises(UnsupportedError, match="32-bit"):
        process.check_architecture()


def test_seccomp_and_tracers_are_seen(waiting: Path, start: Start) -> None:
    source = WAIT + "#include <sys/ptrace.h>\nint main(void) { ptrace(PTRACE_TRACEME); ready(); return 0; }"
    traced = Process(start(compiled(waiting.with_name("traced"), source)).pid)
    assert traced.is_traced_by == os.getpid()
    source = (
        WAIT
        + """
    #include <linux/filter.h>
    #include <linux/seccomp.h>
    #include <sys/prctl.h>
    int main(void) {
        struct sock_filter allow = BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
        struct sock_fprog program = {1, &allow};
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
        ready();
        return 0;
    }
    """
    )
    assert Process(start(compiled(waiting.with_name("filtered"), source)).pid).seccomp_mode == 2


@pytest.mark.needs("root", "unshare")
def test_other_pid_namespaces(waiting: Path, start: Start) -> None:
    outer = start("unshare", "--pid", "--fork", "--kill-child", waiting)
    [child] = [int(pid) for pid in Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()]
    process = Process(child)
    assert not process.in_same_pid_namespace
    assert process.namespace_tid(child) == 1


def test_stack_limit(waiting: Path, start: Start) -> None:
    limited = start("sh", "-c", f"ulimit -Ss 4096; exec {waiting}")
    assert Process(limited.pid).rlimit_stack == 4096 * 1024


def test_memory_that_is_wiped_on_fork_is_known() -> None:
    page = mmap.mmap(-1, 3 * mmap.PAGESIZE)
    other = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    wiped = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    wiped.madvise(18)  # MADV_WIPEONFORK
    start = ctypes.addressof(ctypes.c_char.from_buffer(wiped))
    found = Process(os.getpid()).wiped_on_fork()
    assert any(low <= start < high for low, high in found)
    for memory in (page, other):
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert not any(low <= start < high for low, high in found)
