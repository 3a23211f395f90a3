"""Stock perf's decoder: ``perf script`` with a filter of ours (``perf_branches.c``) that takes every sample."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import threading
from pathlib import Path

from tests.peers.flow import Decoded, Lists
from tests.progs.build import BuildError, build

_FILTER = Path(__file__).parent / "perf_branches.c"
_ERROR = re.compile(r"instruction trace error type 1 .*?(code \d+: .*)")


class PerfTimeoutError(TimeoutError):
    """perf did not end (on cut files it never does)."""


class PerfPt:
    """``folder`` takes the filter and its output."""

    name = "perf"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @staticmethod
    def missing() -> str:
        if not shutil.which("perf"):
            return "not installed (package linux-perf)"
        if not Path("/usr/include/perf/perf_dlfilter.h").exists():
            return "its perf_dlfilter.h is not installed"
        return ""

    def decode(self, perf_data: Path, itrace: str, *, lists: bool = False, timeout_s: float = 120) -> Decoded:
        """``itrace``: ``b`` branches, ``w`` PTWRITEs, ``e`` errors, ``q`` without a walk through code."""
        counts, branches, hits = (self._folder / f"perf-{name}" for name in ("counts", "branches", "hits"))
        counts.unlink(missing_ok=True)
        arguments = [counts, branches, hits] if lists else [counts]
        with tempfile.TemporaryDirectory(dir=self._folder) as home:
            # Code comes from the files that the trace names: not from a cache of build ids, nor by what a user's
            # configuration says.
            command = ["perf", "--buildid-dir", f"{home}/none", "script", f"--itrace={itrace}", "-i", str(perf_data)]
            command += ["--dlfilter", str(self._filter())]
            for argument in arguments:
                command += ["--dlarg", str(argument)]
            status, usage, output = _run(command, {**os.environ, "HOME": home}, timeout_s)
        if status or not counts.exists():
            raise RuntimeError(f"{self.name}: exit status {status}: {output[-1000:]}")
        told = json.loads(counts.read_text())
        errors = _ERROR.findall(output)
        return Decoded(
            branches=told["branches"],
            hits=told["hits"],
            errors=len(errors),
            cpu_s=usage.ru_utime + usage.ru_stime,
            first_errors=errors[:64],
            lists=Lists.read(branches, hits) if lists else None,
        )

    def _filter(self) -> Path:
        try:
            return build(_FILTER, self._folder)
        except BuildError as error:
            raise RuntimeError(f"{self.name}: {error}") from error


def _run(command: list[str], environment: dict[str, str], timeout_s: float) -> tuple[int, resource.struct_rusage, str]:
    """Exit status, what it used, its output of both kinds. Killed after ``timeout_s``."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        child = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        late = threading.Event()

        def end() -> None:
            late.set()
            os.kill(child.pid, signal.SIGKILL)

        timer = threading.Timer(timeout_s, end)
        timer.start()
        try:
            # Not yet waited for, so that its number is its own while the timer runs.
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        except BaseException:
            child.kill()
            raise
        finally:
            timer.cancel()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if late.is_set():
            raise PerfTimeoutError(f"{' '.join(command)}: not at its end after {timeout_s} s")
        output.seek(0)
        return child.returncode, usage, output.read()
