"""session.json: what it tells, and how it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import ptwprobe
from ptwprobe.errors import InputError
from tests.synth import SIZES, Session


def describe(folder: Path, change: dict[str, Any]) -> Path:
    session = Session(folder, [SIZES])
    path = session.finish() / "session.json"
    path.write_text(json.dumps({**session.description(), **change}))
    return folder


def test_a_session_that_has_not_ended_says_so(tmp_path: Path) -> None:
    info = ptwprobe.open(describe(tmp_path / "s.ptw", {})).session
    assert info is not None
    assert (info.end, info.ended_ns, info.threads) == ("", 0, None)
    assert (info.channel, info.channel_reason, info.tsc_hz) == ("ring", "no intel_pt PMU", 2_000_000_000)


def event(**change: object) -> dict[str, Any]:
    return {"events": [{"id": 1, "event": "g/e", **change}]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2, this ptwprobe reads 1"),
        ({"version": None}, "version is not an integer"),
        ({"version": True}, "version is not an integer"),
        ({"events": {}}, "events is not a list"),
        ({"events": [1]}, r"events\[0\] is not an object"),
        ({"events": [{"id": 1}]}, r"events\[0\]\.event is missing"),
        (event(id=65536), r"events\[0\]\.id is not an integer from 0 to 65535"),
        (event(fields=[{"name": "a", "type": "f64"}]), r"fields\[0\]\.type is not an integer type: 'f64'"),
        (event(fields=[{"name": "a", "type": "u64"}] * 2), r"events\[0\]\.fields has a name twice"),
        (event(fields=[{"type": "u64"}]), r"fields\[0\]\.name is missing"),
        (event(sites=[{"pid": 1, "addr": -1}]), r"sites\[0\]\.addr is not an integer"),
        (event(sites=[{"pid": 1, "addr": 1, "slots": [1 << 64]}]), r"slots\[0\] is not an integer"),
        ({"events": event()["events"] * 2}, "the id 1 twice"),
        ({"tool": 5}, "tool is not a string"),
        ({"notes": [5]}, r"notes\[0\].* is not a string"),
        ({"totals": []}, "totals is not an object"),
    ],
)
def test_a_wrong_session_is_refused_with_the_place(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ptwprobe.open(describe(tmp_path / "s.ptw", change))


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff\xfe", b"1"])
def test_what_is_no_json_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = describe(tmp_path / "s.ptw", {})
    (folder / "session.json").write_bytes(content)
    with pytest.raises(InputError, match=r"session\.json"):
        ptwprobe.open(folder)


def test_names_that_are_no_text_cannot_break_an_output(tmp_path: Path) -> None:
    folder = describe(tmp_path / "s.ptw", {"host": "\ud800"})
    info = ptwprobe.open(folder).session
    assert info is not None
    assert info.host == "\\ud800"
