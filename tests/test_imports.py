"""The stage rule: a folder of the package imports only itself, what everybody may import, and stages to its left."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "ptwprobe"
STAGES = ["probe", "stub", "patch", "record", "trace", "report"]
COMMON = {"model", "errors", "process", "_native"}
# What each of the files that everybody may import may itself import.
COMMON_IMPORTS = {"model": set(), "errors": set(), "process": {"model", "errors", "_native"}}
# The command line, the machine's check-up and the package's public names stand to the right of all stages.
LAST = {"__init__", "__main__", "cli", "doctor", "demo", "listing"}


def imported_names(source: str, package: list[str]) -> Iterator[tuple[int, list[str]]]:
    """Every import of something in ptwprobe, wherever it stands: (line, dotted path below ``ptwprobe``).

    ``package`` is the path of the package that the source is in, which relative imports start from.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _below(node.lineno, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = (["ptwprobe", *package][: len(package) + 2 - node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            for alias in node.names:
                yield from _below(node.lineno, [*base, alias.name])


def _below(line: int, path: list[str]) -> Iterator[tuple[int, list[str]]]:
    if path[0] == "ptwprobe":
        yield line, path[1:]


def breaches(source: str, package: list[str], module: str) -> list[str]:
    """What ``source``, the text of ``ptwprobe/PACKAGE/MODULE.py``, imports against the rule."""
    if package:
        stage = package[0]
        allowed = COMMON | set(STAGES[: STAGES.index(stage) + 1])
    elif module in LAST:
        return []
    else:
        allowed = COMMON_IMPORTS[module]
    return [
        f"line {line}: imports ptwprobe.{'.'.join(path)}"
        for line, path in imported_names(source, package)
        if not path or path[0] not in allowed
    ]


def _modules() -> list[Path]:
    return sorted(p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py") if "native" not in p.parts)


@pytest.mark.parametrize("module", _modules(), ids=str)
def test_imports_only_stages_to_its_left(module: Path) -> None:
    source = (PACKAGE / module).read_text()
    assert breaches(source, list(module.parts[:-1]), module.stem) == []


def test_every_file_has_a_place_in_the_order() -> None:
    folders = {m.parts[0] for m in _modules() if len(m.parts) > 1}
    files = {m.stem for m in _modules() if len(m.parts) == 1}
    assert folders <= set(STAGES)
    assert files <= LAST | set(COMMON_IMPORTS)


@pytest.mark.parametrize(
    ("source", "package", "module"),
    [
        ("from ptwprobe.record import session", ["patch"], "plan"),
        ("from ptwprobe import cli", ["report"], "text"),
        ("import ptwprobe.trace.open", ["record"], "session"),
        ("from ..record.session import Session", ["probe"], "spec"),
        ("from .. import doctor", ["trace"], "open"),
        ("def f():\n    from ptwprobe.patch.plan import plan", ["stub"], "assemble"),
        ("from ptwprobe.probe.spec import parse", [], "process"),
        ("import ptwprobe", ["probe"], "spec"),
    ],
)
def test_the_rule_finds_a_breach(source: str, package: list[str], module: str) -> None:
    assert len(breaches(source, package, module)) == 1


@pytest.mark.parametrize(
    ("source", "package", "module"),
    [
        ("from ptwprobe.probe.spec import parse\nfrom ptwprobe import _native", ["record"], "session"),
        ("from .plan import plan\nfrom ..model import Patch\nimport os", ["patch"], "install"),
        ("from ptwprobe.report import text", [], "cli"),
    ],
)
def test_the_rule_allows_what_it_should(source: str, package: list[str], module: str) -> None:
    assert breaches(source, package, module) == []
