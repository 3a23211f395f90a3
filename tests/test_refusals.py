"""That no reason of a refusal goes without a test of its name, and none without an explanation in the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ptwprobe.errors import RefusalReason

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def test_names() -> set[str]:
    names: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        names |= set(re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE))
    return names


@pytest.mark.parametrize("reason", RefusalReason, ids=lambda reason: reason.value)
def test_every_reason_has_a_test_by_its_name(reason: RefusalReason, test_names: set[str]) -> None:
    wanted = f"test_refusal_{reason.name.lower()}"
    assert any(name.startswith(wanted) for name in test_names)


@pytest.mark.parametrize("reason", RefusalReason, ids=lambda reason: reason.value)
def test_every_reason_is_raised_somewhere(reason: RefusalReason) -> None:
    sources = (p for p in (ROOT / "ptwprobe").rglob("*.py") if p.name != "errors.py")
    assert any(f"RefusalReason.{reason.name}" in source.read_text() for source in sources)


@pytest.mark.parametrize("reason", RefusalReason, ids=lambda reason: reason.value)
def test_every_reason_is_explained_to_users(reason: RefusalReason) -> None:
    assert f"`{reason.value}`" in (ROOT / "README.md").read_text()
