"""A probe's WHERE → the sites that it means, in a live process or in a file; and the functions that could be probed.

``objects.py`` finds the files, ``symbols.py`` the names, ``ifunc.py`` what IFUNCs are bound to; here they meet.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ptwprobe import _native
from ptwprobe.errors import RefusalReason, RefusedError, ResolveError
from ptwprobe.model import ObjectFile, Probe, Site
from ptwprobe.probe.fetch import unique
from ptwprobe.probe.ifunc import implementations
from ptwprobe.probe.objects import Loaded, best_named, find_objects, loaded_file, loaded_objects, objects
from ptwprobe.probe.spec import parse
from ptwprobe.probe.symbols import Symbol
from ptwprobe.process import Process

__all__ = ["FunctionRow", "event_name", "list_functions", "objects", "resolve", "resolve_file"]

_ENDBR64 = b"\xf3\x0f\x1e\xfa"
_MAX_EVENT_NAME = 48


@dataclass(frozen=True)
class FunctionRow:
    """A function as ``ptwprobe list`` shows it. ``kind`` is "func" or "ifunc" (whose ``vaddr`` is its resolver's);
    ``aliases`` are its other names, ``source`` the file of a static one where known; ``size`` in bytes."""

    name: str
    symbol: str
    object: ObjectFile
    vaddr: int
    file_offset: int
    size: int
    kind: str
    aliases: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class _Place:
    """A function of one object: ``name`` as shown, ``size`` 0 where not known."""

    loaded: Loaded
    name: str
    symbol: str
    vaddr: int
    size: int

    def site(self, offset: int) -> Site:
        """The site ``offset`` bytes into the function; a leading endbr64 is kept, its site is the instruction after."""
        elf = self.loaded.elf
        entry = len(_ENDBR64) if elf.code(self.vaddr, len(_ENDBR64)) == _ENDBR64 else 0
        is_entry = offset in (0, entry)
        return _site(self.loaded, self.vaddr + (entry if is_entry else offset), self, is_entry)


def _site(loaded: Loaded, vaddr: int, place: _Place | None, is_entry: bool) -> Site:
    file_offset = loaded.elf.file_offset(vaddr)
    if file_offset is None or not loaded.elf.is_code(vaddr):
        raise ResolveError(
            f"{loaded.name}: the address {vaddr:#x} is not in an executable segment", "take an offset inside a function"
        )
    return Site(
        loaded.file,
        place.name if place else "",
        place.symbol if place else "",
        place.vaddr if place else vaddr,
        place.size if place else 0,
        vaddr,
        file_offset,
        vaddr + loaded.file.bias,
        is_entry,
    )


# ---------------------------------------------------------------- probes


def resolve(probe: Probe, process: Process) -> list[Site]:
    """The sites of ``probe`` in ``process``: one for each function that it means, in each object that it means.

    Raises:
        ResolveError: there is no such object or function, or a plain name means several.
        RefusedError: IDENTITY_CHANGED, or ARGUMENTS_NEED_ENTRY for ``$argN`` at another place than an entry.
        UnsupportedError: the process is not 64-bit x86.
    """
    process.check_architecture()
    return _resolve(probe, find_objects(process, probe.where.obj), process)


def resolve_file(probe: Probe, path: str) -> list[Site]:
    """The sites of ``probe`` in the file at ``path``, with vaddrs for runtime addresses; errors as :func:`resolve`."""
    loaded = loaded_file(path)
    obj = probe.where.obj
    if obj is not None and obj not in (path, loaded.file.path) and not best_named(obj, [loaded], [loaded.name]):
        raise ResolveError(f"the probe is for the object {obj!r}, the file is {loaded.name}", "leave out the object")
    return _resolve(probe, [loaded], None)


def _resolve(probe: Probe, candidates: list[Loaded], process: Process | None) -> list[Site]:
    where = probe.where
    if where.file_offset is not None:
        found = [_at_file_offset(loaded, where.file_offset) for loaded in candidates]
    else:
        found = [site for loaded in candidates for site in _at_function(probe, loaded, process)]
        if not found:
            raise _not_found(probe, candidates, process)
    sites = {(site.object.path, site.runtime_addr): site for site in found}
    for site in sites.values():
        if not site.is_entry and any(argument.entry_only for argument in probe.arguments):
            raise RefusedError(
                RefusalReason.ARGUMENTS_NEED_ENTRY,
                f"$argN is known at a function's entry only, {_describe(site)} is none that a symbol names",
                "name the registers that hold the values there (%rdi, …), or probe the function's entry",
            )
    return list(sites.values())


def _describe(site: Site) -> str:
    if site.function:
        return f"{site.function}+{site.vaddr - site.function_vaddr:#x}"
    return f"file offset {site.file_offset:#x}"


def _at_file_offset(loaded: Loaded, file_offset: int) -> Site:
    vaddr = loaded.elf.code_vaddr(file_offset)
    if vaddr is None:
        code = ", ".join(
            f"{s.file_offset:#x}-{s.file_offset + s.file_size:#x}" for s in loaded.elf.loads if s.executable
        )
        raise ResolveError(
            f"{loaded.name}: file offset {file_offset:#x} is not in an executable segment", f"code is at {code or '-'}"
        )
    symbol = loaded.symbols.containing(vaddr)
    if symbol is None:
        return _site(loaded, vaddr, None, False)
    return _place(loaded, symbol).site(vaddr - symbol.vaddr)


def _place(loaded: Loaded, symbol: Symbol, name: str = "") -> _Place:
    table = loaded.symbols
    return _Place(loaded, name or table.display(symbol), symbol.name, symbol.vaddr, table.size(symbol))


def _at_function(probe: Probe, loaded: Loaded, process: Process | None) -> Iterator[Site]:
    pattern = probe.where.function or ""
    symbols, is_glob = loaded.symbols.find(pattern)
    if len(symbols) > 1 and not is_glob:
        raise _ambiguous(pattern, loaded, symbols)
    for symbol in symbols:
        try:
            places = _implementations(loaded, symbol, process) if symbol.ifunc else [_place(loaded, symbol)]
        except ResolveError:
            if is_glob:
                continue  # of many functions, one that nothing has bound cannot be hit
            raise
        for place in places:
            if place.size and probe.where.offset >= place.size:
                raise ResolveError(
                    f"{place.name}+{probe.where.offset:#x} is beyond the end of {place.name}",
                    f"the function has {place.size:#x} bytes",
                )
            yield place.site(probe.where.offset)


def _implementations(loaded: Loaded, symbol: Symbol, process: Process | None) -> list[_Place]:
    if process is None:
        raise ResolveError(
            f"{loaded.name}:{symbol.name} is an IFUNC: which implementation runs is decided in a process",
            "name a process (-p PID), or an implementation by its own name",
        )
    places = []
    for vaddr in implementations(process, loaded, symbol, lambda: loaded_objects(process)):
        inner = next(iter(loaded.symbols.at(vaddr)), None)
        if inner:
            places.append(_place(loaded, inner, symbol.name))
        else:
            places.append(_Place(loaded, symbol.name, symbol.name, vaddr, 0))
    return places


def _ambiguous(pattern: str, loaded: Loaded, symbols: list[Symbol]) -> ResolveError:
    lines = []
    for symbol in symbols[:20]:
        where = f"vaddr {symbol.vaddr:#x}, write {loaded.name}:{loaded.elf.file_offset(symbol.vaddr) or 0:#x}"
        source = f" of {symbol.source}" if symbol.source else ""
        lines.append(f"  {loaded.symbols.display(symbol)}{source}: {where}")
    if len(symbols) > 20:
        lines.append(f"  and {len(symbols) - 20} more")
    return ResolveError(
        f"{loaded.name} has {len(symbols)} functions {pattern!r}:\n" + "\n".join(lines),
        f"say which by its file offset, as {loaded.name}:0xFILEOFFSET",
    )


def _not_found(probe: Probe, candidates: list[Loaded], process: Process | None) -> ResolveError:
    pattern = probe.where.function or ""
    names = ", ".join(sorted({loaded.name for loaded in candidates})[:5])
    near = [name for loaded in candidates[:5] for name in loaded.symbols.near(pattern)][:5]
    elsewhere = []
    if process is not None and probe.where.obj is None:
        elsewhere = [loaded.name for loaded in loaded_objects(process) if loaded.symbols.named(pattern)]
    if elsewhere:
        hint = f"{elsewhere[0]} has it: write {elsewhere[0]}:{pattern}"
    elif near:
        hint = f"similar names: {', '.join(near)}"
    elif any(loaded.symbols.functions for loaded in candidates):
        hint = "ptwprobe list shows the functions"
    else:
        hint = "it has no symbols: install its debug symbols, or probe OBJ:0xFILEOFFSET"
    return ResolveError(f"no function {pattern!r} in {names}", hint)


# ---------------------------------------------------------------- names


def event_name(probe: Probe, site: Site, taken: set[str]) -> str:
    """``group/name`` for an event of ``probe`` at ``site``, made different from those in ``taken``.

    Not given by the probe, the group is ``probe_`` and the object's name up to its first odd character, the name that
    of the function, with the offset (hex, in bytes) if the site is not its entry.
    """
    base = re.match(r"\w*", site.object.path.rpartition("/")[2], re.ASCII)
    group = probe.group or f"probe_{(base and base.group()) or 'object'}"
    return unique(f"{group}/{probe.name or _default_name(site)}", taken)


def _default_name(site: Site) -> str:
    if not site.function:
        return f"at_{site.file_offset:x}"
    both = _native.demangle(site.symbol)
    words = both[1] if both else site.function
    name = re.sub(r"\W+", "_", words, flags=re.ASCII).strip("_")[:_MAX_EVENT_NAME]
    name = f"_{name}" if not name or name[0].isdigit() else name
    return name if site.is_entry else f"{name}_{site.vaddr - site.function_vaddr:x}"


def list_functions(target: Process | str, pattern: str | None = None) -> Iterator[FunctionRow]:
    """The functions of a process (of its main program, unless the pattern names an object) or of the file ``target``.

    ``pattern`` is a WHERE of the probe language: a function or glob, with an object or without; None for all.

    Raises:
        ProbeSyntaxError, ResolveError: the pattern does not parse, or names no object.
    """
    where = parse(pattern or "*").where
    for loaded in [loaded_file(target)] if isinstance(target, str) else find_objects(target, where.obj):
        symbols = loaded.symbols.find(where.function or "*")[0]
        for symbol in symbols:
            others = {loaded.symbols.display(other) for other in loaded.symbols.at(symbol.vaddr)}
            name = loaded.symbols.display(symbol)
            yield FunctionRow(
                name,
                symbol.name,
                loaded.file,
                symbol.vaddr,
                loaded.elf.file_offset(symbol.vaddr) or 0,
                loaded.symbols.size(symbol),
                "ifunc" if symbol.ifunc else "func",
                tuple(sorted(others - {name})),
                symbol.source,
            )
