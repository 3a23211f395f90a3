"""What could be probed and how, without changing anything: the verbs ``list`` and ``stub``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ptwprobe.errors import RefusedError
from ptwprobe.model import Argument, Patch, RingLayout, Site, StubForm, ThreadIdSource, Window
from ptwprobe.patch import build, plan
from ptwprobe.patch.codemaps import code_map
from ptwprobe.patch.pages import CodePages
from ptwprobe.patch.place import AddressSpace, Allocator, lowest_mappable, read_brk_start
from ptwprobe.patch.runtimes import check_runtime
from ptwprobe.probe import elf
from ptwprobe.probe.spec import parse
from ptwprobe.process import Process
from ptwprobe.record.instrument import with_owner
from ptwprobe.stub.operands import has_load

FIRST_EVENT_ID = 0x8000


@dataclass(frozen=True)
class Row:
    """One function; ``tactic`` and ``refusal`` are None unless sites were asked for."""

    function: elf.FunctionRow
    site: Site | None
    tactic: str | None = None
    refusal: RefusedError | None = None

    def as_json(self) -> dict[str, Any]:
        """The row of ``list --json``."""
        f = self.function
        row: dict[str, Any] = {
            "function": f.name,
            "symbol": f.symbol,
            "object": f.object.path,
            "build_id": f.object.build_id,
            "vaddr": f.vaddr,
            "file_offset": f.file_offset,
            "size": f.size,
            "kind": f.kind,
            "aliases": list(f.aliases),
        }
        if self.site is not None:
            row["site"] = self.site.runtime_addr
            row["tactic"] = self.tactic
            row["refusal"] = self.refusal.reason.value if self.refusal else None
            row["hint"] = self.refusal.hint if self.refusal else None
        return row

    def as_text(self) -> str:
        """The line of ``list``."""
        f = self.function
        also = f"  (also {', '.join(f.aliases)})" if f.aliases else ""
        kind = "  ifunc" if f.kind == "ifunc" else ""
        name = f"{f.object.path.rpartition('/')[2]}:{f.name}"
        if self.site is None:
            return f"{f.vaddr:#014x} {f.size:>7}  {name}{kind}{also}"
        how = f"{self.refusal.reason.value} ({self.refusal.hint})" if self.refusal else self.tactic
        return f"{self.site.runtime_addr:#014x} {f.size:>7}  {name}{kind}{also}  {how}"


def rows(pid: int | None, file: str | None, pattern: str | None, sites: bool) -> Iterator[Row]:
    """The functions of process ``pid`` or of ``file`` that match ``pattern``; with ``sites``, each one planned."""
    process = _process(pid)
    for function in elf.list_functions(process or str(file), pattern):
        if not sites or function.kind == "ifunc":
            yield Row(function, None)
            continue
        site = Site(
            object=function.object,
            function=function.name,
            symbol=function.symbol,
            function_vaddr=function.vaddr,
            function_size=function.size,
            vaddr=function.vaddr,
            file_offset=function.file_offset,
            runtime_addr=function.vaddr + function.object.bias,
            is_entry=True,
        )
        site = plan.entry_after_endbr(site, code_map(site.object).bytes(site.vaddr, 4))
        try:
            yield Row(function, site, _window(site, process, (), StubForm.RING).tactic.value)
        except RefusedError as error:
            yield Row(function, site, None, error)


def dry_run(pid: int | None, file: str | None, probe_text: str, form: str) -> Iterator[tuple[str, bool]]:
    """For each site of the probe: the text to show, and whether it can be patched."""
    probe = parse(probe_text)
    process = _process(pid)
    sites = elf.resolve(probe, process) if process else elf.resolve_file(probe, str(file))
    if process:
        maps = process.maps()
        space = AddressSpace.of(maps, read_brk_start(process.pid), process.rlimit_stack, lowest_mappable())
    else:
        space = AddressSpace.of(_model_maps(sites), 0, None, lowest_mappable())
    allocator = Allocator(space)
    for event_id, site in enumerate(sites, FIRST_EVENT_ID):
        try:
            window = _window(site, process, probe.arguments, StubForm(form))
            patch = build.build_patch(
                site, event_id, probe.arguments, window, allocator, StubForm(form), _MODEL_RING, probe.paced
            )
        except RefusedError as error:
            yield f"{_where(site)}\n  {error}\n  hint: {error.hint}\n", False
        else:
            yield _describe(patch), True


def _process(pid: int | None) -> Process | None:
    """The process ``pid``, if it is one that can be probed."""
    if pid is None:
        return None
    process = Process(pid)
    process.check_architecture()
    return process


def _window(site: Site, process: Process | None, arguments: Sequence[Argument], form: StubForm) -> Window:
    code = code_map(site.object)
    mapped: list[str] = []
    if process is not None:
        try:
            window = plan.plan_window(site, process.read, code, CodePages(process).can_switch)
        except RefusedError as error:
            raise with_owner(error, site, process) from None
        mapped = [m.path for m in process.maps() if m.executable]
    else:
        window = plan.plan_window(site, lambda addr, size: code.bytes(addr - site.object.bias, size), code)
    check_runtime(site, window, arguments, form, mapped, any(map(has_load, arguments)))
    return window


@dataclass(frozen=True)
class _ModelMapping:
    start: int
    end: int
    path: str


def _model_maps(sites: list[Site]) -> list[_ModelMapping]:
    """The address space that a file alone would have: its own code around the sites."""
    if not sites:
        return []
    low = min(s.runtime_addr for s in sites) & ~0xFFF
    high = (max(s.runtime_addr for s in sites) | 0xFFF) + 1
    return [_ModelMapping(low, high, sites[0].object.path)]


_MODEL_RING = RingLayout(
    control_addr=0x7F00_0000_0000,
    data_addr=0x7F00_0010_0000,
    rings=1,
    ring_bits=24,
    gate_addr=0x7F00_0200_0000,
    load_gate_addr=0x7F00_0000_0080,
    load_gate_value=1,
    thread_id=ThreadIdSource.TLS_FIELD,
    thread_id_offset=0x2D0,
    use_rdpid=True,
)
"""Stands for the ring that a recording would map; only its addresses in the listing are not the real ones."""


def _where(site: Site) -> str:
    name = site.function or f"{site.file_offset:#x}"
    inside = site.vaddr - site.function_vaddr
    offset = f"+{inside:#x}" if site.function and inside else ""
    return f"{site.object.path}:{name}{offset} at {site.runtime_addr:#x} (file offset {site.file_offset:#x})"


def _describe(patch: Patch) -> str:
    window = patch.window
    lines = [
        _where(patch.site),
        f"  tactic: {window.tactic.value}; {len(window.displaced)} bytes displaced, {window.written} written",
        f"  old: {patch.old.hex(' ')}",
        f"  new: {patch.new.hex(' ')}",
        f"  stub: {len(patch.stub.code)} bytes at {patch.stub.addr:#x}, continues at {window.continue_addr:#x}",
    ]
    lines += [f"    {line}" for line in patch.stub.listing]
    return "\n".join(lines) + "\n"
