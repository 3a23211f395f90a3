"""Programs, probes and what must come of it: the main job on real programs, as a table.

Each row starts a command under ``record -- CMD`` and says what the hits must be. Ends, attaching and the rest that a
table cannot say are in ``test_ends.py``.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import cli, symbols
from tests.live.oracle_cases import PYTHON_PROGRAM, SQL, write_input

pytestmark = pytest.mark.needs("root")

# What came: (event's name, values of its arguments), in time order.
Seen = list[tuple[str, tuple[int, ...]]]
Expectation = Callable[[Seen], None]


def at_least(number: int, *, below: int = 1 << 40) -> Expectation:
    """So many hits, all values of which are sane."""

    def check(seen: Seen) -> None:
        assert len(seen) >= number
        assert all(0 <= value < below for _, values in seen for value in values)

    return check


def exactly(*wanted: tuple[int, ...]) -> Expectation:
    """These argument values in this order."""

    def check(seen: Seen) -> None:
        assert [values for _, values in seen] == list(wanted)

    return check


def names(*wanted: str) -> Expectation:
    """Hits of these events and no others."""

    def check(seen: Seen) -> None:
        assert {name for name, _ in seen} == set(wanted)

    return check


def exactly_but_last_two(*wanted: tuple[int, ...]) -> Expectation:
    """These values, then two equal ones that are not 0."""

    def check(seen: Seen) -> None:
        assert [values[:-2] for _, values in seen] == list(wanted)
        assert all(values[-2] == values[-1] != 0 for _, values in seen)

    return check


def several_events(number: int) -> Expectation:
    """Hits of so many different events."""

    def check(seen: Seen) -> None:
        assert len({name for name, _ in seen}) == number

    return check


@dataclass(frozen=True)
class Row:
    """``{NAME}`` is a program of tests/progs, ``{NAME!stripped}`` the same without symbols, ``{NAME@FUNCTION}`` the
    function's file offset there, and ``{input}`` a file of 3 MiB.
    """

    name: str
    command: tuple[str, ...]
    probes: tuple[str, ...]
    expect: Expectation
    stdin: bytes = b""


MALLOC = ("libc:malloc size=$arg1:u64",)
PYTHON = ("/usr/bin/python3", "-I", "-S", "-c", PYTHON_PROGRAM)
SQLITE = ("/usr/bin/sqlite3", ":memory:")
OPENSSL = ("/usr/bin/openssl", "dgst", "-sha256", "{input}")
GZIP = ("/usr/bin/gzip", "-c", "-n", "{input}")

TABLE = [
    Row("python3 malloc", PYTHON, MALLOC, at_least(1_000)),
    Row("sqlite3 malloc", SQLITE, MALLOC, at_least(5_000), SQL.encode()),
    Row("openssl malloc", OPENSSL, MALLOC, at_least(1_000)),
    Row("gzip malloc, which it never calls", GZIP, MALLOC, exactly()),
    Row("several probes", GZIP, ("libc:read fd=$arg1:s32", "libc:write fd=$arg1:s32"), names("read", "write")),
    Row("a name of one's own", GZIP, ("io/in=libc:read fd=$arg1:s32",), names("in")),
    Row("no arguments", GZIP, ("libc:read",), at_least(90)),
    Row(
        "two arguments of a C function",
        ("{calls}", "1", "1000", "0"),
        ("probe_me a=$arg1 b=$arg2",),
        exactly(*((0, i) for i in range(1000))),
    ),
    Row(
        "all kinds of fetches",
        ("{calls}", "1", "3", "0"),
        (r"probe_me a=%di:u8 b=%rsi:s32 seven=\7:u16 minus=\-1:s8 own=+0($stack):x64 same=$stack0:x64",),
        exactly_but_last_two((0, 0, 7, -1), (0, 1, 7, -1), (0, 2, 7, -1)),
    ),
    Row(
        "an offset in a function",
        ("{calls}", "1", "100", "0"),
        ("probe_me+0x0 b=%si",),
        exactly(*((i,) for i in range(100))),
    ),
    Row(
        "a file offset in a program without symbols",
        ("{calls!stripped}", "1", "100", "0"),
        ("calls.stripped:{calls@probe_me} b=%si",),
        exactly(*((i,) for i in range(100))),
    ),
    Row(
        "a line in tracefs form",
        ("{calls}", "1", "100", "0"),
        ("p:mine/hit {calls}:{calls@probe_me} i=%si:u64",),
        exactly(*((i,) for i in range(100))),
    ),
    Row(
        "a kernel's ptw line",
        ("{calls}", "1", "100", "0"),
        ("ptw:mine/hit {calls}:{calls@probe_me}%nopace i=%si:u64",),
        exactly(*((i,) for i in range(100))),
    ),
    Row(
        "a glob",
        ("{cpp}", "100"),
        ("cpp:_ZN4shop3add*",),
        several_events(2),
    ),
    Row(
        "a C++ method by its own name",
        ("{cpp}", "100"),
        ("cpp:shop::Basket::put price=$arg2:s64",),
        exactly(*((i * 7 % 101,) for i in range(100))),
    ),
    Row(
        "a library's constructor, which runs before main",
        ("{ctors}",),
        ("libctors:ctor_called who=$arg1 i=$arg2",),
        exactly(*((1, i) for i in range(5)), *((2, i) for i in range(3))),
    ),
    Row(
        "fork children emit nothing",
        ("{forks}", "50"),
        ("probe_me who=$arg1 i=$arg2",),
        # A vfork child runs in its parent's memory, so that its calls are the parent's.
        exactly(*((who, i) for who in (1, 3, 4) for i in range(50))),
    ),
]


@pytest.fixture(scope="module")
def input_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_input(tmp_path_factory.mktemp("input") / "input.txt")


@pytest.fixture
def fill(progs: Callable[..., Path], input_file: Path) -> Callable[[str], str]:
    """A row's words with its placeholders filled in."""

    def value(found: re.Match[str]) -> str:
        name, stripped, function = found[1], found[2], found[3]
        if name == "input":
            return str(input_file)
        binary = progs(name, strip=bool(stripped))
        return hex(symbols.function(binary, function)[1]) if function else str(binary)

    return lambda text: re.sub(r"\{(\w+)(!stripped)?(?:@(\w+))?\}", value, text)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_table(row: Row, fill: Callable[[str], str], tmp_path: Path) -> None:
    # Only a word that is a placeholder: a program's text has braces of its own.
    command = [fill(word) if word.startswith("{") else word for word in row.command]
    session = tmp_path / "row.ptw"
    probes = [word for probe in row.probes for word in ("-e", fill(probe))]
    plain = subprocess.run(command, input=row.stdin, capture_output=True, check=False)
    done = cli.run("record", *probes, "-o", session, "--json", "--", *command, stdin=row.stdin).good()
    assert done.own_output == plain.stdout
    assert done.summary["exit_status"] == plain.returncode
    hits = cli.hits(session)
    assert done.totals == cli.Totals(hits=len(hits), lost=0, torn=0, stray=0, errors=0)
    assert [hit["time"] for hit in hits] == sorted(hit["time"] for hit in hits)
    row.expect([(hit["event"].split("/")[1], cli.arguments(hit)) for hit in hits])
