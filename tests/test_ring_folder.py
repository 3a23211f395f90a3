"""The session folder: who may have it, what is kept, and what happens on a full disk."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ptwprobe.errors import InputError, UsageError
from ptwprobe.record.folder import SessionFolder


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_folder_and_files_are_private(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        folder = SessionFolder.create(tmp_path / "a.ptw")
        folder.write_document({"version": 1})
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a.ptw").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "a.ptw/session.json").stat().st_mode) == 0o600
    assert json.loads((tmp_path / "a.ptw/session.json").read_text()) == {"version": 1}
    folder.perf_data.write_bytes(b"x")
    assert names(tmp_path / "a.ptw") == ["perf.data", "session.json"]


def test_a_document_is_replaced_whole(tmp_path: Path) -> None:
    folder = SessionFolder.create(tmp_path / "a.ptw")
    (tmp_path / "a.ptw/session.json.new").symlink_to(tmp_path / "victim")
    folder.write_document({"version": 1})
    folder.write_document({"version": 2})
    assert json.loads((tmp_path / "a.ptw/session.json").read_text()) == {"version": 2}
    assert names(tmp_path / "a.ptw") == ["session.json"]
    assert not (tmp_path / "victim").exists()


def test_an_earlier_session_is_kept_as_old(tmp_path: Path) -> None:
    for version in range(3):
        SessionFolder.create(tmp_path / "a.ptw").write_document({"version": version})
    assert names(tmp_path) == ["a.ptw", "a.ptw.old"]
    assert json.loads((tmp_path / "a.ptw.old/session.json").read_text()) == {"version": 1}


def test_what_is_no_session_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "file.ptw").write_text("mine")
    (tmp_path / "full.ptw").mkdir()
    (tmp_path / "full.ptw/thesis.txt").write_text("mine")
    (tmp_path / "target").mkdir()
    (tmp_path / "link.ptw").symlink_to(tmp_path / "target")
    (tmp_path / "dangling.ptw").symlink_to(tmp_path / "nowhere")
    for name in ("file", "full", "link", "dangling"):
        with pytest.raises(UsageError):
            SessionFolder.create(tmp_path / f"{name}.ptw")
    assert (tmp_path / "full.ptw/thesis.txt").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists() and names(tmp_path / "target") == []
    with pytest.raises(InputError):
        SessionFolder.create(tmp_path / "missing" / "a.ptw")


def test_an_old_that_is_no_session_is_not_replaced(tmp_path: Path) -> None:
    SessionFolder.create(tmp_path / "a.ptw").write_document({})
    (tmp_path / "a.ptw.old").mkdir()
    (tmp_path / "a.ptw.old/thesis.txt").write_text("mine")
    with pytest.raises(UsageError):
        SessionFolder.create(tmp_path / "a.ptw")
    assert (tmp_path / "a.ptw.old/thesis.txt").exists() and (tmp_path / "a.ptw/session.json").exists()


def test_an_empty_folder_of_ours_may_be_used(tmp_path: Path) -> None:
    (tmp_path / "a.ptw").mkdir(mode=0o755)
    SessionFolder.create(tmp_path / "a.ptw").write_document({})
    assert stat.S_IMODE((tmp_path / "a.ptw").stat().st_mode) == 0o700


@pytest.mark.parametrize("left", [(), ("session.json.new",), ("perf.data",), ("perf.data", "session.json")])
def test_what_a_killed_recorder_left_is_replaced(tmp_path: Path, left: tuple[str, ...]) -> None:
    for name in ("a.ptw", "a.ptw.old"):
        (tmp_path / name).mkdir(mode=0o700)
        for file in left:
            (tmp_path / name / file).write_text("")
    for version in range(2):
        SessionFolder.create(tmp_path / "a.ptw").write_document({"version": version})
    assert json.loads((tmp_path / "a.ptw/session.json").read_text()) == {"version": 1}
    assert json.loads((tmp_path / "a.ptw.old/session.json").read_text()) == {"version": 0}
    assert names(tmp_path) == ["a.ptw", "a.ptw.old"]


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_an_old_session_in_which_somebody_put_something_is_kept_whole(tmp_path: Path, kind: str) -> None:
    SessionFolder.create(tmp_path / "a.ptw").write_document({})
    SessionFolder.create(tmp_path / "a.ptw.old").write_document({})
    if kind == "file":
        (tmp_path / "a.ptw.old/notes.txt").write_text("mine")
    elif kind == "folder":
        (tmp_path / "a.ptw.old/perf.data").mkdir()
    else:
        (tmp_path / "a.ptw.old/perf.data").symlink_to(tmp_path / "elsewhere")
    before = names(tmp_path / "a.ptw.old")
    with pytest.raises(UsageError, match="in the way"):
        SessionFolder.create(tmp_path / "a.ptw")
    assert names(tmp_path / "a.ptw.old") == before
    assert names(tmp_path / "a.ptw") == ["session.json"]


def test_an_old_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    SessionFolder.create(tmp_path / "a.ptw").write_document({})
    SessionFolder.create(tmp_path / "other.ptw").write_document({})
    (tmp_path / "a.ptw.old").symlink_to(tmp_path / "other.ptw")
    with pytest.raises(UsageError, match="in the way"):
        SessionFolder.create(tmp_path / "a.ptw")
    assert names(tmp_path / "other.ptw") == ["session.json"]


@pytest.mark.parametrize("path", [".", "..", "/", "a/.."])
def test_a_path_without_a_name_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="no name"):
        SessionFolder.create(path)


def test_a_session_that_never_began_leaves_nothing(tmp_path: Path) -> None:
    folder = SessionFolder.create(tmp_path / "a.ptw")
    folder.perf_data.write_bytes(b"x")
    folder.write_document({})
    folder.remove()
    assert names(tmp_path) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", mount], check=True)
    yield mount
    subprocess.run(["umount", "-l", mount], check=True)


@pytest.mark.needs("root")
def test_the_document_finds_room_on_a_full_disk(small_disk: Path) -> None:
    folder = SessionFolder.create(small_disk / "a.ptw")
    with pytest.raises(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    folder.write_document({"end": "disk-full"})
    assert json.loads((small_disk / "a.ptw/session.json").read_text()) == {"end": "disk-full"}
