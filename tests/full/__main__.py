"""``python -m tests.full NAME [PYTEST-ARGUMENT]...``: ``tests/live/test_NAME.py`` at its full size.

Every commit runs the same tests at a size that takes seconds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

LIVE = Path(__file__).parent.parent / "live"


def main() -> int:
    names = sorted(path.stem.removeprefix("test_") for path in LIVE.glob("test_*.py"))
    parser = argparse.ArgumentParser(prog="python -m tests.full", description=__doc__)
    parser.add_argument("name", choices=names)
    options, rest = parser.parse_known_args()
    return int(pytest.main([str(LIVE / f"test_{options.name}.py"), "--full", "-v", *rest]))


if __name__ == "__main__":
    sys.exit(main())
