"""Journals and locks: what is written can be read, and nothing else is believed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptwprobe.errors import InputError, PermissionDeniedError, RefusalReason, RefusedError
from ptwprobe.patch import journal, recover, runfolder
from ptwprobe.patch.journal import Area, AreaKind, Claim, Identity, Journal, JournalSite
from ptwprobe.patch.runfolder import Holder, Lock, RunFolder
from ptwprobe.process import Process
from ptwprobe.report.status import printable

U64 = st.integers(0, 2**64 - 1)
BYTES = st.integers(0, 255)
PAIRS = st.lists(st.tuples(BYTES, BYTES), min_size=1, max_size=5).map(
    lambda pairs: (bytes(old for old, _ in pairs), bytes(new for _, new in pairs))
)
SITES = st.builds(lambda a, p, s, path: JournalSite(a, p[0], p[1], s, path), U64, PAIRS, U64, st.text())
AREAS = st.builds(Area, st.sampled_from(AreaKind), U64, U64)
IDENTITIES = st.builds(Identity, U64, U64, st.text(), U64)
JOURNALS = st.builds(Journal, IDENTITIES, st.text(), U64, st.lists(AREAS).map(tuple), st.lists(SITES).map(tuple))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """The only place where this test finds and keeps journals."""
    monkeypatch.setattr(runfolder, "candidates", lambda: [tmp_path / "run"])
    return runfolder.writable()


def own_process() -> Process:
    return Process(os.getpid())


@given(JOURNALS)
def test_what_is_written_is_read(written: Journal) -> None:
    assert Journal.from_text(written.to_text()) == written


def test_a_path_that_is_no_utf8_is_kept(folder: RunFolder) -> None:
    path = os.fsdecode(b"/tmp/\xff\xfe/x")
    claim = Claim.take(own_process())
    claim.write([], [JournalSite(1, b"a", b"b", 2, path)])
    entry = journal.find(own_process())
    assert entry is not None and entry.journal is not None
    assert entry.journal.sites[0].path == path
    claim.clear()
    claim.end()


@given(st.binary())
def test_any_bytes_are_no_journal(text: bytes) -> None:
    with pytest.raises(ValueError):
        Journal.from_text(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300)
@given(JOURNALS, st.data())
def test_a_journal_with_a_strange_value_is_read_or_refused(written: Journal, data: st.DataObject) -> None:
    text = json.loads(written.to_text())
    places = [text, *text["areas"], *text["sites"]]
    place = data.draw(st.sampled_from(places))
    name = data.draw(st.sampled_from(sorted(place)))
    place[name] = data.draw(JSON)
    try:
        found = Journal.from_text(json.dumps(text).encode())
    except ValueError:
        return
    assert all(0 <= a.start < 2**64 and 0 <= a.length < 2**64 for a in found.areas)
    assert all(len(s.old) == len(s.new) > 0 for s in found.sites)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ValueError):
        Journal.from_text(b"[" * 100_000)


def test_folder_and_files_are_private(folder: RunFolder) -> None:
    old = os.umask(0)
    try:
        claim = Claim.take(own_process())
        claim.write([], [])
    finally:
        os.umask(old)
    modes = {item.name: item.stat().st_mode & 0o777 for item in folder.path.iterdir()}
    assert set(modes.values()) == {0o600} and len(modes) == 2
    assert folder.path.stat().st_mode & 0o777 == 0o700
    claim.clear()
    claim.end()
    assert not list(folder.path.iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_may_write_to_is_not_used(folder: RunFolder, mode: int) -> None:
    folder.path.chmod(mode)
    with pytest.raises(PermissionDeniedError, match="others can write to it"):
        runfolder.writable()
    assert runfolder.existing() == []


def test_a_link_is_no_folder(folder: RunFolder, tmp_path: Path) -> None:
    folder.path.rename(tmp_path / "elsewhere")
    folder.path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionDeniedError, match="no place for the journal"):
        runfolder.writable()
    assert runfolder.existing() == []


@pytest.mark.parametrize("what", ["fifo", "link", "folder"])
def test_a_lock_file_that_is_none_is_an_error(folder: RunFolder, tmp_path: Path, what: str) -> None:
    path = folder.path / "1-1.lock"
    if what == "fifo":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to(tmp_path / "made")
    else:
        path.mkdir()
    with pytest.raises((InputError, OSError)):
        folder.lock("1-1")
    assert folder.holder("1-1") is None
    assert not (tmp_path / "made").exists()


def test_one_at_a_time(folder: RunFolder) -> None:
    first = folder.lock("1-1")
    assert isinstance(first, Lock)
    assert folder.lock("1-1") == folder.holder("1-1") == Holder(os.getpid())
    other = folder.lock("1-2")
    assert isinstance(other, Lock)
    other.release()
    first.release()
    assert folder.holder("1-1") is None
    assert not list(folder.path.iterdir())
    again = folder.lock("1-1")
    assert isinstance(again, Lock)
    # A lock that was released has nothing to do with the next of its name.
    first.release()
    assert folder.holder("1-1") == Holder(os.getpid())
    again.release()


def test_refusal_busy_names_who_has_the_process(folder: RunFolder) -> None:
    claim = Claim.take(own_process())
    with pytest.raises(RefusedError, match=rf"\(pid {os.getpid()}\)") as caught:
        Claim.take(own_process())
    assert caught.value.reason is RefusalReason.BUSY
    claim.end()
    Claim.take(own_process()).end()


def test_a_fork_child_does_not_keep_the_lock_of_its_parent(folder: RunFolder) -> None:
    """As a worker of ``multiprocessing`` would that outlives a killed recorder."""
    code = (
        "import os, sys, time\nfrom pathlib import Path\nfrom ptwprobe.patch.runfolder import RunFolder\n"
        "folder = RunFolder.open(Path(sys.argv[1]), False)\nlock = folder.lock('1-1')\n"
        "child = os.fork()\nprint(child, flush=True) if child else time.sleep(60)\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(folder.path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert folder.holder("1-1") == Holder(process.pid)
    process.kill()
    process.wait()
    end = time.monotonic() + 5
    while folder.holder("1-1") is not None and time.monotonic() < end:
        time.sleep(0.01)
    lock = folder.lock("1-1")
    assert isinstance(lock, Lock)
    lock.release()
    os.kill(child, 9)
    process.stdout.close()


def test_locks_are_given_to_one_of_many_who_run_for_them(folder: RunFolder, tmp_path: Path) -> None:
    """Each adds one to a number, without which a lock that two have would lose some."""
    number = tmp_path / "number"
    number.write_text("0")
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom ptwprobe.patch.runfolder import Lock, RunFolder\n"
        "folder = RunFolder.open(Path(sys.argv[1]), False)\nnumber = Path(sys.argv[2])\ndone = 0\n"
        "while done < 100:\n"
        " lock = folder.lock('1-1')\n"
        " if isinstance(lock, Lock):\n"
        "  number.write_text(str(int(number.read_text()) + 1)); lock.release(); done += 1\n"
        " time.sleep(0.0005)"
    )
    words = [sys.executable, "-c", code, str(folder.path), str(number)]
    for process in [subprocess.Popen(words) for _ in range(3)]:
        assert process.wait(60) == 0
    assert number.read_text() == "300"
    assert not list(folder.path.iterdir())


def test_what_was_written_half_goes_after_a_while(folder: RunFolder) -> None:
    old, new = folder.path / "1-1.json.new", folder.path / "1-2.json.new"
    for path in (old, new):
        path.write_text("{")
    os.utime(old, (time.time() - 100, time.time() - 100))
    recover.sweep()
    assert [item.name for item in folder.path.iterdir()] == [new.name]


def test_names_that_steer_terminals_are_shown_as_numbers() -> None:
    assert printable("a\x1b[2Jb\n") == r"a\x1b[2Jb\x0a"


def test_a_full_disk_refuses_before_anything_is_done(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    claim = Claim.take(own_process())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "write", full)
    with pytest.raises(PermissionDeniedError, match="No space left"):
        claim.write([], [])
    claim.end()
