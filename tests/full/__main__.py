"""``python -m tests.full NAME [PYTEST-ARGUMENT]...``: ``tests/test_NAME.py`` or ``tests/live/test_NAME.py``, in full.

Every commit runs the same tests at a size that takes seconds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
LONG = ("decoder",)
"""Those beside ``live`` that have a long form."""


def main() -> int:
    files = [*(TESTS / "live").glob("test_*.py"), *(TESTS / f"test_{name}.py" for name in LONG)]
    by_name = {file.stem.removeprefix("test_"): file for file in files}
    parser = argparse.ArgumentParser(prog="python -m tests.full", description=__doc__)
    parser.add_argument("name", choices=sorted(by_name))
    options, rest = parser.parse_known_args()
    return int(pytest.main([str(by_name[options.name]), "--full", "-v", *rest]))


if __name__ == "__main__":
    sys.exit(main())
