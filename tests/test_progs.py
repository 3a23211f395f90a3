"""The test programs themselves: without any probe they say what the live tests rely on."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.targets import Target

Programs = Callable[..., Path]
Start = Callable[..., Target]


@pytest.mark.parametrize(
    ("command", "output", "code"),
    [
        (["calls", "2", "1000", "0"], "ready\ncalls=2000 checksum=79763cbde6d56650\n", 0),
        (["calls", "2", "1000", "10000"], "ready\ncalls=2000 checksum=79763cbde6d56650\n", 0),
        (["cpp", "1000"], "total=49867 halves=500\n", 0),
        (["ctors"], "sum=11013\n", 0),
        (["execs", "10"], "ready\nimage=1 sum=10000075\nimage=2 sum=20000105\n", 0),
        (["forks", "10"], "ready\nsum=50000240 fork=0 vfork=0\n", 0),
        (["dies", "exit", "5"], "ready\nsum=5000025\n", 7),
        (["dies", "thread-exit", "5"], "ready\nsum=5000025\n", 7),
        (["dies", "kill", "5"], "ready\nsum=5000025\n", -9),
        (["dies", "abort", "5"], "ready\nsum=5000025\n", -6),
        (["dies", "segv", "5"], "ready\nsum=5000025\n", -11),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_output_and_exit_code(progs: Programs, start: Start, command: list[str], output: str, code: int) -> None:
    target = start(progs(command[0]), *command[1:], ready=None)
    assert target.finish() == output
    assert target.exit_code == code


@pytest.mark.parametrize("options", [[], ["signals"]], ids=["plain", "signals"])
def test_keep_finds_nothing_wrong_where_nothing_is_probed(progs: Programs, start: Start, options: list[str]) -> None:
    target = start(progs("keep"), "2", *options)
    target.go()
    time.sleep(0.3)
    assert target.finish().endswith("failures=0\n"), target.errors
    assert target.exit_code == 0


def test_a_stripped_program_has_no_symbol_table(progs: Programs) -> None:
    assert b"probe_me" in progs("calls").read_bytes()
    assert b"probe_me" not in progs("calls", strip=True).read_bytes()
