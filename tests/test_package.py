"""The package as it is shipped: what is in the wheel, and that the typed face of the native module is true."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from ptwprobe import _native

ROOT = Path(__file__).parent.parent


def test_the_stub_file_of_the_native_module_matches_the_built_module(tmp_path: Path) -> None:
    # pyo3 fills __all__ in by itself; the stub file need not repeat every name there.
    allowed = tmp_path / "allowed"
    allowed.write_text("ptwprobe._native.__all__\n")
    command = [sys.executable, "-m", "mypy.stubtest", "--concise", "--allowlist", str(allowed), "ptwprobe._native"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_template_of_the_source_tree_is_inside_the_native_module() -> None:
    templates = {path.stem: path.read_text() for path in (ROOT / "stubs").glob("*.s")}
    assert {name: _native.stub_template(name) for name in _native.stub_template_names()} == templates


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "maturin", "build", "--release", "--quiet", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [path] = out.glob("*.whl")
    assert "-abi3-" in path.name
    return zipfile.ZipFile(path)


def test_the_wheel_puts_one_name_into_site_packages(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {t for t in tops if not t.endswith((".dist-info", ".libs"))} == {"ptwprobe"}


def test_the_wheel_is_typed_and_holds_no_sources_of_the_crate(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    assert {"ptwprobe/py.typed", "ptwprobe/_native.pyi", "ptwprobe/__init__.py"} <= names
    assert not [n for n in names if n.startswith("ptwprobe/native/") or n.endswith((".rs", ".toml", ".s"))]
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "ptwprobe").rglob("*.py") if "native" not in p.parts}
    assert sources == {n for n in names if n.endswith(".py")}


def test_the_source_archive_has_all_that_a_build_needs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "maturin", "sdist", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [path] = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    native = ROOT / "ptwprobe/native"
    needed = [
        *native.glob("Cargo.*"),
        native / "build.rs",
        *(native / "src").rglob("*.rs"),
        *(ROOT / "stubs").glob("*.s"),
    ]
    assert {str(p.relative_to(ROOT)) for p in needed} <= names
