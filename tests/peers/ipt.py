"""Intel's own decoder, libipt, behind a small driver of ours (``ipt_driver.c``)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.peers.auxdata import Image
from tests.peers.flow import Decoded, Lists
from tests.progs.build import build

_DRIVER = Path(__file__).parent / "ipt_driver.c"


class Ipt:
    """``folder`` takes the driver and its output."""

    name = "libipt"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @staticmethod
    def missing() -> str:
        return "" if Path("/usr/include/intel-pt.h").exists() else "not installed (package libipt-dev)"

    def decode(
        self, mode: str, aux: Path, images: Sequence[Image] = (), *, lists: bool = False, timeout_s: float = 120
    ) -> Decoded:
        """``mode``: ``insns``, which alone knows branches; ``blocks``; or ``packets``. ``aux``: one stream's trace."""
        driver = build(_DRIVER, self._folder)
        command = [str(driver), mode, str(aux)]
        for image in images:
            command += ["--image", f"{image.path}:{image.file_offset}:{image.size}:{image.addr}"]
        branches, hits = self._folder / "ipt-branches", self._folder / "ipt-hits"
        if lists:
            command += ["--branches", str(branches), "--hits", str(hits)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
        if done.returncode:
            raise RuntimeError(f"{self.name}: exit status {done.returncode}: {done.stderr}")
        told = json.loads(done.stdout)
        return Decoded(
            branches=told["branches"],
            hits=told["hits"],
            errors=told["errors"],
            cpu_s=told["cpu_s"],
            first_errors=[f"{error['offset']:#x}: {error['error']}" for error in told["first_errors"]],
            lists=Lists.read(branches, hits) if lists else None,
        )
