"""``python -m tests.bench NAME [--json] [--runs N]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from rich.console import Console

from tests.bench import hit_cost, pause
from tests.bench.table import Result

BENCHES: dict[str, Callable[[int], Result]] = {"hit-cost": hit_cost.run, "pause": pause.run}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("name", choices=sorted(BENCHES))
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of a table")
    parser.add_argument("--runs", type=int, default=5, help="how often everybody takes a turn (default 5)")
    options = parser.parse_args()
    result = BENCHES[options.name](options.runs)
    if options.json:
        print(result.as_json())
    else:
        result.show(Console(width=None if sys.stdout.isatty() else 160))
    return 0 if all(verdict.ok for verdict in result.verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
