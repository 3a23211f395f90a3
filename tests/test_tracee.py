"""Stopping real programs, calling inside them and changing their code: none of them may notice."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ptwprobe import _native
from ptwprobe._native import NativeError, Tracer
from tests.targets import Target

SYS_GETPID = 39
SYS_GETRANDOM = 318
Start = Callable[..., Target]
Change = tuple[int, bytes, bytes, int, list[tuple[int, int]]]
Programs = Callable[..., Path]


@pytest.fixture
def tracer() -> Iterator[Tracer]:
    made = Tracer()
    yield made
    made.close()


def kind_of(error: pytest.ExceptionInfo[NativeError]) -> str:
    return error.value.args[0]


def state(pid: int, key: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(key))


def wait_until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_blocked_calls_are_not_disturbed_by_stops_and_remote_calls(
    start: Start, progs: Programs, tracer: Tracer
) -> None:
    target = start(progs("tracee_blocked"))
    for cycle in range(200):
        assert tracer.remote(target.pid, [(SYS_GETPID, [])]) == [target.pid]
        if cycle % 10 == 0:
            tracer.attach(target.pid)
            tracer.threads(target.pid)
            tracer.detach(target.pid)
    target.go()
    assert target.finish() == "ready\ndone\n"


def test_a_remote_call_in_a_thread_that_blocks_in_each_call_leaves_it_blocked(tracer: Tracer) -> None:
    code = "import select,sys\np=select.epoll()\nprint('ready',flush=True)\nprint(p.poll(600))"
    with Target([sys.executable, "-c", code]) as target:
        for _ in range(50):
            assert tracer.remote(target.pid, [(SYS_GETPID, [])]) == [target.pid]
        wait_until(lambda: Path(f"/proc/{target.pid}/syscall").read_text().startswith("232 "))


def test_hot_threads_with_timers_survive_many_stops(start: Start, progs: Programs, tracer: Tracer) -> None:
    target = start(progs("tracee_hot"), "8", "1000")
    for _ in range(100):
        assert tracer.remote(target.pid, [(SYS_GETPID, [])]) == [target.pid]
        assert len(tracer.threads(target.pid)) == 9
    target.go()
    assert " wrong=0 " in target.finish()
    assert target.exit_code == 0


def test_patches_toggle_under_load_and_leave_the_bytes_as_they_were(
    start: Start, progs: Programs, tracer: Tracer
) -> None:
    target = start(progs("tracee_hot"), "8", "1000")
    nop, window = (int(word, 16) for word in target.output.split()[1:3])
    with Path(f"/proc/{target.pid}/mem").open("rb", buffering=0) as memory:

        def read(addr: int, size: int) -> bytes:
            return os.pread(memory.fileno(), size, addr)

        before = read(nop, 128)
        stubs = (nop & ~0xFFF) - (1 << 24)
        jump_back = _jump(stubs + 5, nop + 5), _jump(stubs + 69, window + 5)
        results = tracer.remote(
            target.pid,
            [
                (9, [stubs, 4096, 7, 0x100022, -1, 0]),
            ],
        )
        assert results == [stubs]
        with Path(f"/proc/{target.pid}/mem").open("r+b", buffering=0) as writable:
            os.pwrite(writable.fileno(), b"\x90" * 5 + jump_back[0], stubs)
            os.pwrite(writable.fileno(), read(window, 5) + jump_back[1], stubs + 64)
        sites: list[Change] = [
            (nop, read(nop, 5), _jump(nop, stubs), 5, [(0, stubs)]),
            (window, read(window, 5), _jump(window, stubs + 64), 5, [(0, stubs + 64), (3, stubs + 67)]),
        ]
        backs: list[Change] = [(addr, new, old, size, []) for addr, old, new, size, _ in sites]

        def apply(changes: list[Change]) -> int:
            """On a machine that is busy otherwise, a thread may not come to a stand in time: then nothing changes."""
            unchanged = read(nop, 128)
            for _ in range(10):
                try:
                    return tracer.apply(target.pid, changes)
                except NativeError as error:
                    assert error.args[0] == "busy"
                    assert read(nop, 128) == unchanged
            raise AssertionError("busy ten times in a row")

        for _ in range(200):
            assert apply(sites) > 0
            assert read(nop, 5) == sites[0][2]
            apply(backs)
            assert read(nop, 128) == before
    target.go()
    assert " wrong=0 " in target.finish()


def _jump(at: int, to: int) -> bytes:
    return b"\xe9" + (to - at - 5).to_bytes(4, "little", signed=True)


def test_bytes_that_are_not_the_planned_ones_are_a_foreign_probe_and_nothing_changes(
    start: Start, progs: Programs, tracer: Tracer
) -> None:
    target = start(progs("tracee_hot"), "1", "0")
    nop, window = (int(word, 16) for word in target.output.split()[1:3])
    sites: list[Change] = [
        (nop, b"\x0f\x1f\x44\x00\x00", b"\x90" * 5, 5, []),
        (window, b"\xcc" * 5, b"\x90" * 5, 5, []),
    ]
    with pytest.raises(NativeError) as error:
        tracer.apply(target.pid, sites)
    assert kind_of(error) == "foreign-probe" and error.value.args[2] == window
    assert "8d 04 7f ff c0" in error.value.args[1]
    with Path(f"/proc/{target.pid}/mem").open("rb", buffering=0) as memory:
        assert os.pread(memory.fileno(), 5, nop) == b"\x0f\x1f\x44\x00\x00"


def test_refusal_busy_for_a_thread_that_stays_inside_a_window(tracer: Tracer) -> None:
    with Target([sys.executable, "-c", "import time\nprint('ready',flush=True)\ntime.sleep(600)"]) as target:
        wait_until(lambda: Path(f"/proc/{target.pid}/syscall").read_text().startswith("230 "))
        [(_, rip, _, _, _, _)] = tracer.threads(target.pid)
        start = rip - 2 if (rip - 2) % 4096 < 4090 else rip - 3
        with Path(f"/proc/{target.pid}/mem").open("rb", buffering=0) as memory:
            old = os.pread(memory.fileno(), 5, start)
        with pytest.raises(NativeError) as error:
            tracer.apply(target.pid, [(start, old, b"\xcc" * 5, 5, [])])
        assert kind_of(error) == "busy"
        assert tracer.threads(target.pid)


def test_python_and_sqlite_compute_the_same_under_stops(tracer: Tracer) -> None:
    query = "with recursive c(x) as (values(1) union all select x+1 from c where x<3000000) select sum(x) from c;"
    for command, expected in (
        (["sqlite3", ":memory:", query], "4500001500000\n"),
        ([sys.executable, "-c", "print(sum(i*i%7 for i in range(4000000)))"], None),
    ):
        if expected is None:
            expected = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        with Target(command, ready=None) as target:
            stops = 0
            while target.process.poll() is None:
                try:
                    tracer.remote(target.pid, [(SYS_GETPID, [])])
                    stops += 1
                except NativeError as error:  # ended, or still on its way into its exec
                    assert error.args[0] == "gone"
            assert target.finish() == expected and stops > 10


def test_a_traced_process_is_refused_with_the_name_of_its_tracer(start: Start, progs: Programs) -> None:
    first, second = Tracer(), Tracer()
    target = start(progs("tracee_hot"), "2", "0")
    first.attach(target.pid)
    with pytest.raises(NativeError) as error:
        second.attach(target.pid)
    assert kind_of(error) == "not-permitted" and f"process {first.pid} (ptwprobe-owner)" in error.value.args[1]
    first.close()
    second.attach(target.pid)
    second.close()


def test_a_kernel_thread_and_a_missing_process_are_refused(tracer: Tracer) -> None:
    with pytest.raises(NativeError) as error:
        tracer.attach(2)
    assert kind_of(error) in ("not-permitted", "gone")
    with pytest.raises(NativeError) as error:
        tracer.attach(0x3FFFFF)
    assert kind_of(error) == "gone"


def test_a_process_stopped_by_job_control_stays_stopped(start: Start, progs: Programs, tracer: Tracer) -> None:
    target = start(progs("tracee_hot"), "2", "0")
    os.kill(target.pid, signal.SIGSTOP)
    wait_until(lambda: state(target.pid, "State").startswith("T"))
    for _ in range(20):
        assert tracer.remote(target.pid, [(SYS_GETPID, [])]) == [target.pid]
        wait_until(lambda: state(target.pid, "State").startswith("T (stopped"))
    tracer.attach(target.pid)
    tracer.threads(target.pid)
    os.kill(target.pid, signal.SIGCONT)
    wait_until(lambda: state(target.pid, "State")[0] in "RS")
    os.kill(target.pid, signal.SIGSTOP)
    time.sleep(0.05)
    tracer.detach(target.pid)
    wait_until(lambda: state(target.pid, "State").startswith("T (stopped"))
    os.kill(target.pid, signal.SIGCONT)
    target.go()
    assert " wrong=0 " in target.finish()


def test_a_target_killed_at_random_moments_is_gone(start: Start, progs: Programs, tracer: Tracer) -> None:
    rng = random.Random(7)
    for _ in range(20):
        target = start(progs("tracee_hot"), "4", "1000")
        killer = subprocess.Popen(["sh", "-c", f"sleep {rng.uniform(0, 0.03):.4f}; kill -9 {target.pid}"])
        with pytest.raises(NativeError) as error:
            while True:
                tracer.remote(target.pid, [(SYS_GETPID, [])])
        assert kind_of(error) == "gone"
        killer.wait()
        target.process.wait()


def test_a_vfork_parent_is_busy_and_unharmed(start: Start, progs: Programs, tracer: Tracer) -> None:
    target = start(progs("tracee_vfork"))
    time.sleep(0.05)
    with pytest.raises(NativeError) as error:
        tracer.threads(target.pid)
    assert kind_of(error) == "busy"
    assert target.finish() == "ready\nafter\n"


def test_calls_that_a_thread_does_not_come_back_for_are_told_as_not_made(
    start: Start, progs: Programs, tracer: Tracer
) -> None:
    target = start(progs("tracee_vfork"), "when-told")
    told = int(target.output.split()[1], 16)
    # After so many calls the thread runs for a moment, and goes into its vfork, where it does not stop.
    first = [(SYS_GETRANDOM, [told, 8, 0]), *[(SYS_GETPID, [])] * 5]
    results = tracer.remote(target.pid, [*first, (SYS_GETPID, []), (SYS_GETPID, [])])
    assert results == [8, *[target.pid] * 5, -errno.EBUSY]
    assert target.finish().endswith("after\n")
    assert target.exit_code == 0


def test_a_process_whose_first_thread_has_ended_is_traced_by_the_others(
    start: Start, progs: Programs, tracer: Tracer
) -> None:
    target = start(progs("tracee_leaderless"))
    for _ in range(20):
        assert [tid for tid, *_ in tracer.threads(target.pid)] != [target.pid]
        assert tracer.remote(target.pid, [(SYS_GETPID, [])]) == [target.pid]
    target.go()
    assert target.finish() == "ready\ndone\n"


def test_a_first_thread_that_ends_while_traced_does_not_hold_up_stops(tracer: Tracer) -> None:
    code = (
        "import threading,ctypes,os\n"
        "def rest():\n input()\n os.write(1,b'done\\n')\n os._exit(0)\n"
        "threading.Thread(target=rest).start()\nprint('ready',flush=True)\nimport time\ntime.sleep(0.2)\n"
        "ctypes.CDLL(None).syscall(60,0)"
    )
    with Target([sys.executable, "-c", code]) as target:
        tracer.attach(target.pid)
        wait_until(lambda: state(target.pid, "State").startswith("Z"))
        for _ in range(10):
            assert tracer.remote(target.pid, [(SYS_GETPID, [])]) == [target.pid]
            assert len(tracer.threads(target.pid)) == 1
        tracer.detach(target.pid)


@pytest.mark.needs("root")
def test_another_users_process_is_refused_for_that_reason(start: Start, progs: Programs) -> None:
    target = start(progs("tracee_hot"), "1", "0")
    script = (
        f"import os,sys\nsys.path.insert(0,{str(Path(__file__).parent.parent)!r})\n"
        "from ptwprobe._native import *\nos.setuid(65534)\n"
        f"t=Tracer()\ntry: t.attach({target.pid})\nexcept NativeError as e: print(*e.args)\nt.close()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("not-permitted ") and "belongs to user 0, we are user 65534" in done.stdout


@pytest.mark.needs("root")
def test_a_filtered_process_is_called_with_its_filter_suspended(tracer: Tracer) -> None:
    code = (
        "import ctypes,struct\nl=ctypes.CDLL(None)\nl.prctl(38,1,0,0,0)\n"
        # if nr == getppid (110): kill, else allow
        "f=((0x20,0,0,0),(0x15,0,1,110),(6,0,0,0x80000000),(6,0,0,0x7fff0000))\n"
        "f=b''.join(struct.pack('HBBI',*i) for i in f)\n"
        "b=ctypes.create_string_buffer(f)\n"
        "p=struct.pack('HxxxxxxQ',4,ctypes.addressof(b))\nassert l.prctl(22,2,p,0,0)==0\n"
        "print('ready',flush=True)\ninput()\nprint('alive')"
    )
    with Target([sys.executable, "-c", code]) as target:
        assert state(target.pid, "Seccomp") == "2"
        assert tracer.remote(target.pid, [(110, [])]) == [os.getpid()]
        target.go()
        assert target.finish() == "ready\nalive\n"


@pytest.mark.needs("root")
def test_refusal_seccomp_without_the_right_to_suspend_a_filter_and_nothing_is_touched(tracer: Tracer) -> None:
    code = (
        "import os,sys,ctypes,struct\nl=ctypes.CDLL(None)\n"
        f"sys.path.insert(0,{str(Path(__file__).parent.parent)!r})\n"
        "from ptwprobe._native import *\nimport subprocess\nos.setuid(65534)\nl.prctl(4,1,0,0,0)\n"
        "child=os.fork()\n"
        "if child==0:\n"
        " l.prctl(4,1,0,0,0)\n l.prctl(38,1,0,0,0)\n"
        " f=((0x20,0,0,0),(0x15,0,1,39),(6,0,0,0x80000000),(6,0,0,0x7fff0000))\n"
        " b=ctypes.create_string_buffer(b''.join(struct.pack('HBBI',*i) for i in f))\n"
        " l.prctl(22,2,struct.pack('HxxxxxxQ',4,ctypes.addressof(b)),0,0)\n"
        " import time\n time.sleep(2)\n os._exit(7)\n"
        "import time\ntime.sleep(0.3)\nt=Tracer()\n"
        "try: t.remote(child,[(39,[])])\nexcept NativeError as e: print(e.args[0])\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child,0)[1]))\nt.close()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["seccomp", "7"]


def test_a_launched_program_stands_at_each_mapping_and_ends_with_its_status(tracer: Tracer) -> None:
    env = [f"{k}={v}" for k, v in os.environ.items()]
    pid = tracer.launch(["sh", "-c", "exit 3"], env, "/")
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/")
    assert "libc.so" not in Path(f"/proc/{pid}/maps").read_text()
    seen = []
    while (event := tracer.next_mapping_event(pid, 5000)) == "mapped":
        seen.append("libc.so" in Path(f"/proc/{pid}/maps").read_text())
        assert tracer.remote(pid, [(SYS_GETPID, [])]) == [pid]
    assert event == "exit" and seen[0] is False and seen[-1] is True
    assert tracer.exit_status(pid) == 3
    with pytest.raises(NativeError) as error:
        tracer.launch(["no-such-program"], env)
    assert kind_of(error) == "exec-failed" and "No such file" in error.value.args[1]


def test_a_launched_program_runs_on_after_resume_and_a_signal_shows_in_its_status(tracer: Tracer) -> None:
    pid = tracer.launch(["sleep", "100"], [f"{k}={v}" for k, v in os.environ.items()])
    assert tracer.next_mapping_event(pid, 5000) == "mapped"
    tracer.resume(pid)
    wait_until(lambda: state(pid, "State").startswith("S"))
    tracer.detach(pid)
    assert tracer.exit_status(pid) is None
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: tracer.exit_status(pid) is not None)
    assert tracer.exit_status(pid) == -signal.SIGTERM


def test_exec_clone_and_exit_are_told(tracer: Tracer) -> None:
    code = (
        "import os,threading\nprint('ready',flush=True)\ninput()\n"
        "t=threading.Thread(target=lambda:0)\nt.start()\nt.join()\nos.execvp('true',['true'])"
    )
    with Target([sys.executable, "-c", code]) as target:
        tracer.attach(target.pid)
        target.go()
        seen: list[str] = []
        end = time.monotonic() + 5
        while "exit" not in seen and time.monotonic() < end:
            seen += [kind for kind, pid, _, _ in tracer.events(100) if pid == target.pid]
        assert seen == ["clone", "exec", "exit"]


def test_ignored_signals_do_not_show_in_a_traced_call(tracer: Tracer) -> None:
    code = (
        "import select,signal,time,ctypes\nl=ctypes.CDLL(None,use_errno=True)\n"
        "fd=select.epoll().fileno() if 0 else l.epoll_create1(0)\nb=ctypes.create_string_buffer(64)\n"
        "print('ready',flush=True)\nr=l.epoll_wait(fd,b,1,600)\nprint(r,ctypes.get_errno())"
    )
    with Target([sys.executable, "-c", code]) as target:
        tracer.attach(target.pid)
        for _ in range(5):
            time.sleep(0.05)
            os.kill(target.pid, signal.SIGWINCH)
        assert target.finish() == "ready\n0 0\n"


def test_a_fork_of_the_recorder_neither_hangs_nor_disturbs_the_tracer(
    start: Start, progs: Programs, tracer: Tracer
) -> None:
    target = start(progs("tracee_hot"), "2", "0")
    tracer.attach(target.pid)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            tracer.threads(target.pid)
        except NativeError as error:
            code = 0 if error.args[0] == "ended" else 2
        tracer.close()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(tracer.threads(target.pid)) == 3


def test_the_owner_ends_with_its_tracer() -> None:
    made = Tracer()
    owner = made.pid
    assert Path(f"/proc/{owner}/comm").read_text() == "ptwprobe-owner\n"
    made.close()
    assert not Path(f"/proc/{owner}").exists()
    with pytest.raises(NativeError) as error:
        made.attach(1)
    assert kind_of(error) == "ended"
    assert isinstance(_native.Tracer, type)
