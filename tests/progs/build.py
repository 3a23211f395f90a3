"""Compiles the test programs. How each is built stands in its first lines: ``// cc: FLAGS`` (or ``c++:``), and
``// needs: NAME`` for a library of ours that it links with. Folders in FLAGS count from the top of the source tree."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent
ROOT = SOURCES.parent.parent
_COMPILERS = {"cc": "gcc", "c++": "g++"}


class BuildError(Exception):
    """A test program does not compile; the text is the compiler's."""


def build(source: str | Path, into: Path, *, strip: bool = False) -> Path:
    """Compiles ``tests/progs/SOURCE.c`` or ``.cpp`` (or a path) into the folder ``into`` and returns the binary.

    A name that starts with ``lib`` becomes ``NAME.so``; programs find libraries in their own folder. Built once a
    folder: a binary that is already there is taken. ``strip`` removes all symbols (``NAME.stripped``).
    """
    path = source if isinstance(source, Path) else _find(source)
    suffix = (".so" if path.stem.startswith("lib") else "") + (".stripped" if strip else "")
    binary = into / f"{path.stem}{suffix}"
    if binary.exists():
        return binary
    compiler, flags, needs = _directives(path)
    libraries = [str(build(need, into)) for need in needs]
    partial = into / f"{binary.name}.partial"
    command = [compiler, "-Wall", "-Wextra", "-Werror", *flags, "-o", str(partial), str(path), *libraries]
    command += ["-Wl,-rpath,$ORIGIN", *(["-s"] if strip else [])]
    command += [flag for flag in flags if flag.startswith("-l")]
    if path.stem.startswith("lib"):
        command.append(f"-Wl,-soname,{binary.name}")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{path.name}: {done.stderr}")
    partial.rename(binary)
    return binary


def _find(name: str) -> Path:
    for suffix in (".c", ".cpp"):
        if (SOURCES / f"{name}{suffix}").exists():
            return SOURCES / f"{name}{suffix}"
    raise BuildError(f"no program {name} in {SOURCES}")


def _directives(path: Path) -> tuple[str, list[str], list[str]]:
    compiler = "gcc"
    flags: list[str] = []
    needs: list[str] = []
    for line in path.read_text().splitlines():
        directive = re.match(r"// (cc|c\+\+|needs): (.*)", line)
        if not directive:
            break
        if directive[1] == "needs":
            needs += directive[2].split()
        else:
            compiler, flags = _COMPILERS[directive[1]], directive[2].split()
    return compiler, flags, needs
