"""Which files a process has loaded and where, which one an OBJ means; checked against the program and readelf."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from ptwprobe.errors import RefusalReason, RefusedError, ResolveError, UnsupportedError
from ptwprobe.probe.elf import objects, resolve
from ptwprobe.probe.elffile import Segment
from ptwprobe.probe.objects import best_named, biases
from ptwprobe.probe.spec import parse
from ptwprobe.process import Mapping, Process
from tests.elf_builds import MAIN, PLAIN, TELLS, WAIT, F, Start, address, build_id, compiled, nm, one, run, told


@pytest.fixture
def me() -> Process:
    return Process(os.getpid())


# ---------------------------------------------------------------- where objects lie


@pytest.mark.parametrize(
    "flags",
    [
        ("-pie",),
        ("-no-pie", "-fno-pie"),
        ("-static", "-no-pie", "-fno-pie"),
        ("-static-pie",),
        ("-pie", "-Wl,-z,noseparate-code"),
        ("-pie", "-Wl,-Ttext=0x800000"),  # p_vaddr != p_offset
        ("-pie", "-Wl,-z,max-page-size=0x200000"),
        ("-no-pie", "-fno-pie", "-Wl,-Ttext-segment=0x10000000"),
        ("-static", "-no-pie", "-fno-pie", "-Wl,-z,noseparate-code"),
    ],
    ids=" ".join,
)
def test_addresses_are_those_of_the_running_program(flags: tuple[str, ...], tmp_path: Path, start: Start) -> None:
    binary = compiled(tmp_path / "prog", TELLS + F + MAIN, *PLAIN, *flags)
    child = start(binary)
    process = Process(child.pid)
    site = one("f $arg1", process)
    assert site.runtime_addr == told(child)
    assert site.vaddr == nm(binary)["f"][0]
    assert (site.is_entry, site.function, site.symbol) == (True, "f", "f")
    code = binary.read_bytes()[site.file_offset : site.file_offset + 8]
    assert process.read(site.runtime_addr, 8) == code
    assert one(f"./prog:{site.file_offset:#x}".replace("./prog", str(binary)), process) == site
    assert one("f", binary).runtime_addr == site.vaddr
    assert objects(process)[0] == site.object
    assert site.object.build_id == build_id(binary)


def mapping(start: int, end: int, perms: str, offset: int) -> Mapping:
    return Mapping(start, end, perms, offset, 1, 1, "/x", False)


TEXT = Segment("PT_LOAD", 5, 0x1000, 0x5000, 0x3000, 0x3000)
HEAD = Segment("PT_LOAD", 4, 0, 0, 0x800, 0x800)
DATA = Segment("PT_LOAD", 6, 0x3F00, 0x9F00, 0x200, 0x400)


def test_bias_of_a_segment_whose_pages_are_split() -> None:
    maps = [
        mapping(0x700000, 0x701000, "r--p", 0),
        mapping(0x705000, 0x706000, "r-xp", 0x1000),
        # A page in between was replaced by something else.
        mapping(0x707000, 0x708000, "r-xp", 0x3000),
        mapping(0x709000, 0x70A000, "rw-p", 0x3000),
    ]
    assert biases(maps, (HEAD, TEXT, DATA)) == (0x700000,)
    assert biases(maps[2:], (HEAD, TEXT, DATA)) == (0x700000,)


def test_bias_of_an_object_that_is_loaded_twice() -> None:
    maps = [mapping(base + 0x5000, base + 0x8000, "r-xp", 0x1000) for base in (0x700000, 0x900000)]
    assert biases(maps, (HEAD, TEXT, DATA)) == (0x700000, 0x900000)


def test_bias_without_executable_mappings_is_for_the_program_only() -> None:
    maps = [mapping(0x700000, 0x701000, "r--p", 0), mapping(0x709000, 0x70A000, "rw-p", 0x3000)]
    assert biases(maps, (HEAD, TEXT, DATA)) == ()
    assert biases(maps, (HEAD, TEXT, DATA), is_program=True) == (0x700000,)
    assert biases([], (HEAD, TEXT, DATA), is_program=True) == ()


def test_objects_of_a_process(me: Process) -> None:
    found = objects(me)
    assert os.path.samefile(found[0].open_path, sys.executable)  # noqa: PTH121
    names = [Path(o.path).name for o in found]
    assert "libc.so.6" in names
    assert not any("vdso" in name for name in names)
    for o in found:
        assert build_id(Path(o.path)) == o.build_id
        assert (os.stat(o.open_path).st_dev, os.stat(o.open_path).st_ino) == (o.device, o.inode)  # noqa: PTH116


# ---------------------------------------------------------------- which object


def test_names_of_objects() -> None:
    names = ["libc.so.6", "libcrypto.so.3", "libX11.so.6", "libX11-xcb.so.1", "libpython3.11.so.1.0", "libc++.so.1"]

    def best(obj: str) -> list[str]:
        return best_named(obj, names, names)

    assert best("libc") == ["libc.so.6"]
    assert best("libc.so.6") == ["libc.so.6"]
    assert best("libcry") == []
    assert best("libX11") == ["libX11.so.6"]
    assert best("libX11-xcb") == ["libX11-xcb.so.1"]
    assert best("libpython3.11") == best("libpython3") == ["libpython3.11.so.1.0"]
    assert best("libc++") == ["libc++.so.1"]


@pytest.mark.parametrize("obj", ["libc", "libc.so.6", "libc.so", "{path}", "libc.s*", "*/libc.so.6"])
def test_an_object_by_name_path_or_glob(obj: str, me: Process) -> None:
    [libc] = [o for o in objects(me) if Path(o.path).name == "libc.so.6"]
    site = one(f"{obj.format(path=libc.path)}:getpid", me)
    assert site.object == libc
    assert site.runtime_addr == address(ctypes.CDLL(None), "getpid")


def test_an_object_by_another_path_and_by_soname(tmp_path: Path, start: Start) -> None:
    library = compiled(tmp_path / "real-name.bin", F, "-shared", "-fPIC", "-Wl,-soname,libalso.so.4")
    (tmp_path / "libalso.so.4").symlink_to(library)
    main = WAIT + "extern int f(int);\n" + MAIN
    binary = compiled(tmp_path / "prog", main, str(library), f"-Wl,-rpath,{tmp_path}")
    library.rename(tmp_path / "other-name.bin")
    (tmp_path / "libalso.so.4").unlink()
    (tmp_path / "libalso.so.4").symlink_to("other-name.bin")
    process = Process(start(binary).pid)
    expected = one("other-name.bin:f", process)
    assert one("libalso:f", process) == expected
    assert one(f"{tmp_path}/libalso.so.4:f", process) == expected


def test_unknown_objects_and_functions_propose_near_ones(me: Process) -> None:
    with pytest.raises(ResolveError, match="no object 'libcc'") as caught:
        one("libcc:malloc", me)
    assert "libc.so.6" in caught.value.hint
    with pytest.raises(ResolveError, match="no function 'mallok' in libc") as caught:
        one("libc:mallok", me)
    assert "malloc" in caught.value.hint
    with pytest.raises(ResolveError) as caught:
        one("getpid", me)
    assert "libc.so.6:getpid" in caught.value.hint


def test_a_plain_name_never_means_several_objects(tmp_path: Path, start: Start) -> None:
    for version in "12":
        compiled(tmp_path / f"libtwin.so.{version}", F.replace("f(", f"f{version}("), "-shared", "-fPIC")
    main = WAIT + "extern int f1(int), f2(int);\nint main(void) { ready(); return f1(1) + f2(2); }\n"
    libraries = [str(tmp_path / f"libtwin.so.{version}") for version in "12"]
    process = Process(start(compiled(tmp_path / "prog", main, *libraries)).pid)
    with pytest.raises(ResolveError, match="any of 2") as caught:
        one("libtwin:f1", process)
    assert all(library in caught.value.hint for library in libraries)
    assert one("libtwin.so.2:f2", process).function == "f2"
    names = {site.function for site in resolve(parse("libtwin*:f?"), process)}
    assert names == {"f1", "f2"}


# ---------------------------------------------------------------- which file


def test_a_deleted_program_is_resolved(tmp_path: Path, start: Start) -> None:
    binary = compiled(tmp_path / "prog", TELLS + F + MAIN, *PLAIN)
    child = start(binary)
    binary.unlink()
    compiled(binary, WAIT + F.replace("f(", "newer(") + "int main(void) { ready(); return newer(1); }")
    process = Process(child.pid)
    assert one("f", process).runtime_addr == told(child)
    with pytest.raises(ResolveError):
        one("newer", process)


def test_refusal_identity_changed_for_a_file_that_was_overwritten_in_place(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    binary = compiled(tmp_path / "prog", TELLS + F + MAIN, *PLAIN, "-Wl,--build-id")
    process = Process(start(binary).pid)
    assert one("f", process)
    monkeypatch.setattr(Process, "read", lambda self, addr, size: bytes(size))
    with pytest.raises(RefusedError) as refused:
        one("f", process)
    assert refused.value.reason is RefusalReason.IDENTITY_CHANGED
    assert build_id(binary) in refused.value.message


@pytest.mark.needs("root", "unshare")
def test_a_program_in_another_root_and_mount_namespace(tmp_path: Path, start: Start) -> None:
    root = tmp_path / "root"
    (root / "lib").mkdir(parents=True)
    source = TELLS + F + MAIN
    inside = compiled(root / "prog", source, *PLAIN)
    for path in re.findall(r"(/\S+) \(0x", run("ldd", inside)):
        (root / path.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, root / path.lstrip("/"))
    child = start("unshare", "--mount", "chroot", root, "/prog")
    process = Process(child.pid)
    site = one("/prog:f", process)
    assert site.runtime_addr == told(child)
    assert site.object.inode == inside.stat().st_ino
    libc = one("libc:getpid", process).object
    assert libc.inode in {path.stat().st_ino for path in root.rglob("libc.so.6")}
    assert libc.inode != one("libc:getpid", Process(os.getpid())).object.inode


def test_a_kernel_thread_has_no_program() -> None:
    threads = [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _is_kernel_thread(p)]
    if not threads:
        pytest.skip("no kernel thread is visible here")
    with pytest.raises(UnsupportedError, match="no program"):
        one("main", Process(threads[0]))


def _is_kernel_thread(folder: Path) -> bool:
    try:
        return not (folder / "cmdline").read_bytes() and "Kthread:\t1" in (folder / "status").read_text()
    except OSError:
        return False


UNPRIVILEGED = """
import os, subprocess, time
os.setgroups([]); os.setgid(65534); os.setuid(65534)
child = subprocess.Popen(["/bin/sleep", "60"])
try:
    process = Process(child.pid)
    while not any("libc.so" in m.path and m.executable for m in process.maps()):
        time.sleep(0.01)
    [site] = resolve(parse("libc:getpid $arg1"), process)
    assert "/root/" in site.object.open_path, site
    assert site.object.build_id
finally:
    child.kill()
    child.wait()
"""


@pytest.mark.needs("root")
def test_a_user_resolves_in_a_process_of_their_own() -> None:
    # Imported before rights are dropped: the package may lie in a private folder.
    imports = (
        "import keyword, ptwprobe.process, encodings.idna\n"
        "from ptwprobe.probe.elf import resolve\nfrom ptwprobe.probe.spec import parse\n"
        "from ptwprobe.process import Process\nresolve(parse('libc:getpid'), Process(__import__('os').getpid()))\n"
    )
    run(sys.executable, "-c", imports + UNPRIVILEGED)
