"""bpftrace: a uprobe whose BPF program sums both arguments up, which is about the least it can do with them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.peers import Hits, change_of
from tests.targets import Target


class Bpftrace:
    name = "bpftrace"

    def missing(self) -> str:
        return "" if shutil.which("bpftrace") else "not installed (package bpftrace)"

    @contextmanager
    def attached(self, target: Target, binary: Path, functions: list[str]) -> Iterator[Hits]:
        probes = ",".join(f"uprobe:{binary.resolve()}:{name}" for name in functions)
        program = f"{probes} {{ @a = sum(arg0); @b = sum(arg1); }}"
        command = ["bpftrace", "-f", "json", "-p", str(target.pid), "-e", program]
        changed = change_of(target, binary, functions)
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                changed()
                yield lambda: _hits(process)
            finally:
                if process.poll() is None:
                    process.kill()


def _hits(process: subprocess.Popen[str]) -> int:
    """Ends bpftrace, which prints its maps then. The second argument is always 7."""
    process.send_signal(signal.SIGINT)
    try:
        out, err = process.communicate(timeout=30)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError("bpftrace does not end") from error
    for line in out.splitlines():
        message = json.loads(line) if line.startswith("{") else {}
        if message.get("type") == "map" and "@b" in message["data"]:
            return int(message["data"]["@b"]) // 7
    raise RuntimeError(f"bpftrace printed no map: {out} {err}")
