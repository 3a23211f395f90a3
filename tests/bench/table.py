"""The rows of a benchmark, the machine they were measured on, and how both are shown."""

from __future__ import annotations

import json
import os
import platform
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """``who`` did ``case`` at ``value`` ``unit``, the median of ``runs`` (same unit)."""

    case: str
    who: str
    unit: str
    runs: tuple[float, ...]

    @property
    def value(self) -> float:
        return statistics.median(self.runs)


@dataclass(frozen=True)
class Verdict:
    """A bound that was promised: ``text`` says which and by how much it is kept or missed."""

    ok: bool
    text: str


@dataclass
class Result:
    """What one benchmark found. ``notes``: who could not take part and why, and anything else a reader must know.
    ``by_case``: one line per case is shown rather than one per participant.
    """

    bench: str
    rows: list[Row] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    by_case: bool = False

    def value(self, case: str, who: str) -> float | None:
        return next((row.value for row in self.rows if (row.case, row.who) == (case, who)), None)

    def as_json(self) -> str:
        rows = [
            {"case": r.case, "who": r.who, "value": round(r.value, 3), "unit": r.unit, "runs": list(r.runs)}
            for r in self.rows
        ]
        content = {
            "bench": self.bench,
            "machine": machine(),
            "rows": rows,
            "verdicts": [asdict(v) for v in self.verdicts],
            "notes": self.notes,
        }
        return json.dumps(content, indent=2)

    def show(self, console: Console) -> None:
        """One line per participant, one column per case, or the other way round; the runs' spread in brackets."""
        m = machine()
        console.print(f"{self.bench} on {m['cpu']}, {m['cores']} cores, Linux {m['kernel']}, load {m['load']}")
        cells = {(row.case, row.who): row for row in self.rows}
        cases, everybody = (list(dict.fromkeys(key[index] for key in cells)) for index in (0, 1))
        units = sorted({row.unit for row in self.rows})
        table = Table(title=f"{', '.join(units)}: median (lowest-highest of the runs)")
        table.add_column("case" if self.by_case else "who")
        for heading in everybody if self.by_case else cases:
            table.add_column(heading, justify="right")
        for line in cases if self.by_case else everybody:
            keys = [(line, who) for who in everybody] if self.by_case else [(case, line) for case in cases]
            table.add_row(line, *(_cell(cells.get(key)) for key in keys))
        console.print(table)
        for verdict in self.verdicts:
            console.print(f"{'PASS' if verdict.ok else 'FAIL'}  {verdict.text}", highlight=False)
        for note in self.notes:
            console.print(f"note: {note}", highlight=False)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"{row.value:,.1f} ({min(row.runs):,.1f}-{max(row.runs):,.1f})"


def machine() -> dict[str, str | int]:
    """What a reader needs to judge the figures."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name")), "?")
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "virtual": "yes" if " hypervisor " in f"{cpuinfo} " else "no",
        "load": Path("/proc/loadavg").read_text().split()[0],
    }
