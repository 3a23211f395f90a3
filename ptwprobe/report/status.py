"""What ``status`` and ``detach`` print: processes that have something of ours in them, and what was taken out.

Responsible for the words only; looking and restoring is in ``patch.found`` and ``patch.recover``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ptwprobe.patch.found import Found, SiteState, State
from ptwprobe.patch.recover import Restored, describe


def as_json(processes: Sequence[Found]) -> dict[str, Any]:
    """One object; addresses are hexadecimal strings."""
    return {"processes": [_process_as_json(one) for one in processes]}


def _process_as_json(one: Found) -> dict[str, Any]:
    return {
        "pid": one.process.pid,
        "comm": one.comm,
        "state": one.state.value,
        "recorder": one.recorder or None,
        "journal": str(one.entry.path) if one.entry else None,
        "journal_problem": one.journal_problem or None,
        "sites": [
            {
                "addr": hex(site.addr),
                "object": site.path,
                "state": site.state.value,
                "stub": hex(site.stub_addr),
                "memory": site.memory.hex(),
            }
            for site in one.sites
        ],
        "mappings": [{"kind": area.kind.value, "start": hex(area.start), "end": hex(area.end)} for area in one.areas],
        "files": list(one.files),
        "unknown": list(one.unknown),
    }


def as_text(one: Found) -> Iterator[str]:
    """A line for the process, and an indented one for each thing in it."""
    return map(printable, _lines(one))


def _lines(one: Found) -> Iterator[str]:
    yield f"{one.process.pid:>7}  {one.state.value:<10}  {one.comm:<15}  {_explain(one)}"
    for site in one.sites:
        yield f"{'':>9}{site.state.value:<10}  {site.path} at {site.addr:#x}{_detail(site.state, describe(site))}"
    for area in one.areas:
        yield f"{'':>9}{area.kind.value:<10}  {area.start:#x}-{area.end:#x}"
    for fd in one.files:
        yield f"{'':>9}{'file':<10}  descriptor {fd}"
    for text in one.unknown:
        yield f"{'':>9}{'unknown':<10}  {text}"
    if one.journal_problem:
        yield f"{'':>9}{'journal':<10}  not used: {one.journal_problem}"


def _detail(state: SiteState, text: str) -> str:
    return f": {text}" if state in (SiteState.CHANGED, SiteState.NO_STUB) else ""


def _explain(one: Found) -> str:
    pid = one.process.pid
    if one.state is State.RECORDED:
        return f"by ptwprobe (pid {one.recorder})" if one.recorder else "by another ptwprobe"
    if one.state is State.INHERITED:
        return f"by fork from a recorded process; ptwprobe detach -p {pid}"
    if one.state is State.KEPT:
        return f"the code is restored; stubs stay while a thread is in one; ptwprobe detach -p {pid}"
    return f"its recorder is gone; ptwprobe detach -p {pid}"


def restored(done: Restored) -> Iterator[str]:
    """What was done to one process."""
    return map(printable, _restored_lines(done))


def _restored_lines(done: Restored) -> Iterator[str]:
    who = f"process {done.process.pid} ({done.comm})"
    if not done.sites and not done.areas and not done.left:
        yield f"{who}: has nothing of ptwprobe"
        return
    yield f"{who}: {_count(done.sites, 'site')} restored, {_count(done.areas, 'mapping')} taken out"
    if done.journal_problem:
        yield f"  its journal was not used: {done.journal_problem}"
    for text in done.left:
        yield f"  stays: {text}"


def printable(text: str) -> str:
    """Names are the processes' own: what would steer a terminal is shown as its number."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
