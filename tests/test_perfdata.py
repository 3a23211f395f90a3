"""The perf.data that the recorder writes: safe to create, whole at any moment, final factors at the end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import ptwprobe
from ptwprobe._native import NativeError, TraceWriter
from tests.synth import BARE, MULT, SHIFT, ZERO, Session, ns_of


def test_the_file_is_private_and_never_made_over_another_or_through_a_link(tmp_path: Path) -> None:
    path = tmp_path / "perf.data"
    TraceWriter(str(path), SHIFT, MULT, ZERO)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        TraceWriter(str(path), SHIFT, MULT, ZERO)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        TraceWriter(str(link), SHIFT, MULT, ZERO)
    assert not (tmp_path / "elsewhere").exists()


def test_all_times_follow_the_final_factors(tmp_path: Path) -> None:
    session = Session(tmp_path / "s.ptw", [BARE])
    session.hit(100, BARE, 2000)
    session.round()
    [before] = ptwprobe.open(tmp_path / "s.ptw").hits()
    assert before.ns == ns_of(2000)
    session.writer.finish(SHIFT, MULT * 2, 7)
    [after] = ptwprobe.open(tmp_path / "s.ptw").hits()
    assert after.ns == 7 + 2000
    with pytest.raises(NativeError, match="finished"):
        session.writer.flush()


@pytest.mark.needs("root")
def test_a_full_disk_leaves_a_readable_file(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    assert os.system(f"mount -t tmpfs -o size=256k none {mount}") == 0
    try:
        session = Session(mount / "s.ptw", [BARE], describe=False)
        written = 0
        with pytest.raises(OSError, match="No space left"):
            while True:
                for step in range(1000):
                    session.hit(100, BARE, 1000 + written + step)
                session.round()
                written += 1000
        with pytest.raises(OSError, match="No space left"):
            session.writer.flush()
        totals = ptwprobe.open(mount / "s.ptw").totals()
        assert (totals.hits, totals.errors) == (written, 0)
    finally:
        os.system(f"umount --lazy {mount}")
