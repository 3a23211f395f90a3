"""The classic uprobe of tracefs: a trap per hit, recorded in a trace instance."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import tracefs
from tests.peers import Hits, change_of
from tests.symbols import function
from tests.targets import Target


class ClassicUprobe:
    name = "uprobe"

    def missing(self) -> str:
        return "" if tracefs.available() else "tracefs is not mounted or not writable"

    @contextmanager
    def attached(self, target: Target, binary: Path, functions: list[str]) -> Iterator[Hits]:
        events = [tracefs.Uprobe(name, binary, function(binary, name)[1], "a=%di:s64 b=%si:s64") for name in functions]
        changed = change_of(target, binary, functions)
        with tracefs.Uprobes(events, buffer_kb=4096) as uprobes:
            changed()
            yield uprobes.count
