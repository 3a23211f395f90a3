"""Code whose runtime asks more of a stub than the machine does: faults are looked up by address, stacks are small.

Which bytes a patch may take is decided in ``plan``; this is about what runs around them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePath

from ptwprobe._native import first_that_may_fault
from ptwprobe.errors import InputError, RefusalReason
from ptwprobe.model import Argument, Site, StubForm, Window
from ptwprobe.patch.refusals import refused
from ptwprobe.probe.elffile import open_elf
from ptwprobe.stub.forms import needs_stack

_GO_SECTIONS = (".go.buildinfo", ".gopclntab", ".data.rel.ro.gopclntab", ".note.go.buildid")
_GO_TRUSTED = ("r14",)
"""The current goroutine, in Go's own calling convention."""
_WASM_SECTIONS = (".wasmtime.traps", ".wasmtime.engine")
"""Of code that wasmtime compiled. Its handler, and V8's, look for addresses in compiled modules only."""
_FAULT_HANDLERS = {
    "libjvm": "the Java VM",
    "libcoreclr": ".NET",
    "libmonosgen": "Mono",
    "libgo": "gccgo's runtime",
    "libgnat": "Ada's runtime",
    "libgnarl": "Ada's runtime",
}
"""Libraries, by the start of their names, whose handlers tell by the address what a fault in the process means."""
_UNDEFINED = b"\x0f\x0b"


def is_go(site: Site) -> bool:
    """Whether the site is in code that the Go compiler made."""
    return _has_section(site, _GO_SECTIONS)


def check_runtime(
    site: Site, window: Window, arguments: Sequence[Argument], form: StubForm, mapped: Iterable[str], traced: bool
) -> None:
    """Raises RefusedError (small-stack, may-fault) where ``window`` must not be patched with a stub of ``form``.

    ``mapped``: paths of what the process has mapped as code; ``traced``: it stays traced as long as the patch is in.
    """
    go = is_go(site)
    if go and needs_stack(form, arguments, site.runtime_addr):
        raise refused(
            site,
            window.displaced,
            RefusalReason.SMALL_STACK,
            "goroutines run on small stacks without a guard, and a stub of this form needs some",
            "a classic uprobe (one trap per hit) works at this site; C code of the same process can be probed",
        )
    if traced:
        return
    faults = first_that_may_fault(window.displaced, window.site_addr, _GO_TRUSTED if go else ())
    if faults is None:
        return
    who = _who_looks(site, go, mapped)
    if window.displaced[faults:].startswith(_UNDEFINED):
        who = who or "what follows an undefined instruction is reached by a handler only, which"
    if who:
        raise refused(
            site,
            window.displaced,
            RefusalReason.MAY_FAULT,
            f"byte {faults} begins an instruction that may fault, and {who} would look for its address",
            "a value that is read through a pointer (+0(...)) makes ptwprobe stay attached, which corrects the address;"
            " or a classic uprobe (one trap per hit) works at this site",
        )


def _who_looks(site: Site, go: bool, mapped: Iterable[str]) -> str:
    if go:
        return "the Go runtime"
    if _has_section(site, _WASM_SECTIONS):
        return "the WebAssembly runtime"
    names = {PurePath(path).name for path in mapped}
    return next((who for start, who in _FAULT_HANDLERS.items() if any(_is_library(n, start) for n in names)), "")


def _is_library(name: str, start: str) -> bool:
    """``libgo.so.21`` is a ``libgo``, ``libgomp.so`` is not."""
    return name.startswith(start) and name[len(start) :].startswith((".so", "-"))


def _has_section(site: Site, names: Sequence[str]) -> bool:
    try:
        elf = open_elf(site.object.open_path, site.object.path)
    except InputError:
        return False
    return any(elf.section(name) is not None for name in names)
