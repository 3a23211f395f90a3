"""The Python API on live processes, and the three examples as users run them."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ptwprobe
from ptwprobe.errors import RefusalReason, RefusedError, ResolveError, TargetGoneError, UnsupportedError, UsageError
from tests.cli import run
from tests.targets import Target

Programs = Callable[..., Path]
Start = Callable[..., Target]

EXAMPLES = Path(__file__).parents[2] / "examples"
PROBE = "probe_me a=$arg1:s64 b=$arg2:s64"


def site_bytes(session: ptwprobe.Session, pid: int) -> bytes:
    """What stands at the session's first site in the process."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
        return os.pread(memory.fileno(), 8, session.events.events()[0].sites[pid])


def test_values_come_back_and_the_program_is_as_before(progs: Programs, start: Start, tmp_path: Path) -> None:
    target = start(progs("calls"), "2", "1000", "0")
    with ptwprobe.Session(pid=target.pid, output=tmp_path / "s.ptw") as session:
        session.add(PROBE)
        session.start()
        patched = site_bytes(session, target.pid)
        assert patched[0] == 0xE9
        output = target.finish()
        session.wait(10)
        totals = session.stop()
    assert totals == ptwprobe.Totals(hits=2000)
    assert "calls=2000 " in output
    hits = list(ptwprobe.open(tmp_path / "s.ptw").hits())
    assert sorted((hit.args["a"], hit.args["b"]) for hit in hits) == [(a, b) for a in range(2) for b in range(1000)]
    assert [hit.ns for hit in hits] == sorted(hit.ns for hit in hits)
    assert {hit.event for hit in hits} == {"probe_calls/probe_me"}


def test_the_bytes_are_back_after_the_session(progs: Programs, start: Start, tmp_path: Path) -> None:
    target = start(progs("calls"), "2", "100000000", "1000")
    session = ptwprobe.Session(pid=target.pid, output=tmp_path / "s.ptw")
    session.add(PROBE)
    session.start()
    assert site_bytes(session, target.pid)[0] == 0xE9
    session.stop()
    assert site_bytes(session, target.pid)[0] != 0xE9
    assert "uprobes-ptwrite" not in Path(f"/proc/{target.pid}/maps").read_text()


def test_who_traces_the_target_at_the_end_gets_time_to_go(progs: Programs, start: Start, tmp_path: Path) -> None:
    target = start(progs("calls"), "1", "100000000", "1000")
    session = ptwprobe.Session(pid=target.pid, output=tmp_path / "s.ptw")
    session.add(PROBE)
    session.start()
    tracer = subprocess.Popen(
        ["gdb", "-q", "-batch", "-p", str(target.pid), "-ex", "shell sleep 1.5"], stdout=subprocess.DEVNULL
    )
    status = Path(f"/proc/{target.pid}/status")
    end = time.monotonic() + 20
    while "TracerPid:\t0\n" in status.read_text() and time.monotonic() < end:
        time.sleep(0.05)
    assert "TracerPid:\t0\n" not in status.read_text(), "gdb did not attach"
    session.stop()
    tracer.wait()
    assert site_bytes(session, target.pid)[0] != 0xE9


def test_a_target_that_somebody_traces_is_refused_by_the_tracers_name(
    progs: Programs, start: Start, tmp_path: Path
) -> None:
    target = start(progs("calls"), "1", "100000000", "1000")
    with subprocess.Popen(["strace", "-f", "-o", "/dev/null", "-p", str(target.pid)]) as tracer:
        status = Path(f"/proc/{target.pid}/status")
        end = time.monotonic() + 20
        while "TracerPid:\t0\n" in status.read_text() and time.monotonic() < end:
            time.sleep(0.05)
        done = run("record", "-p", str(target.pid), "-e", PROBE, "-o", tmp_path / "s.ptw")
        tracer.terminate()
    assert (done.exit_code, done.totals.hits) == (3, 0)
    assert "(strace) traces it" in done.stderr
    assert not (tmp_path / "s.ptw").exists()


def test_a_second_recorder_on_the_same_process_is_told_who_has_it(
    progs: Programs, start: Start, tmp_path: Path
) -> None:
    target = start(progs("calls"), "1", "100000000", "1000")
    with ptwprobe.Session(pid=target.pid, output=tmp_path / "one.ptw") as first:
        first.add(PROBE)
        first.start()
        second = ptwprobe.Session(pid=target.pid, output=tmp_path / "two.ptw")
        for probe in (PROBE, "main"):
            with pytest.raises(RefusedError) as caught:
                second.add(probe)
            assert caught.value.reason is RefusalReason.BUSY
            assert f"(pid {os.getpid()})" in caught.value.message
        sites = run("list", "-p", str(target.pid), "--sites", "probe_me").good().stdout.decode()
        assert f"ptwprobe detach -p {target.pid}" in sites


def test_a_thread_of_another_process_is_a_mistake(progs: Programs, start: Start, tmp_path: Path) -> None:
    target = start(progs("calls"), "1", "10", "0")
    with pytest.raises(UsageError, match=f"thread {os.getpid()} is not of process {target.pid}"):
        ptwprobe.Session(pid=target.pid, threads=[os.getpid()], output=tmp_path / "s.ptw")


def test_a_zombie_has_ended(tmp_path: Path) -> None:
    child = subprocess.Popen(["/bin/true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(UnsupportedError, match="has ended and waits for its parent"):
        ptwprobe.Session(pid=child.pid, output=tmp_path / "s.ptw")
    child.wait()


def test_an_end_is_no_exec_however_long_it_takes(progs: Programs, start: Start, tmp_path: Path) -> None:
    target = start(progs("calls"), "2", "200000", "0")
    session = ptwprobe.Session(pid=target.pid, output=tmp_path / "s.ptw", ring_bits=28)
    session.add(PROBE)
    session.start()
    target.go()
    while session.poll() is None:
        pass
    assert session.stop() == ptwprobe.Totals(hits=400000)
    assert session.end is not None
    assert session.end.value == "exit"


def test_a_killed_recorder_leaves_no_patch(progs: Programs, start: Start, tmp_path: Path) -> None:
    target = start(progs("calls"), "2", "100000000", "100000")
    target.go()
    code = f"""
import ptwprobe, sys
session = ptwprobe.Session(pid={target.pid}, output={str(tmp_path / "s.ptw")!r})
session.add({PROBE!r})
session.start()
print(session.events.events()[0].sites[{target.pid}], flush=True)
session.wait()
"""
    recorder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert recorder.stdout is not None
    addr = int(recorder.stdout.readline())

    def first_byte() -> int:
        with open(f"/proc/{target.pid}/mem", "rb", buffering=0) as memory:  # noqa: PTH123
            return os.pread(memory.fileno(), 1, addr)[0]

    assert first_byte() == 0xE9
    time.sleep(0.3)
    recorder.kill()
    recorder.wait()
    end = time.monotonic() + 20
    while first_byte() == 0xE9 and time.monotonic() < end:
        time.sleep(0.02)
    assert first_byte() != 0xE9
    assert target.process.poll() is None
    hits = sum(1 for _ in ptwprobe.open(tmp_path / "s.ptw").hits())
    assert hits > 0, "what was recorded before the kill can be read"


def test_a_session_is_private_to_its_user(progs: Programs, start: Start, tmp_path: Path) -> None:
    target = start(progs("calls"), "1", "10", "0")
    with ptwprobe.Session(pid=target.pid, output=tmp_path / "s.ptw") as session:
        session.add(PROBE)
        session.start()
    assert stat.S_IMODE((tmp_path / "s.ptw").stat().st_mode) == 0o700
    files = list((tmp_path / "s.ptw").iterdir())
    assert {stat.S_IMODE(f.stat().st_mode) for f in files if f.is_file()} == {0o600}
    assert json.loads((tmp_path / "s.ptw" / "session.json").read_text())["end"] == "stopped"


def test_a_failed_start_leaves_nothing(progs: Programs, start: Start, tmp_path: Path) -> None:
    target = start(progs("calls"), "1", "10", "0")
    session = ptwprobe.Session(pid=target.pid, output=tmp_path / "s.ptw")
    session.add(PROBE)
    session.add("again/twice=" + PROBE)
    with pytest.raises(RefusedError) as caught:
        session.start()
    assert caught.value.reason is RefusalReason.ALREADY_PROBED
    assert not (tmp_path / "s.ptw").exists()
    assert "uprobes-ptwrite" not in Path(f"/proc/{target.pid}/maps").read_text()


def test_errors_of_probes_come_when_they_are_added(progs: Programs, start: Start, tmp_path: Path) -> None:
    target = start(progs("calls"), "1", "10", "0")
    session = ptwprobe.Session(pid=target.pid, output=tmp_path / "s.ptw")
    with pytest.raises(ResolveError, match="no function 'probe_mee'"):
        session.add("probe_mee")
    with pytest.raises(RefusedError) as caught:
        session.add("probe_me+0x1 a=%di")
    assert caught.value.reason is RefusalReason.NOT_AN_INSTRUCTION
    with pytest.raises(UsageError, match="no probe"):
        session.start()
    assert not (tmp_path / "s.ptw").exists()


def test_a_process_that_is_gone(tmp_path: Path) -> None:
    child = subprocess.Popen(["/bin/true"])
    child.wait()
    with pytest.raises(TargetGoneError):
        ptwprobe.Session(pid=child.pid, output=tmp_path / "s.ptw")


@pytest.mark.parametrize("sites", ["dlopened", "never"])
def test_a_command_that_never_maps_the_object_is_told(sites: str, tmp_path: Path) -> None:
    session = ptwprobe.Session(command=["/bin/true"], output=tmp_path / "s.ptw")
    session.add("libcrypto:EVP_DigestUpdate")
    if sites == "dlopened":
        session.add("libc:exit status=$arg1:s32")
    session.start()
    if sites == "never":
        with pytest.raises(ResolveError, match="never mapped"):
            session.wait(30)
    else:
        session.wait(30)
    session.stop()
    assert session.exit_status == 0 or sites == "never"
    assert any("never mapped" in note for note in session.notes)


def test_an_object_that_is_dlopened_is_probed_when_it_comes(tmp_path: Path) -> None:
    code = "import ctypes; z = ctypes.CDLL('libz.so.1'); print(z.crc32(0, b'ptwprobe', 8))"
    session = ptwprobe.Session(command=["/usr/bin/python3", "-S", "-c", code], output=tmp_path / "s.ptw")
    session.add("libz:crc32 length=$arg3:u32")
    totals = session.run(30)
    assert totals == ptwprobe.Totals(hits=1)
    assert [hit.args for hit in ptwprobe.open(tmp_path / "s.ptw").hits()] == [{"length": 8}]
    assert session.exit_status == 0


def test_bad_pointers_in_vfork_children_harm_nobody(tmp_path: Path) -> None:
    code = (
        "import subprocess\n"
        "for _ in range(20): print(subprocess.run(['/bin/echo', 'x'], stdout=-1))\n"  # by vfork
        "import os\nos.close(os.open('/', 0))"
    )
    command = ["/usr/bin/python3", "-c", code]
    plain = subprocess.run(command, capture_output=True, check=True).stdout
    probes = ["libc:close m=+0($arg1)", "libc:dup2 m=+0($arg1)", "libc:execve m=+0(%cx)"]
    words = [word for probe in probes for word in ("-e", probe)]
    done = run("record", "-o", tmp_path / "s.ptw", "--json", *words, "--", *command).good()
    assert done.own_output == plain
    assert (done.totals.torn, done.totals.lost) == (0, 0)
    events = [hit.event for hit in ptwprobe.open(tmp_path / "s.ptw").hits()]
    assert events.count("probe_libc/dup2") >= 20
    assert done.summary["totals"]["faults"] >= 40


def example(name: str, *words: str | Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(EXAMPLES / name), *(str(word) for word in words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_example_instrument_running(start: Start) -> None:
    busy = "print('ready', flush=True)\nimport zlib\nwhile True: zlib.decompress(zlib.compress(bytes(5000)))"
    target = start("/usr/bin/python3", "-c", busy)
    run = example("instrument_running.py", str(target.pid), "1")
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err.decode()
    assert f"thread {target.pid}: ".encode() in out
    assert target.process.poll() is None


def test_example_attach_by_pid(progs: Programs, start: Start) -> None:
    targets = [start(progs("calls"), "1", "100000", "100") for _ in range(2)]
    run = example("attach_by_pid.py", PROBE, *(str(t.pid) for t in targets))
    assert run.stdout is not None
    for target in targets:
        target.go()
    seen = b""
    end = time.monotonic() + 30
    while time.monotonic() < end and not all(f"calls/{t.pid + 1} ".encode() in seen for t in targets):
        seen += run.stdout.read1(65536)  # type: ignore[attr-defined]
    run.send_signal(signal.SIGINT)
    rest, err = run.communicate(timeout=60)
    assert run.returncode == 0, err.decode()
    assert b"probe_calls/probe_me" in seen
    assert b"hits=" in rest + seen
    assert all(t.process.poll() is None for t in targets)


def test_example_record_and_decode(tmp_path: Path) -> None:
    sql = "create table t(a); insert into t values(1),(2),(3); select sum(a) from t;"
    probe = "libc:malloc size=$arg1:u64"
    run = example("record_and_decode.py", tmp_path / "s.ptw", probe, "--", "/usr/bin/sqlite3", ":memory:", sql)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 0, err.decode()
    assert out.startswith(b"6\n")
    assert b"probe_libc/malloc: " in out
    assert b"lost=0" in out
