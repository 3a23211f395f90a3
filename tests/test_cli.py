"""The command line's contract: exit codes, the closing line, what an error says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli import run

CLOSING = "hits=0 lost=0 torn=0 stray=0 errors=0"

BAD_CALLS = [
    (["record"], 2, "nothing to record"),
    (["record", "-p", "1x", "-e", "malloc"], 2, "not a valid integer"),
    (["record", "-e", "libc:malloc", "--duration", "0", "--", "/bin/true"], 2, "--duration 0.0: not a time"),
    (["record", "-e", "libc:malloc x=$argh", "--", "/bin/true"], 2, "^"),
    (["record", "-e", "libc:malloc", "--duration", "nan", "--", "/bin/true"], 2, "--duration nan: not a time"),
    (["record", "-e", "libc:malloc", "-t", "1", "--", "/bin/true"], 2, "threads of a command"),
    (["record", "-e", "libc:malloc", "-p", "2"], 3, "kernel thread"),
    (["record", "--", "/bin/true"], 2, "no probe was given"),
    (["record", "-e", "libc:malloc", "-m", "lots", "--", "/bin/true"], 2, "not a size"),
    (["record", "-e", "libc:malloc", "-m", "4K", "--", "/bin/true"], 2, "64 KiB to 1 GiB"),
    (["record", "-e", "libc:malloc", "--channel", "pt", "--", "/bin/true"], 3, "not in this version"),
    (["record", "-e", "libc:malloc", "--channel", "magic", "--", "/bin/true"], 2, "no channel is called"),
    (["record", "-e", "libc:malloc", "--flow", "step", "--", "/bin/true"], 3, "not in this version"),
    (["record", "-e", "libc:malloc", "--", "/no/such/program"], 4, "/no/such/program"),
    (["record", "-e", "libc:nosuchfunction", "--", "/bin/true"], 2, "no function 'nosuchfunction'"),
    (["record", "-e", "libc:malloc", "-p", "4000000"], 4, "does not exist"),
    (["script", "/no/such.ptw"], 2, "/no/such.ptw"),
    (["script", "/etc/passwd"], 2, "/etc/passwd"),
]


@pytest.mark.parametrize(("words", "code", "text"), BAD_CALLS, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_bad_calls(words: list[str], code: int, text: str, tmp_path: Path) -> None:
    output = ["-o", str(tmp_path / "s.ptw")] if words[0] == "record" else []
    done = run(words[0], *output, *words[1:])
    assert done.exit_code == code, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "s.ptw").exists()


def test_the_totals_come_last_even_after_an_error(tmp_path: Path) -> None:
    done = run("record", "-o", tmp_path / "s.ptw", "-e", "libc:malloc", "-p", "4000000")
    assert done.stderr.rstrip().splitlines()[-1] == CLOSING


def test_the_totals_come_last_even_after_a_bad_option(tmp_path: Path) -> None:
    done = run("record", "--no-such-option")
    assert done.exit_code == 2
    assert done.stderr.rstrip().splitlines()[-1] == CLOSING


def test_words_that_are_no_utf8_reach_the_command(tmp_path: Path) -> None:
    env = {**os.environ, "ODD": os.fsdecode(b"\xff")}
    word = os.fsdecode(b"a\xffb")
    done = run("record", "-o", tmp_path / "s.ptw", "-e", "libc:write fd=$arg1", "--", "/bin/echo", word, env=env)
    assert done.good().stdout == b"a\xffb\n"
    assert done.totals.hits == 1


def test_a_syntax_error_points_at_its_column() -> None:
    done = run("stub", "-x", "/bin/true", "libc:malloc size=$argh")
    lines = done.stderr.splitlines()
    caret = next(line for line in lines if line.strip() == "^")
    text = lines[lines.index(caret) - 1]
    assert text[caret.index("^") :].startswith("$argh") or text[caret.index("^") - 4 :].startswith("$argh")


def test_list_shows_functions_and_how_they_would_be_patched(progs: object) -> None:
    binary = progs("calls")  # type: ignore[operator]
    done = run("list", "-x", binary, "probe_*", "--sites", "--json").good()
    row = json.loads(done.stdout)
    assert row["function"] == "probe_me"
    assert row["tactic"] in ("single", "window")
    assert row["refusal"] is None


def test_list_without_a_match_says_so() -> None:
    done = run("list", "-x", "/usr/bin/gzip", "no_such_*")
    assert done.exit_code == 2
    assert "no function matches" in done.stderr


def test_stub_is_a_dry_run_with_the_very_bytes(progs: object) -> None:
    binary = progs("calls")  # type: ignore[operator]
    done = run("stub", "-x", binary, "probe_me a=$arg1 b=+8(%sp):u32").good()
    text = done.stdout.decode()
    assert "tactic: " in text
    assert "new: e9 " in text
    assert "lock cmpxchg" in text
    pt = run("stub", "-x", binary, "--form", "pt", "probe_me a=$arg1").good().stdout.decode()
    assert "ptwrite" in pt
    assert "lfence" in pt


def test_stub_names_the_reason_of_a_refusal(progs: object) -> None:
    binary = progs("calls")  # type: ignore[operator]
    done = run("stub", "-x", binary, "probe_me+0x1 %di")
    assert done.exit_code == 4
    assert "not-an-instruction" in done.stdout.decode() + done.stderr


def test_doctor_says_what_is_absent() -> None:
    report = json.loads(run("doctor", "--json").good().stdout)
    assert "ring" in json.dumps(report)
    text = run("doctor").good().stdout.decode()
    assert "Absent in this version" in text
