"""What stock perf makes of a perf.data of ours."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

LINE = re.compile(
    r"\s*(?P<comm>\S+)\s+(?P<tid>\d+)\s+(?:\[\d+\]\s+)?(?P<sec>\d+)\.(?P<ns>\d{9}):\s+ptwrite:\s+IP: 1 payload: "
    r"(?P<payload>0|0x[0-9a-f]+)\b.*?\s(?P<ip>[0-9a-f]+) (?:\[unknown\]|ptwprobe:)"
)

Word = tuple[str, int, int, int, int]
"""comm, tid, ns, payload, address."""


def perf_words(perf_data: Path, itrace: str) -> list[Word]:
    command = ["perf", "script", "--ns", f"--itrace={itrace}", "-i", str(perf_data)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert "trace error" not in done.stdout + done.stderr
    words = []
    for line in done.stdout.splitlines():
        match = LINE.match(line)
        assert match, line
        at = int(match["sec"]) * 10**9 + int(match["ns"])
        words.append((match["comm"], int(match["tid"]), at, int(match["payload"], 0), int(match["ip"], 16)))
    return words
