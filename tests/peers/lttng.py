"""LTTng-UST: a static tracepoint that is compiled into the program, recorded to disk by our own session daemon."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Discarded = Callable[[], int]

PROGRAM = Path(__file__).parent / "lttng_cost.c"
_SESSION = "ptwtest"


class Lttng:
    name = "lttng-ust"

    def missing(self) -> str:
        if not shutil.which("lttng-sessiond"):
            return "not installed (packages lttng-tools, liblttng-ust-dev)"
        if _other_daemon():
            return "another session daemon is running"
        return ""

    @contextmanager
    def recording(self) -> Iterator[tuple[dict[str, str], Discarded]]:
        """A running session with the program's events on: (environment for the program, discarded events so far)."""
        with tempfile.TemporaryDirectory() as home:
            environment = {**os.environ, "LTTNG_HOME": home, "LTTNG_UST_REGISTER_TIMEOUT": "-1"}

            def lttng(*words: str) -> str:
                done = subprocess.run(
                    ["lttng", "--no-sessiond", *words], env=environment, capture_output=True, text=True, check=False
                )
                if done.returncode:
                    raise RuntimeError(f"lttng {' '.join(words)}: {done.stdout}{done.stderr}")
                return done.stdout

            with (Path(home) / "daemon.log").open("wb") as log:
                daemon = subprocess.Popen(["lttng-sessiond", "--no-kernel"], env=environment, stdout=log, stderr=log)
                try:
                    _until_answers(lambda: lttng("list"))
                    lttng("create", _SESSION, "--output", f"{home}/trace")
                    lttng("enable-channel", "-u", "-s", _SESSION, "--subbuf-size=4M", "--num-subbuf=4", "c")
                    lttng("enable-event", "-u", "-s", _SESSION, "-c", "c", "hitcost:*")
                    lttng("start", _SESSION)
                    yield environment, lambda: _discarded(lttng("list", _SESSION))
                    lttng("destroy", _SESSION)
                finally:
                    daemon.terminate()
                    daemon.wait(30)


def _until_answers(ask: Callable[[], str]) -> None:
    end = time.monotonic() + 20
    while True:
        try:
            ask()
            return
        except RuntimeError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


def _discarded(listing: str) -> int:
    return sum(int(number) for number in re.findall(r"Discarded events: (\d+)", listing))


def _other_daemon() -> bool:
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            if comm.read_text().strip() == "lttng-sessiond" and (comm.parent / "exe").exists():
                return True
        except OSError:
            continue
    return False
