"""Address spaces by the records of stock perf, compared with what the kernel shows of the processes."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ptwprobe._native import CodeTimeline, NativeError
from ptwprobe.probe.elffile import open_elf
from ptwprobe.process import Mapping, Process
from tests.perfbuild import MMAP2, PerfBuild, record

pytestmark = pytest.mark.needs("root", "perf")

END = (1 << 64) - 1
"""A time after all."""


@contextmanager
def recorded(command: list[str], output: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A command under ``perf record``, and its pid; it says "ready" and waits for its stdin to end."""
    perf = ["perf", "record", "-q", "-e", "dummy:u", *options, "-o", str(output), "--", *command]
    with subprocess.Popen(perf, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        line = process.stdout.readline().split()
        assert line[0] == "ready"
        yield process, int(line[1])
        process.stdin.close()
        process.wait(30)


def code(pid: int) -> list[tuple[Mapping, bytes]]:
    """The mapped code of files, and its bytes."""
    process = Process(pid)
    return [(m, process.read_some(m.start, m.end - m.start)) for m in process.maps() if m.executable and m.is_file]


def check(timeline: CodeTimeline, space: int, expected: list[tuple[Mapping, bytes]]) -> None:
    assert expected
    for mapping, content in expected:
        size = mapping.end - mapping.start
        found = timeline.read(space, mapping.start, size)
        # What a page has behind the end of its file is no code.
        assert len(found) > size - 4096, (mapping, len(found), timeline.notes())
        assert found == content[: len(found)], mapping


PYTHON = """
import os, sys, zlib, ctypes, hashlib, json, socket
print("ready", os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("options", [(), ("--buildid-mmap",), ("--data",)], ids=["inode", "build id", "data"])
def test_code_of_a_program_that_loads_objects(tmp_path: Path, options: tuple[str, ...]) -> None:
    with recorded([sys.executable, "-c", PYTHON], tmp_path / "perf.data", *options) as (_, pid):
        expected = code(pid)
    timeline = CodeTimeline(tmp_path / "perf.data")
    check(timeline, timeline.process(pid, END), expected)
    assert timeline.notes() == []
    assert len(timeline) < 8


FORKS = """
import os, sys, time
pid = os.fork()
if pid == 0:
    import ctypes, zlib
    ctypes.CDLL("libm.so.6")
    print("ready", os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
os.waitpid(pid, 0)
"""


def test_a_fork_has_the_code_of_its_parent_and_what_it_loads_itself(tmp_path: Path) -> None:
    with recorded([sys.executable, "-c", FORKS], tmp_path / "perf.data") as (_, child):
        expected = code(child)
        parent = int(Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[1])
        expected_of_parent = code(parent)
    timeline = CodeTimeline(tmp_path / "perf.data")
    check(timeline, timeline.process(child, END), expected)
    check(timeline, timeline.process(parent, END), expected_of_parent)


def test_an_exec_leaves_nothing_of_the_program_before(tmp_path: Path) -> None:
    again = ["/bin/sh", "-c", 'echo "ready $$"; read line; :']
    execs = f"import os, zlib; os.execv('/bin/sh', {again!r})"
    with recorded([sys.executable, "-c", execs], tmp_path / "perf.data") as (_, pid):
        expected = code(pid)
    timeline = CodeTimeline(tmp_path / "perf.data")
    space = timeline.process(pid, END)
    check(timeline, space, expected)
    known = sum(end - start for start, end in timeline.regions(space))
    vdso = 0x4000
    assert known <= sum(m.end - m.start for m, _ in expected) + vdso


def test_processes_that_ran_before_the_recording(tmp_path: Path) -> None:
    target = [sys.executable, "-c", PYTHON]
    with subprocess.Popen(target, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        expected = code(process.pid)
        perf = ["perf", "record", "-q", "-e", "cpu-clock:u", "-a", "--switch-events", "-o", str(tmp_path / "perf.data")]
        subprocess.run([*perf, "--", "sleep", "0.3"], check=True, timeout=60)
        process.communicate("")
    timeline = CodeTimeline(tmp_path / "perf.data")
    check(timeline, timeline.process(process.pid, END), expected)


def test_a_file_that_was_replaced_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    program = tmp_path / "sleep"
    shutil.copy("/bin/sleep", program)
    script = f'{program} 60 >/dev/null & echo "ready $!"; cat >/dev/null; kill $!'
    with recorded(["/bin/sh", "-c", script], tmp_path / "perf.data", "--buildid-mmap") as (_, pid):
        time.sleep(0.1)
        [mapping] = [m for m, _ in code(pid) if m.path == str(program)]
    shutil.copy("/bin/ls", program)
    timeline = CodeTimeline(tmp_path / "perf.data")
    space = timeline.process(pid, END)
    assert timeline.read(space, mapping.start, 16) == b""
    [note] = timeline.notes()
    assert note.startswith(f"{program}: another file by now (build id ")
    cache = tmp_path / "cache"
    subprocess.run(["perf", "--buildid-dir", str(cache), "buildid-cache", "-a", "/bin/sleep"], check=True)
    kept = CodeTimeline(tmp_path / "perf.data", caches=[cache])
    content = Path("/bin/sleep").read_bytes()[mapping.offset :]
    assert kept.read(kept.process(pid, END), mapping.start, 4096) == content[:4096]
    assert kept.notes() == []


@pytest.mark.parametrize("same", [True, False])
def test_build_ids_in_a_file_that_was_written_to_a_pipe(tmp_path: Path, same: bool) -> None:
    program = tmp_path / "program"
    shutil.copy("/bin/sleep", program)
    build_id = bytes.fromhex(open_elf(str(program), "program").build_id)
    build = PerfBuild()
    name = bytes(program) + b"\0" * (8 - len(bytes(program)) % 8)
    mapping = struct.pack("<IIQQQIIQQII", 7, 7, 0x400000, 0x3000, 0, 0, 0, 0, 0, 5, 2)
    build.kernel(MMAP2, mapping + name, 7, 7, 1000)
    told = build_id if same else bytes(byte ^ 1 for byte in build_id)
    # perf tells them last.
    build.parts.append(record(67, struct.pack("<i20sI", -1, told, 0) + name))
    timeline = CodeTimeline(build.write_pipe(tmp_path / "perf.data"))
    assert timeline.read(timeline.process(7, END), 0x400000, 4) == (b"\x7fELF" if same else b"")
    assert len(timeline.notes()) == (not same)


def test_what_is_no_perf_data_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"no")
    with pytest.raises(NativeError):
        CodeTimeline(tmp_path / "x")
