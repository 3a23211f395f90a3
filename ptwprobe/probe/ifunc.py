"""Which implementation of an IFUNC a process uses: read from the words that its dynamic linker has bound.

An IFUNC symbol's own address is its resolver, which runs once at load time; a probe there would never fire.
"""

from __future__ import annotations

from collections.abc import Callable

from ptwprobe.errors import NotYetError, PermissionDeniedError
from ptwprobe.probe.dynamic import irelative_words, symbol_words
from ptwprobe.probe.objects import Loaded
from ptwprobe.probe.symbols import Symbol
from ptwprobe.process import Process


def implementations(
    process: Process, owner: Loaded, symbol: Symbol, all_loaded: Callable[[], list[Loaded]]
) -> list[int]:
    """vaddrs in ``owner`` of the implementations that ``symbol`` is bound to, by ``owner`` itself or else by any of
    ``all_loaded()``.

    Raises:
        NotYetError: nothing in the process has bound it.
    """
    found = {
        vaddr
        for word in irelative_words(owner.elf, symbol.vaddr)
        if (vaddr := _bound(process, owner, owner, word, symbol)) is not None
    }
    if not found:
        names = {alias.name for alias in owner.symbols.at(symbol.vaddr)}
        found = {
            vaddr
            for other in all_loaded()
            for word in symbol_words(other.elf, names)
            if (vaddr := _bound(process, owner, other, word, symbol)) is not None
        }
    if not found:
        raise NotYetError(
            f"{owner.name}:{symbol.name} is an IFUNC, and nothing in process {process.pid} has bound it yet",
            f"probe an implementation by its own name; ptwprobe list -p {process.pid} shows them",
        )
    return sorted(found)


def _bound(process: Process, owner: Loaded, other: Loaded, word_vaddr: int, symbol: Symbol) -> int | None:
    """The function of ``owner`` that the word in ``other`` holds the address of; None for anything else.

    A word that is not bound yet points into the PLT of ``other``; one that somebody interposed, into another object.
    """
    try:
        value = int.from_bytes(process.read(word_vaddr + other.file.bias, 8), "little")
    except PermissionDeniedError:
        return None
    vaddr = value - owner.file.bias
    if vaddr == symbol.vaddr or not owner.elf.is_code(vaddr) or owner.elf.is_plt(vaddr):
        return None
    return vaddr
