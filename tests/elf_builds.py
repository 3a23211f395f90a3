"""Small programs and libraries for the tests of ELF resolving, compiled from source that stands in the tests."""

from __future__ import annotations

import ctypes
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

from ptwprobe.model import Site
from ptwprobe.probe.elf import resolve, resolve_file
from ptwprobe.probe.spec import parse
from ptwprobe.process import Process
from tests.targets import Target

WAIT = """
#include <stdio.h>
static void ready(void) { puts("ready"); fflush(stdout); getchar(); }
"""


# Tells the address of f before it waits.
TELLS = WAIT.replace("static", "extern int f(int);\nstatic").replace("puts", 'printf("f=%lx\\n", (long)f); puts')
ENDBR = ("-O1", "-fcf-protection=branch")
PLAIN = ("-O1", "-fcf-protection=none")
F = '__attribute__((noinline)) int f(int x) { asm volatile(""); return x * 3 + 1; }\n'
MAIN = "int main(void) { ready(); return f(1); }\n"


Start = Callable[..., Target]
"""The fixture ``start``."""


def run(*command: str | Path) -> str:
    """Output of a command that has to succeed."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def compiled(binary: Path, source: str, *flags: str, compiler: str = "gcc") -> Path:
    """``source`` compiled and linked into ``binary``."""
    suffix = ".cpp" if compiler == "g++" else ".c"
    path = binary.with_name(f"{binary.name}{suffix}")
    path.write_text(source)
    run(compiler, "-g0", "-o", binary, path, *flags)  # libraries count after what needs them
    return binary


def nm(binary: Path, *flags: str) -> dict[str, list[int]]:
    """Raw name → vaddrs of all defined functions and IFUNCs, as binutils see them."""
    out: dict[str, list[int]] = {}
    for line in run("nm", "--defined-only", *flags, binary).splitlines():
        vaddr, kind, name = line.split(maxsplit=2)
        if kind in "TtWwi":
            out.setdefault(name.partition("@")[0], []).append(int(vaddr, 16))
    return out


def split_debug(binary: Path, debug: Path) -> None:
    """Moves the symbols of ``binary`` into the separate file ``debug``."""
    run("objcopy", "--only-keep-debug", binary, debug)
    run("strip", "--strip-all", binary)


def add_debuglink(binary: Path, debug: Path) -> int:
    """Adds a .gnu_debuglink to ``debug``; returns the CRC in it."""
    run("objcopy", f"--add-gnu-debuglink={debug}", binary)
    return zlib.crc32(debug.read_bytes())


def add_mini_debuginfo(binary: Path) -> None:
    """Strips ``binary`` and puts its symbols into .gnu_debugdata, xz-compressed."""
    full = binary.with_name(f"{binary.name}.full")
    run("objcopy", "--only-keep-debug", binary, full)
    run("xz", "--keep", "--force", full)
    run("strip", "--strip-all", binary)
    run("objcopy", "--add-section", f".gnu_debugdata={full}.xz", binary)


def build_id(binary: Path) -> str:
    """The build id as readelf prints it."""
    for line in run("readelf", "--wide", "--notes", binary).splitlines():
        if "Build ID:" in line:
            return line.split()[-1]
    return ""


def one(text: str, target: Process | Path) -> Site:
    """The one site that the probe ``text`` has in a process or file."""
    probe = parse(text)
    [site] = resolve(probe, target) if isinstance(target, Process) else resolve_file(probe, str(target))
    return site


def told(target: Target) -> int:
    """The address that a program with ``TELLS`` in it has told."""
    return int(target.wait_for("f=")[2:], 16)


def address(library: ctypes.CDLL, name: str) -> int:
    """Where the dynamic linker says that a function of this process is."""
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
