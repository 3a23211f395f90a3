"""``patch.install.Target``: ring, stubs and patches of a live process, and leaving it as it was."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ptwprobe import _native
from ptwprobe._native import Tracer
from ptwprobe.errors import RefusalReason, RefusedError, TargetError, TargetGoneError
from ptwprobe.model import (
    ObjectFile,
    Patch,
    Site,
    Stub,
    StubForm,
    StubRequest,
    Tactic,
    ThreadIdSource,
    Window,
)
from ptwprobe.patch.install import Target
from ptwprobe.process import Process
from tests import targets

Start = Callable[..., targets.Target]
Programs = Callable[..., Path]
GLIBC_TID = 0x2D0


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    made = Tracer()
    yield made
    made.close()


def maps(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def has_ended(pid: int) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


def areas(pid: int) -> int:
    return len(maps(pid).splitlines())


def open_files(pid: int) -> set[str]:
    return {f.name for f in Path(f"/proc/{pid}/fd").iterdir()}


def read(pid: int, addr: int, size: int) -> bytes:
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        return os.pread(memory.fileno(), size, addr)


def hand_made_patch(pid: int, site_addr: int, stub_addr: int) -> Patch:
    """A stub that holds the displaced bytes only."""
    old = read(pid, site_addr, 5)
    code = old + _jump(stub_addr + 5, site_addr + 5)
    obj = ObjectFile("tracee_hot", "tracee_hot", "", 0, 0, 0)
    site = Site(obj, "site", "site", site_addr, 16, site_addr, 0, site_addr, True)
    request = StubRequest(StubForm.PT, 0x8000, (), stub_addr, site_addr, old, site_addr + 5)
    starts = [0, 3] if old.startswith(b"\x8d") else [0]
    stub = Stub(request, code, (), tuple((o, stub_addr + o) for o in starts), ())
    window = Window(Tactic.WINDOW, site_addr, old, 5, 0, 1 << 47)
    return Patch(site, 0x8000, window, stub, old, _jump(site_addr, stub_addr))


def _jump(at: int, to: int) -> bytes:
    return b"\xe9" + (to - at - 5).to_bytes(4, "little", signed=True)


@pytest.fixture
def hot(start: Start, progs: Programs) -> tuple[targets.Target, int, int]:
    target = start(progs("tracee_hot"), "8", "1000")
    nop, window = (int(word, 16) for word in target.output.split()[1:3])
    return target, nop, window


def test_a_target_gets_ring_stubs_and_patches_and_is_left_as_it_was(
    hot: tuple[targets.Target, int, int], tracer: Tracer
) -> None:
    program, nop, window = hot
    before, descriptors = areas(program.pid), open_files(program.pid)
    text = read(program.pid, nop, 256)
    space = (nop & ~0xFFF) - (1 << 24)
    for _ in range(60):
        target = Target(tracer, program.pid)
        target.attach()
        ring = target.map_ring(2, 16)
        layout = target.ring_layout()
        assert (layout.thread_id, layout.thread_id_offset) == (ThreadIdSource.TLS_FIELD, GLIBC_TID)
        assert read(program.pid, layout.control_addr, 8) == b"PTWRING1"
        assert (layout.rings, layout.ring_bits, layout.load_gate_value) == (2, 16, tracer.pid)
        target.map_stub_space([(space, 4096), (space + 0x10000, 8192)])
        assert maps(program.pid).count("/memfd:[uprobes-ptwrite] (deleted)") == 2
        assert read(program.pid, space + 0x10000, 8192) == b"\xcc" * 8192
        patches = [
            hand_made_patch(program.pid, nop, space + 64),
            hand_made_patch(program.pid, window, space + 0x11000),
        ]
        for patch in patches:
            target.write_stub(patch.stub.addr, patch.stub.code)
        assert target.apply(patches) > 0
        target.open_gate()
        assert read(program.pid, layout.gate_addr, 4) == b"\1\0\0\0"
        assert read(program.pid, window, 5) == patches[1].new
        target.release()
        assert target.leave() is True
        assert read(program.pid, nop, 256) == text
        del ring
    assert areas(program.pid) <= before
    assert open_files(program.pid) == descriptors
    program.go()
    assert " wrong=0 " in program.finish()


def test_each_ring_is_mapped_twice_in_a_row(hot: tuple[targets.Target, int, int], tracer: Tracer) -> None:
    program, _, _ = hot
    target = Target(tracer, program.pid)
    target.map_ring(2, 16)
    layout = target.ring_layout()
    with Path(f"/proc/{program.pid}/mem").open("r+b", buffering=0) as memory:
        for ring in range(2):
            start = layout.data_addr + (ring << 17)
            os.pwrite(memory.fileno(), b"wrapping", start + 0x10000 - 4)
            assert os.pread(memory.fileno(), 4, start) == b"ping"
            assert os.pread(memory.fileno(), 4, start + 0x20000 - 4) == b"wrap"
    assert target.leave()


def test_stub_space_that_is_taken_is_refused_and_nothing_stays(
    hot: tuple[targets.Target, int, int], tracer: Tracer
) -> None:
    program, nop, _ = hot
    target = Target(tracer, program.pid)
    space = (nop & ~0xFFF) - (1 << 24)
    with pytest.raises(TargetError, match="EEXIST"):
        target.map_stub_space([(space, 4096), (nop & ~0xFFF, 4096)])
    assert "memfd" not in maps(program.pid)
    assert not [f for f in Path(f"/proc/{program.pid}/fd").iterdir() if "memfd" in str(f.readlink())]
    program.go()
    assert " wrong=0 " in program.finish()


def test_a_foreign_breakpoint_refuses_by_name_and_the_others_come_out(
    hot: tuple[targets.Target, int, int], tracer: Tracer
) -> None:
    program, nop, window = hot
    space = (nop & ~0xFFF) - (1 << 24)
    target = Target(tracer, program.pid)
    target.map_stub_space([(space, 4096)])
    patches = [hand_made_patch(program.pid, nop, space), hand_made_patch(program.pid, window, space + 64)]
    for patch in patches:
        target.write_stub(patch.stub.addr, patch.stub.code)
    target.apply(patches)
    foreign = _jump(nop, space + 0x100)  # somebody else's jump, to a copy of our stub
    target.write_stub(space + 0x100, patches[0].old + _jump(space + 0x105, nop + 5))
    with Path(f"/proc/{program.pid}/mem").open("r+b", buffering=0) as memory:
        os.pwrite(memory.fileno(), foreign, nop)
    with pytest.raises(RefusedError) as error:
        target.undo(patches)
    assert error.value.reason is RefusalReason.FOREIGN_PROBE
    assert target.leave() is False
    assert "stays" in target.notes[0]
    assert read(program.pid, nop, 5) == foreign and read(program.pid, window, 5) == patches[1].old
    program.go()
    assert " wrong=0 " in program.finish()


def test_the_recorder_killed_at_any_moment_leaves_the_bytes_as_they_were(
    hot: tuple[targets.Target, int, int], tmp_path: Path
) -> None:
    program, nop, window = hot
    text, mappings = read(program.pid, nop, 256), maps(program.pid)
    space = (nop & ~0xFFF) - (1 << 24)
    for attempt in range(4):
        script = (
            f"import sys\nsys.path.insert(0, {str(Path(__file__).parent.parent)!r})\n"
            "from ptwprobe._native import Tracer\nfrom ptwprobe.patch.install import Target\n"
            "from tests.test_tracee_install import hand_made_patch\n"
            f"t=Tracer()\nprint(t.pid)\ntarget=Target(t,{program.pid})\n"
            f"target.map_stub_space([({space + attempt * 0x1000},4096)])\n"
            f"p=[hand_made_patch({program.pid},{nop},{space + attempt * 0x1000}),"
            f"hand_made_patch({program.pid},{window},{space + attempt * 0x1000 + 64})]\n"
            "[target.write_stub(x.stub.addr,x.stub.code) for x in p]\nprint('ready',flush=True)\n"
            "while 1:\n target.apply(p)\n target.undo(p)\n"
        )
        with targets.Target([sys.executable, "-c", script]) as recorder:
            owner = int(recorder.output.split()[0])
            time.sleep(0.01 + attempt * 0.003)
            os.kill(recorder.pid, signal.SIGKILL)
            recorder.process.wait()
            end = time.monotonic() + 5
            while not has_ended(owner):
                assert time.monotonic() < end
                time.sleep(0.005)
        assert read(program.pid, nop, 256) == text
        assert maps(program.pid) == mappings
    program.go()
    assert " wrong=0 " in program.finish()


def test_a_fork_child_finds_the_gate_closed(tracer: Tracer) -> None:
    code = (
        "import os,sys\nprint('ready',flush=True)\naddr=int(input(),16)\nimport ctypes\n"
        "print(ctypes.c_uint.from_address(addr).value,flush=True)\n"
        "if os.fork()==0:\n print(ctypes.c_uint.from_address(addr).value,flush=True)\n os._exit(0)\nos.wait()"
    )
    with targets.Target([sys.executable, "-c", code]) as program:
        target = Target(tracer, program.pid)
        target.map_ring(1, 16)
        target.open_gate()
        assert program.process.stdin is not None
        program.process.stdin.write(f"{target.ring_layout().gate_addr:x}\n".encode())
        assert program.finish().split() == ["ready", "1", "0"]


def test_a_dead_target_raises_gone_everywhere(start: Start, progs: Programs, tracer: Tracer) -> None:
    program = start(progs("tracee_hot"), "2", "0")
    target = Target(tracer, program.pid)
    target.map_ring(1, 16)
    os.kill(program.pid, signal.SIGKILL)
    program.process.wait()
    for call in (target.attach, target.open_gate, lambda: target.map_stub_space([(0x10000, 4096)]), target.leave):
        with pytest.raises(TargetGoneError):
            call()


def test_known_thread_id_offset_of_this_libc(start: Start, progs: Programs, tracer: Tracer) -> None:
    program = start(progs("tracee_hot"), "3", "0")
    assert Target.known_thread_id_offset(tracer, Process(program.pid)) == GLIBC_TID
    assert _native.cpu_features()
