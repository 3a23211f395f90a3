"""What a session keeps of the code that ran, compared with the memory of the process."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ptwprobe
from ptwprobe._native import CodeTimeline
from ptwprobe.probe.elffile import open_elf
from ptwprobe.process import Process
from ptwprobe.trace.session import read_session
from tests.peers.auxdata import AuxData, Image
from tests.targets import Target

Programs = Callable[..., Path]
Start = Callable[..., Target]

pytestmark = pytest.mark.needs("root")
PROBE = "probe_me a=$arg1:s64 b=$arg2:s64"


def code_of(images: list[Image], addr: int, size: int) -> bytes:
    """What a decoder finds: of images that overlap, the last."""
    out = bytearray(size)
    known = bytearray(size)
    for image in images:
        content = image.path.read_bytes()
        start, end = max(addr, image.addr), min(addr + size, image.addr + image.size)
        for at in range(start, end):
            offset = image.file_offset + at - image.addr
            if offset < len(content):
                out[at - addr], known[at - addr] = content[offset], 1
    assert all(known), "code that no image has"
    return bytes(out)


def compare(images: list[Image], pid: int) -> int:
    """Checks all code of the process by page; how many pages."""
    process = Process(pid)
    pages = 0
    for m in process.maps():
        if m.executable and m.path != "[vsyscall]":
            size = m.end - m.start
            memory = process.read_some(m.start, size)
            found = code_of(images, m.start, len(memory))
            assert found == memory, m
            pages += size // 4096
    return pages


def test_images_and_files_are_the_code_of_the_process(progs: Programs, start: Start, tmp_path: Path) -> None:
    target = start(progs("calls"), "2", "100000000", "1000")
    session = ptwprobe.Session(pid=target.pid, output=tmp_path / "s.ptw")
    session.add(PROBE)
    session.add("libc:malloc size=$arg1")
    session.start()
    time.sleep(0.2)
    patched = AuxData.read(tmp_path / "s.ptw" / "perf.data").images
    assert compare(patched, target.pid) > 100
    names = {image.path.name.rpartition("-")[0] for image in patched if image.path.parent.name == "images"}
    assert names == {"calls-patched", "libc.so.6-patched", "stubs", "vdso"}
    session.stop()
    after = AuxData.read(tmp_path / "s.ptw" / "perf.data").images
    assert after[: len(patched)] == patched
    assert compare(after, target.pid) > 100
    assert not [image for image in after[len(patched) :] if image.path.parent.name == "images"]


def test_our_reader_knows_all_code_before_and_after(progs: Programs, start: Start, tmp_path: Path) -> None:
    """Also of a folder that was moved; and without its images nothing of what they hold."""
    target = start(progs("calls"), "1", "100000000", "1000")
    session = ptwprobe.Session(pid=target.pid, output=tmp_path / "s.ptw")
    session.add(PROBE)
    session.start()
    patched = memory(target.pid)
    session.stop()
    folder = (tmp_path / "s.ptw").rename(tmp_path / "moved")
    info = read_session(folder / "session.json")
    stubs = [(s.pid, (s.stub, s.stub_end, s.addr, s.continue_addr)) for e in info.events for s in e.sites]
    timeline = CodeTimeline(folder / "perf.data", images=folder / "images", stubs=stubs)
    schedule = timeline.thread(target.pid)
    spaces = [space for _, space, _, _ in schedule if space]
    assert len(spaces) == 2
    site, stub = info.events[0].sites[0].addr, info.events[0].sites[0].stub
    for addr, content in patched.items():
        assert timeline.read(spaces[0], addr, len(content)) == content, hex(addr)
    assert timeline.read(spaces[0], site, 1) == b"\xe9"
    after = memory(target.pid)
    for addr, content in after.items():
        assert timeline.read(spaces[1], addr, len(content)) == content, hex(addr)
    assert timeline.read(spaces[1], site, 1) != b"\xe9"
    assert timeline.stub(spaces[0], stub) == stubs[0][1]
    assert timeline.notes() == []
    (folder / "images").rename(folder / "gone")
    without = CodeTimeline(folder / "perf.data", images=folder / "images", stubs=stubs)
    assert without.read(spaces[0], site, 1) == b""
    assert without.stub(spaces[0], stub) == stubs[0][1]
    assert without.notes() and all("not found" in note for note in without.notes())


def memory(pid: int) -> dict[int, bytes]:
    """All code of a process, but for what a page has behind the end of its file."""
    process = Process(pid)
    maps = [m for m in process.maps() if m.executable and m.path != "[vsyscall]"]
    out = {}
    for m in maps:
        # Files end somewhere in the last page.
        size = m.end - m.start - (4095 if m.is_file and m.aside is None and m.end - m.start > 4096 else 0)
        out[m.start] = process.read_some(m.start, size)
    return out


def test_images_are_private_and_have_their_build_ids(progs: Programs, start: Start, tmp_path: Path) -> None:
    target = start(progs("calls"), "1", "1000", "1000")
    folder = tmp_path / "s.ptw"
    with ptwprobe.Session(pid=target.pid, output=folder) as session:
        session.add(PROBE)
        session.start()
    assert stat.S_IMODE((folder / "images").lstat().st_mode) == 0o700
    images = list((folder / "images").iterdir())
    assert images
    for image in images:
        assert stat.S_IMODE(image.lstat().st_mode) == 0o600 and stat.S_ISREG(image.lstat().st_mode)
        assert len(open_elf(str(image), image.name).build_id) == 40


def test_a_folder_that_is_recorded_over_is_kept_whole_once(progs: Programs, start: Start, tmp_path: Path) -> None:
    target = start(progs("calls"), "1", "100000000", "1000")
    folder = tmp_path / "s.ptw"
    for _ in range(3):
        with ptwprobe.Session(pid=target.pid, output=folder) as session:
            session.add(PROBE)
            session.start()
    assert sorted(item.name for item in tmp_path.iterdir()) == ["s.ptw", "s.ptw.old"]
    for name in ("s.ptw", "s.ptw.old"):
        assert len(list((tmp_path / name / "images").iterdir())) == 3


def test_a_file_that_was_deleted_is_kept(progs: Programs, start: Start, tmp_path: Path) -> None:
    program = tmp_path / "gone"
    program.write_bytes(progs("calls").read_bytes())
    program.chmod(0o755)
    target = start(program, "1", "100000000", "1000")
    program.unlink()
    with ptwprobe.Session(pid=target.pid, output=tmp_path / "s.ptw") as session:
        session.add("libc:malloc size=$arg1")
        session.start()
        time.sleep(0.2)
        images = AuxData.read(tmp_path / "s.ptw" / "perf.data").images
        assert compare(images, target.pid) > 100
    assert any(image.path.name.startswith("gone-deleted-") for image in images)


def test_objects_that_a_command_loads_later_are_told_when_their_probes_are(tmp_path: Path) -> None:
    code = "import time, zlib; zlib.compress(b'x' * 1000); time.sleep(1)"
    session = ptwprobe.Session(command=[sys.executable, "-c", code], output=tmp_path / "s.ptw")
    session.add("libz.so.1:deflate stream=$arg1")
    session.add("libc:malloc size=$arg1")
    session.start()
    seen = 0
    while session.poll(0.05) is None:
        pids = list(session._targets.installed) if session._targets else []
        if len(session.events.events()) == 2 and pids and not seen and session._launching is None:
            images = AuxData.read(tmp_path / "s.ptw" / "perf.data").images
            names = [image.path.name for image in images if image.path.parent.name == "images"]
            if any(name.startswith("libz.so.1") for name in names):
                seen = compare_probed(images, pids[0])
    session.stop()
    assert seen >= 3


def compare_probed(images: list[Image], pid: int) -> int:
    """Checks the images themselves; how many there were. Later objects of a program without probes are not told."""
    count = 0
    for image in images:
        # An image of the stubs' page that a later one replaces does not show any more.
        if image.path.parent.name == "images":
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
                found = os.pread(memory.fileno(), image.size, image.addr)
            count += code_of(images, image.addr, image.size) == found
    return count
