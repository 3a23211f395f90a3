"""What tests share: compiled test programs, running targets, and what a machine must have for a test to make sense."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.progs.build import build
from tests.targets import Target
from tests.walking import BASE, Assemble, Program, assembled


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="live tests at their full size, which takes minutes")


def pytest_configure() -> None:
    # Started by nohup, or in the background of a shell's script, the tests ignore these, and so would what they start:
    # a recorder then does not end at one.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Whether a test should run at its full size rather than at one that suits every commit."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def progs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``progs("calls")`` compiles ``tests/progs/calls.c`` and returns the binary; ``strip=True`` without symbols."""
    folder = tmp_path_factory.mktemp("progs")

    def compiled(name: str, *, strip: bool = False) -> Path:
        return build(name, folder, strip=strip)

    return compiled


@pytest.fixture
def start() -> Iterator[Callable[..., Target]]:
    """``start(binary, "2", "100", "0")`` runs a program until it says it is ready; none outlives the test."""
    with ExitStack() as stack:

        def started(*command: str | Path, **options: object) -> Target:
            return stack.enter_context(Target([str(word) for word in command], **options))  # type: ignore[arg-type]

        yield started


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips, with the reason, what this machine cannot run: ``@pytest.mark.needs("root", "perf", ...)``."""
    for item in items:
        for mark in item.iter_markers("needs"):
            for need in mark.args:
                reason = _lacking(need)
                if reason:
                    item.add_marker(pytest.mark.skip(reason=reason))


def _lacking(need: str) -> str:
    """Why the machine does not have ``need`` ("root", "uprobes" or the name of a program), or ""."""
    if need == "root":
        return "" if os.geteuid() == 0 else "needs root"
    if need == "uprobes":
        return "" if os.access("/sys/kernel/tracing/uprobe_events", os.W_OK) else "needs a writable tracefs"
    return "" if shutil.which(need) else f"needs the program {need}"


@pytest.fixture
def assemble(tmp_path: Path) -> Assemble:
    """``assemble(source, start=BASE)``: see ``assembled``."""

    def here(source: str, start: int = BASE) -> Program:
        return assembled(tmp_path, source, start)

    return here
