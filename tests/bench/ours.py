"""ptwprobe as a participant of the benches, in each form that a stub can have."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.peers import Hits, Peer, change_of
from tests.targets import Target

COMMAND = [str(Path(sys.executable).parent / "ptwprobe")]


class Ring:
    """The whole way: stubs, ring, recorder, session on disk."""

    name = "ptwprobe/ring"

    def missing(self) -> str:
        return ""

    @contextmanager
    def attached(self, target: Target, binary: Path, functions: list[str]) -> Iterator[Hits]:
        with tempfile.TemporaryDirectory() as folder:
            probes = [word for name in functions for word in ("-e", f"{name} a=$arg1 b=$arg2")]
            output = ["--channel", "ring", "-o", f"{folder}/hits.ptw", "--json"]
            command = [*COMMAND, "record", "-p", str(target.pid), *probes, *output]
            changed = change_of(target, binary, functions)
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
                try:
                    changed()
                    yield lambda: _stop(process)
                finally:
                    if process.poll() is None:
                        process.send_signal(signal.SIGINT)


def _stop(process: subprocess.Popen[str]) -> int:
    """Ends the recording and returns the hits; a lost one makes the figure worthless, since it costs less."""
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    if process.returncode:
        raise RuntimeError(f"ptwprobe record: exit code {process.returncode}: {err}")
    totals = json.loads(out)["totals"]
    return int(totals["hits"])


def variants() -> list[Peer]:
    return [Ring()]
