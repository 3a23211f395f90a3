"""``python -m tests.bench NAME [--json] [--runs N] [--quick]``."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable

from rich.console import Console

from tests.bench import decode, hit_cost, pause, tolerance
from tests.bench.table import Result

BENCHES: dict[str, tuple[Callable[[int], Result], int]] = {
    "hit-cost": (hit_cost.run, 5),
    "pause": (pause.run, 5),
    "decode": (decode.run, 7),
    "tolerance": (tolerance.run, 1),
}
"""Name → the bench, and how many turns it takes unless told otherwise."""

QUICK = {"decode": functools.partial(decode.run, sizes=decode.QUICK)}
"""Those that have a form that shows within seconds that everything in it runs and agrees; its times mean nothing."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("name", choices=sorted(BENCHES))
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of a table")
    parser.add_argument("--runs", type=int, help="how often everybody takes a turn")
    parser.add_argument("--quick", action="store_true", help=f"one turn at inputs of toy size ({', '.join(QUICK)})")
    options = parser.parse_args()
    bench, runs = BENCHES[options.name]
    if options.quick:
        if options.name not in QUICK:
            parser.error(f"{options.name} has no quick form")
        bench, runs = QUICK[options.name], 1
    result = bench(options.runs or runs)
    if options.json:
        print(result.as_json())
    else:
        result.show(Console(width=None if sys.stdout.isatty() else 160))
    return 0 if all(verdict.ok for verdict in result.verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
