"""Stubs, executed: what they leave of a thread's state (everything), and what they put into the ring."""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ptwprobe import _native
from ptwprobe.model import Constant, Fetch, Memory, Register, RingLayout, StubForm, ThreadIdSource
from ptwprobe.stub.encode import REGISTERS
from ptwprobe.stub.template import pattern
from tests.stubexec import DIRECTION_FLAG, EVENT_ID, NOP5, STATUS_FLAGS, Host, Reader, State, argument, isolated

Programs = Callable[..., Path]

SETTABLE = [name for name in REGISTERS if name != "rsp"]

# lea rax, [rdi + rsi]; nop: what every probed function of the counting tests starts with. Then ret.
ADD = b"\x48\x8d\x04\x37\x90"
RET = b"\xc3"

DISPLACED = {
    "nop5": NOP5,
    "five nops": b"\x90" * 5,
    "mov and push": b"\x48\x89\xf8\x55\x5d",  # mov rax, rdi; push rbp; pop rbp
    "endbr64 and nop": b"\xf3\x0f\x1e\xfa\x90",
    "flags in and out": b"\x48\x11\xd8\x48\x19\xc0",  # adc rax, rbx; sbb rax, rax
    "rip-relative": b"\x48\x8d\x05\x10\x00\x00\x00\x48\x03\x0d\x06\x00\x00\x00",  # lea rax, [rip+16]; add rcx, [rip+6]
    "stack": b"\x48\x83\xec\x20\x53\x5e",  # sub rsp, 32; push rbx; pop rsi
    "taken branch": b"\x39\xc0\x74\x00\x90",  # cmp eax, eax; je to the end of the window
    "branch on a flag": b"\x72\x02\xf7\xd1\x90",  # jc over the not; not ecx; nop
    "count": b"\xe3\x03\x48\xff\xc9\x90",  # jrcxz over the dec; dec rcx; nop
    "ends with jrcxz": b"\x48\xff\xc9\xe3\x00",  # dec rcx; jrcxz to the end of the window
    "string": b"\x48\x89\xd6\x48\xad\xfc",  # mov rsi, rdx; lodsq; cld
    "red zone": b"\x48\x89\x44\x24\xf8\x48\x8b\x4c\x24\xf0",  # mov [rsp-8], rax; mov rcx, [rsp-16]
}

ALL_KINDS = (
    argument(Register("rdi")),
    argument(Register("rax"), "s16"),
    argument(Register("rsp"), "u32"),
    argument(Constant(-3)),
    argument(Register("rip")),
    argument(Memory(Register("rsp"), 8), "s32"),
    argument(Memory(Memory(Register("rdx"), 8), -16), "u8"),
    argument(Register("r12"), "s8"),
)


@pytest.fixture
def library(progs: Programs) -> Path:
    return progs("libstubhost")


def forms() -> list[StubForm]:
    return [StubForm.RING, *([StubForm.PT] if _native.ptwrite_executes() else [])]


def filled_state(seed: int, flags: int = 0x202) -> State:
    state = State()
    for i, name in enumerate(SETTABLE):
        state[name] = (0x9E3779B97F4A7C15 * (i + seed + 1)) % (1 << 64)
    state.flags = flags
    for i in range(256):
        state.xmm[i] = (i * 7 + seed) % 256
    for i in range(128):
        state.red[i] = (i * 11 + seed) % 256
    return state


def assert_same(got: State, want: State) -> None:
    for name in REGISTERS:
        assert got[name] == want[name], name
    assert got.flags == want.flags
    assert bytes(got.xmm) == bytes(want.xmm)
    assert bytes(got.red) == bytes(want.red)


@pytest.mark.parametrize("form", forms())
@pytest.mark.parametrize("code", DISPLACED.values(), ids=DISPLACED)
@pytest.mark.parametrize("gates", ["open", "no loads", "closed"])
def test_the_state_is_what_it_is_without_a_probe(library: Path, form: StubForm, code: bytes, gates: str) -> None:
    @isolated
    def body() -> None:
        host = Host(library)
        ring = host.ring()
        ring.open_gate(gates != "closed")
        if gates == "open":
            ring.open_load_gate()
        data = ctypes.create_string_buffer(64)
        struct.pack_into("<Q", data, 8, ctypes.addressof(data) + 48)
        stub = host.install(ALL_KINDS, ring.layout(), form=form, displaced=code)
        for seed in range(16):
            status = [1 << bit for bit in (0, 2, 4, 6, 7, 11)]
            chosen = sum(flag for i, flag in enumerate(status) if (seed * 0x2D) >> i & 1)
            flags = 0x202 | chosen | (DIRECTION_FLAG if seed & 1 else 0)
            state = filled_state(seed, flags)
            state["rdx"] = ctypes.addressof(data)
            host.lib.errno_set(seed)
            got = host.run(stub, state)
            assert host.lib.errno_get() == seed
            # The same site unprobed says what the state should be.
            host.patch(stub, False)
            assert_same(got, host.run(stub, state))
            host.patch(stub, True)
        assert len(ring.records()) == (16 if form is StubForm.RING and gates != "closed" else 0)

    body()


@pytest.mark.parametrize("form", forms())
def test_every_status_flag_both_ways(library: Path, form: StubForm) -> None:
    @isolated
    def body() -> None:
        host = Host(library)
        ring = host.ring(bits=20)
        ring.open_load_gate()
        stub = host.install((argument(Memory(Register("rsp"), 0)),), ring.layout(), form=form)
        for bits in range(1 << 7):
            places = (0, 2, 4, 6, 7, 10, 11)
            flags = 0x202 | sum(1 << place for i, place in enumerate(places) if bits >> i & 1)
            got = host.run(stub, filled_state(1, flags))
            assert got.flags & (STATUS_FLAGS | DIRECTION_FLAG | 0x202) == flags

    body()


def test_values_in_the_ring(library: Path) -> None:
    @isolated
    def body() -> None:
        host = Host(library)
        ring = host.ring()
        ring.open_load_gate()
        data = ctypes.create_string_buffer(64)
        at = ctypes.addressof(data)
        struct.pack_into("<QQqiihBb", data, 0, at + 16, at + 40, -5, -6, 7, -8, 9, -10)
        registers = tuple(argument(Register(name)) for name in REGISTERS)
        narrow = tuple(
            argument(Register(name), f"{kind}{bits}")
            for name in ("rax", "rdi", "r10", "r13", "rsp")
            for kind, bits in (("u", 8), ("s", 8), ("u", 16), ("s", 16), ("u", 32), ("s", 32))
        )
        state = filled_state(3)
        state["rdi"] = 0x1122_3344_8899_F0F1
        state["rbx"] = at
        state["r11"] = at
        state["r12"] = at - (1 << 40)
        state["r15"] = at - 8
        host.run(host.install(registers, ring.layout()), state)
        entry = host.entry_rsp
        values = {name: entry if name == "rsp" else state[name] for name in REGISTERS}
        assert ring.records()[-1].words == tuple(values.values())

        host.run(host.install(narrow, ring.layout()), state)
        want = []
        for name in ("rax", "rdi", "r10", "r13", "rsp"):
            for size in (1, 2, 4):
                low = values[name].to_bytes(8, "little")[:size]
                want += [int.from_bytes(low, "little"), int.from_bytes(low, "little", signed=True) % (1 << 64)]
        assert ring.records()[-1].words == tuple(want)

        minus = {n: -n % (1 << 64) for n in range(16)}
        cases: list[tuple[Fetch, str, int | None]] = [
            (Constant(0x1FF), "s8", minus[1]),
            (Constant(-1), "u16", 0xFFFF),
            (Register("rip"), "u64", None),
            (Memory(Register("rbx"), 16), "s64", minus[5]),
            (Memory(Register("r11"), 24), "s32", minus[6]),
            (Memory(Register("r11"), 24), "u32", minus[6] & 0xFFFF_FFFF),
            (Memory(Register("rbx"), 32), "s16", minus[8]),
            (Memory(Register("rbx"), 32), "x16", minus[8] & 0xFFFF),
            (Memory(Register("rbx"), 34), "u8", 9),
            (Memory(Register("rbx"), 35), "s8", minus[10]),
            (Memory(Register("r12"), (1 << 40) + 28), "s32", 7),
            (Memory(Constant(at), 28), "u32", 7),
            (Memory(Memory(Register("rbx"), 0), 0), "u64", minus[5]),
            (Memory(Memory(Memory(Register("r15"), 8), -16), 18), "u8", 9),
            (Memory(Register("rsp"), -8), "u64", int.from_bytes(bytes(state.red)[-8:], "little")),
        ]
        stub = host.install(tuple(argument(fetch, type) for fetch, type, _ in cases), ring.layout())
        host.run(stub, state)
        record = ring.records()[-1]
        assert record.faults == 0
        for (fetch, type, value), word in zip(cases, record.words, strict=True):
            assert word == (stub.request.site_addr if value is None else value), (fetch, type)

    body()


@pytest.mark.parametrize("source", ThreadIdSource)
@pytest.mark.parametrize("rdpid", [True, False])
def test_time_thread_and_event_of_a_record(library: Path, source: ThreadIdSource, rdpid: bool) -> None:
    features = _native.cpu_features()
    if not features["rdpid" if rdpid else "rdtscp"]:
        pytest.skip("no rdpid here")
    if source is ThreadIdSource.FS_BASE and not features["fsgsbase"]:
        pytest.skip("no fsgsbase here")

    @isolated
    def body() -> None:
        host = Host(library)
        ring = host.ring()
        stub = host.install((), ring.layout(thread_id=source, use_rdpid=rdpid))
        times = [host.lib.tsc_now()]
        for seed in range(3):
            state = filled_state(seed)
            assert_same_gpr(host.run(stub, state), state)
            times.append(host.lib.tsc_now())
        threads = {os.getpid(), threading.get_native_id()}
        records = ring.records()
        assert len(records) == 3
        for record in records:
            assert record.event_id == EVENT_ID
            assert record.words == ()
            if source is ThreadIdSource.TLS_FIELD:
                assert record.thread in threads
            else:
                assert ctypes.c_uint32.from_address(record.thread + ring.layout().thread_id_offset).value in threads
        for record, (before, after) in zip(records, itertools.pairwise(times), strict=True):
            assert before < record.tsc < after

    body()


def test_a_full_ring_counts_and_overwrites_nothing(library: Path) -> None:
    @isolated
    def body() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        host = Host(library)
        ring = host.ring(bits=12, start_mark=(1 << 64) - (1 << 42) - 4096 & ~4095)
        stub = host.install((argument(Register("rdi")),), ring.layout())
        room = (1 << 12) // 40
        for i in range(room + 50):
            state = filled_state(0)
            state["rdi"] = i
            assert_same_gpr(host.run(stub, state), state)
        assert [record.words[0] for record in ring.records()] == list(range(room))
        assert ring.lost == 50

    body()


def assert_same_gpr(got: State, want: State) -> None:
    assert all(got[name] == want[name] for name in SETTABLE)
    assert got.flags == want.flags


def test_a_cpu_without_a_ring_counts(library: Path) -> None:
    @isolated
    def body() -> None:
        cpu = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpu})
        host = Host(library)
        ring = host.ring()
        state = filled_state(0)
        for rings in (cpu, cpu + 1):
            stub = host.install((argument(Register("rdi")),), ring.layout(rings=rings))
            for _ in range(7):
                assert_same_gpr(host.run(stub, state), state)
        assert ring.lost_no_ring == ring.lost == 7
        assert len(ring.records()) == 7

    body()


def test_a_fork_child_emits_nothing(library: Path) -> None:
    @isolated
    def body() -> None:
        host = Host(library)
        ring = host.ring()
        stub = host.install((argument(Register("rdi")),), ring.layout())
        pid = os.fork()
        if pid == 0:
            host.run(stub, filled_state(0))
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert ring.records() == []
        host.run(stub, filled_state(0))
        assert len(ring.records()) == 1

    body()


POINTERS = (
    argument(Register("rdi")),
    argument(Memory(Register("rsi"), 0)),
    argument(Memory(Memory(Register("rbx"), 8), 4), "s32"),
    argument(Memory(Register("rbx"), 0), "u8"),
)


@pytest.mark.parametrize("value", [0, 0x1235, 0x4000_1234], ids=["closed", "another thread", "owner died"])
def test_no_load_while_the_load_gate_is_not_the_tracers(library: Path, value: int) -> None:
    @isolated
    def body() -> None:
        host = Host(library)
        ring = host.ring()
        ring.open_load_gate(value)
        state = filled_state(0)
        state["rsi"] = state["rbx"] = 0
        for form in forms():
            stub = host.install(POINTERS, ring.layout(), form=form)
            assert_same_gpr(host.run(stub, state), state)
        (record,) = ring.records()
        assert record.words == (state["rdi"], 0, 0, 0)
        assert record.faults == 0b1110

    body()


@pytest.mark.parametrize("bad", [8, 1 << 63, 1 << 46], ids=["first page", "not canonical", "not mapped"])
def test_a_load_that_faults_goes_on_at_its_fix_up(library: Path, bad: int) -> None:
    @isolated
    def body() -> None:
        host = Host(library)
        ring = host.ring()
        ring.open_load_gate()
        data = ctypes.create_string_buffer(b"\x55" + bytes(7) + struct.pack("<Q", bad), 32)
        state = filled_state(0)
        state["rsi"] = bad
        state["rbx"] = ctypes.addressof(data)
        for form in forms():
            stub = host.install(POINTERS, ring.layout(), form=form)
            assert len(stub.loads) == 4
            # A ring stub does not even try what leads nowhere.
            if form is StubForm.PT or bad == 1 << 46:
                host.catch_faults(stub)
            assert_same_gpr(host.run(stub, state), state)
        (record,) = ring.records()
        assert record.words == (state["rdi"], 0, 0, 0x55)
        assert record.faults == 0b0110

    body()


TWO = (argument(Register("rdi")), argument(Register("rsi")))


def add_function(host: Host, layout: RingLayout) -> ctypes.c_void_p:
    return ctypes.c_void_p(host.install(TWO, layout, displaced=ADD, behind=RET).request.site_addr)


def test_four_threads_and_a_slow_reader_account_for_every_hit(library: Path) -> None:
    @isolated
    def body() -> None:
        host = Host(library)
        ring = host.ring(bits=14)
        reader = Reader(ring, pause_us=300)
        assert host.lib.hammer(add_function(host, ring.layout()), 4, ctypes.c_uint64(300_000)) == 0
        read, wrong = reader.stop()
        assert read + ring.lost == 4 * 300_000
        assert wrong == 0
        assert read > 0 and ring.lost > 0

    body()


def test_a_signal_handler_that_hits_the_probe_inside_its_stub_loses_nothing(library: Path) -> None:
    @isolated
    def body() -> None:
        host = Host(library)
        ring = host.ring(bits=27)
        function = add_function(host, ring.layout())
        signals = ctypes.c_uint64()
        assert host.lib.hammer_signals(function, ctypes.c_uint64(1_000_000), 50, ctypes.byref(signals)) == 0
        reader = Reader(ring)
        read, wrong = reader.stop()
        assert signals.value > 10
        assert (read, wrong, ring.lost) == (1_000_000 + signals.value, 0, 0)

    body()


def test_threads_on_two_cpus_in_one_ring_lose_nothing(library: Path) -> None:
    """A thread that migrates right after it read its CPU reserves in a ring that another CPU's threads use too."""

    @isolated
    def body() -> None:
        host = Host(library)
        ring = host.ring(rings=1, bits=26)
        templates = {name: _native.stub_template(name) for name in _native.stub_template_names()}
        migrated = {**templates, "ring_cpu_rdpid": "xor r11d, r11d", "ring_cpu_rdtscp": "xor r11d, r11d"}
        _native.stub_template = migrated.get  # type: ignore[assignment]
        pattern.cache_clear()
        function = add_function(host, ring.layout())
        for _ in range(4):
            assert host.lib.hammer(function, 4, ctypes.c_uint64(250_000)) == 0
            assert (*Reader(ring).stop(), ring.lost) == (1_000_000, 0, 0)

    body()
