"""Whatever dies: the target runs on right, ``status`` says what is in it, ``detach`` takes it out."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import cli
from tests.cli import Recording
from tests.live.test_ends import code_at
from tests.recorders import kill_both, layout, our_mappings, owner_of, status_of
from tests.symbols import function
from tests.targets import Target

pytestmark = pytest.mark.needs("root")

Programs = Callable[..., Path]
Start = Callable[..., Target]
PROBE = "probe_me a=$arg1:s64 b=$arg2:s64"
FOLDER = Path("/run/ptwprobe")


@pytest.fixture
def worker(progs: Programs, start: Start) -> Target:
    """Calls ``probe_me`` until its stdin ends, checks what it returns, forks at each line."""
    return start(progs("forks_on"))


def check_whole(worker: Target, binary: Path) -> None:
    """The target's code is the file's again, and it has come to the right results all the time."""
    offset = function(binary, "probe_me")[1]
    assert code_at(worker, binary) == binary.read_bytes()[offset : offset + 16]
    assert worker.finish().endswith("wrong=0 bad=0\n")
    assert worker.exit_code == 0


def files_of(pid: int) -> list[str]:
    """What the folder of journals has about a process."""
    return [item.name for item in FOLDER.iterdir() if item.name.startswith(f"{pid}-")]


def fork(target: Target, nth: int = 1) -> int:
    """Let the worker make its ``nth`` child."""
    target.go()
    return int(target.wait_for(f"child {nth} ").split()[2])


def leave_behind(target: Target, session: Path, *probes: str) -> None:
    """Record for a moment, and kill the recorder and its tracing task."""
    words = [word for probe in probes or (PROBE,) for word in ("-e", probe)]
    with Recording("-p", str(target.pid), *words, "-o", session) as recording:
        time.sleep(0.1)
        kill_both(recording.process)


def record(*words: str | Path) -> cli.Done:
    """``record`` to its end; again where so many other programs run that the target did not stop in time."""
    for _ in range(10):
        done = cli.run("record", *words)
        if "within 100 ms" not in done.stderr:
            break
    return done


def test_after_a_death_of_both_the_target_runs_on_and_is_restored(
    progs: Programs, worker: Target, tmp_path: Path
) -> None:
    before = layout(worker.pid)
    assert status_of(worker.pid) is None
    with Recording("-p", str(worker.pid), "-e", PROBE, "-o", tmp_path / "s.ptw") as recording:
        time.sleep(0.2)
        found = status_of(worker.pid)
        assert found is not None
        assert (found["state"], found["recorder"]) == ("recorded", recording.process.pid)
        kill_both(recording.process)
    found = status_of(worker.pid)
    assert found is not None
    assert (found["state"], found["recorder"], found["comm"]) == ("left-over", None, "forks_on")
    assert [site["state"] for site in found["sites"]] == ["patched"]
    assert {m["kind"] for m in found["mappings"]} == {"ring", "gate", "stubs", "code", "aside"}
    assert Path(found["journal"]).exists()
    printed = json.loads(cli.run("status", "--json").good().stdout)["processes"]
    assert found in printed
    text = cli.run("status", "-p", str(worker.pid)).good().stdout.decode()
    assert text.splitlines()[0].split()[:3] == [str(worker.pid), "left-over", "forks_on"]
    assert len(text.splitlines()) == 1 + len(found["sites"]) + len(found["mappings"])
    done = cli.run("detach", "-p", str(worker.pid)).good()
    assert done.stdout == f"process {worker.pid} (forks_on): 1 site restored, 5 mappings taken out\n".encode()
    assert status_of(worker.pid) is None
    assert layout(worker.pid) == before
    assert not files_of(worker.pid)
    assert "has nothing of ptwprobe" in cli.run("detach", "-p", str(worker.pid)).good().stdout.decode()
    check_whole(worker, progs("forks_on"))


def test_a_target_that_nobody_restores_comes_to_its_right_end(worker: Target, tmp_path: Path) -> None:
    leave_behind(worker, tmp_path / "s.ptw")
    assert worker.finish().endswith("wrong=0 bad=0\n")
    # The journal of a process that has ended goes with the next command.
    worker.process.wait()
    cli.run("status").good()
    assert not files_of(worker.pid)


def test_the_journal_is_not_needed(progs: Programs, worker: Target, tmp_path: Path) -> None:
    before = layout(worker.pid)
    leave_behind(worker, tmp_path / "s.ptw", PROBE, "libc:nanosleep a=+0($arg1)", "libc:clock_nanosleep a=%di")
    for name in files_of(worker.pid):
        (FOLDER / name).unlink()
    found = status_of(worker.pid)
    assert found is not None
    assert (found["state"], found["journal"]) == ("left-over", None)
    assert [site["state"] for site in found["sites"]] == ["patched"] * 3
    cli.run("detach", "-p", str(worker.pid)).good()
    assert layout(worker.pid) == before
    check_whole(worker, progs("forks_on"))


@pytest.mark.parametrize("damage", ["cut", "words", "other", "mode", "link", "owner"])
def test_a_journal_that_cannot_be_trusted_is_named_and_not_used(
    progs: Programs, worker: Target, tmp_path: Path, damage: str
) -> None:
    leave_behind(worker, tmp_path / "s.ptw")
    journal = next(FOLDER / name for name in files_of(worker.pid) if name.endswith(".json"))
    text = json.loads(journal.read_text())
    # Whatever it says there is a site that must not be written to.
    text["sites"][0]["addr"] += 16
    if damage == "cut":
        journal.write_text(journal.read_text()[:-20])
    elif damage == "words":
        journal.write_text(json.dumps(text | {"areas": 5}))
    elif damage == "other":
        journal.write_text(json.dumps(text | {"pid": text["pid"] + 1}))
    elif damage == "mode":
        journal.chmod(0o666)
    elif damage == "link":
        journal.rename(tmp_path / "elsewhere")
        journal.symlink_to(tmp_path / "elsewhere")
    else:
        os.chown(journal, 65534, 65534)
    found = status_of(worker.pid)
    assert found is not None
    assert str(journal) in found["journal_problem"]
    assert [site["state"] for site in found["sites"]] == ["patched"]
    done = cli.run("detach", "-p", str(worker.pid)).good()
    assert f"its journal was not used: {journal}" in done.stdout.decode()
    assert not our_mappings(worker.pid)
    check_whole(worker, progs("forks_on"))


def test_a_site_that_somebody_changed_is_left_alone_and_the_others_are_restored(
    progs: Programs, worker: Target, tmp_path: Path
) -> None:
    leave_behind(worker, tmp_path / "s.ptw", PROBE, "main a=%di")
    found = status_of(worker.pid)
    assert found is not None
    addrs = {int(site["addr"], 16) for site in found["sites"]}
    changed = next(addr for addr in addrs if code_at(worker, progs("forks_on"))[:5] != read(worker.pid, addr, 5))
    original = read(worker.pid, changed, 5)
    write(worker.pid, changed, b"\x0f\x0b\x90\x90\x90")
    found = status_of(worker.pid)
    assert found is not None
    assert sorted(site["state"] for site in found["sites"]) == ["changed", "patched"]
    done = cli.run("detach", "-p", str(worker.pid))
    assert done.exit_code == 4
    assert "1 site restored, 2 mappings taken out" in done.stdout.decode()
    assert f"{changed:#x}: has 0f 0b 90 90 90" in done.stdout.decode()
    assert read(worker.pid, changed, 5) == b"\x0f\x0b\x90\x90\x90"
    assert our_mappings(worker.pid), "the other's undo may bring back our jump"
    write(worker.pid, changed, original)
    cli.run("detach", "-p", str(worker.pid)).good()
    check_whole(worker, progs("forks_on"))


def test_a_stub_that_does_not_match_is_left_alone(progs: Programs, worker: Target, tmp_path: Path) -> None:
    leave_behind(worker, tmp_path / "s.ptw", PROBE, "libc:clock_nanosleep a=%di")
    found = status_of(worker.pid)
    assert found is not None
    site = next(site for site in found["sites"] if site["object"].endswith("/forks_on"))
    stub = int(site["stub"], 16)
    # What is behind the code says where it goes on; nothing executes that.
    byte = read(worker.pid, stub, 1000).index(int(site["addr"], 16).to_bytes(8, "little")) + 8 + stub
    was = flip(worker.pid, byte)
    done = cli.run("detach", "-p", str(worker.pid))
    assert done.exit_code == 4
    assert "no stub of this version" in done.stdout.decode()
    assert "1 site restored, 4 mappings taken out" in done.stdout.decode()
    assert flip(worker.pid, byte) == was ^ 1
    cli.run("detach", "-p", str(worker.pid)).good()
    check_whole(worker, progs("forks_on"))


def read(pid: int, addr: int, size: int) -> bytes:
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        return os.pread(memory.fileno(), size, addr)


def write(pid: int, addr: int, data: bytes) -> None:
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        assert os.pwrite(memory.fileno(), data, addr) == len(data)


def flip(pid: int, addr: int) -> int:
    """Flip the lowest bit of a byte of the stubs, which the process itself cannot write; what was there."""
    for line in our_mappings(pid):
        place, _, offset, *_ = line.split()
        start, end = (int(word, 16) for word in place.split("-"))
        if start <= addr < end:
            with Path(f"/proc/{pid}/map_files/{place}").open("r+b", buffering=0) as file:
                at = int(offset, 16) + addr - start
                was = os.pread(file.fileno(), 1, at)[0]
                os.pwrite(file.fileno(), bytes([was ^ 1]), at)
                return was
    raise AssertionError(f"{addr:#x} is not ours")


def test_stubs_are_kept_while_a_signal_frame_leads_into_them(progs: Programs, start: Start, tmp_path: Path) -> None:
    target = start(progs("lingers"))
    before = layout(target.pid)
    with Recording("-p", str(target.pid), "-e", PROBE, "-o", tmp_path / "s.ptw") as recording:
        # The stub is most of what it executes, so that the signal comes there sooner or later.
        for turn in range(50):
            os.kill(target.pid, signal.SIGUSR1)
            wait_for_count(target, "lingers", turn + 1)
            if interrupted_in_stub(target.pid):
                break
            os.kill(target.pid, signal.SIGUSR2)
            wait_for_count(target, "goes on", turn + 1)
        done = recording.stop().good()
    assert "stubs and ring stay mapped" in done.stderr
    found = status_of(target.pid)
    assert found is not None
    assert found["state"] == "kept"
    assert [site["state"] for site in found["sites"]] == ["original"]
    assert {m["kind"] for m in found["mappings"]} == {"ring", "gate", "stubs"}
    refused = cli.run("detach", "-p", str(target.pid))
    assert refused.exit_code == 4
    assert "a thread is still inside a stub" in refused.stdout.decode()
    # Meanwhile it can be recorded again, and what was kept goes as soon as it can.
    second = record("-p", str(target.pid), "-e", PROBE, "-o", tmp_path / "2.ptw", "--duration", "0.1").good()
    assert "stay" in second.stderr
    again = status_of(target.pid)
    assert again is not None and again["mappings"] == found["mappings"]
    os.kill(target.pid, signal.SIGUSR2)
    third = record("-p", str(target.pid), "-e", PROBE, "-o", tmp_path / "3.ptw", "--duration", "0.1").good()
    assert third.totals.hits > 0
    assert status_of(target.pid) is None
    assert layout(target.pid) == before
    assert target.finish().endswith("wrong=0\n")


def wait_for_count(target: Target, text: str, count: int) -> None:
    """Until a program has said something so many times."""
    end = time.monotonic() + 20
    while target.peek().count(text) < count:
        assert time.monotonic() < end
        time.sleep(0.002)


def interrupted_in_stub(pid: int) -> bool:
    """Whether the topmost pages of its stack hold an address in a stub."""
    stubs = [line.split()[0].split("-") for line in our_mappings(pid) if "[uprobes" in line]
    ranges = [range(int(start, 16), int(end, 16)) for start, end in stubs]
    sp = int(Path(f"/proc/{pid}/syscall").read_text().split()[-2], 16)
    words = struct.unpack("<400Q", read(pid, sp, 3200))
    return any(word in r for word in words for r in ranges)


def test_both_killed_at_any_moment(progs: Programs, start: Start, tmp_path: Path, full: bool) -> None:
    """While the probes go in, record, and come out, with a child forked meanwhile; always restorable, nothing stays."""
    dice = random.Random(7)
    for turn in range(300 if full else 6):
        worker = start(progs("forks_on"))
        before = layout(worker.pid)
        words = ["record", "-p", str(worker.pid), "-e", PROBE, "-e", "libc:clock_nanosleep a=+0(%dx)"]
        recorder = subprocess.Popen(
            [*cli.COMMAND, *words, "-o", tmp_path / "s.ptw"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert recorder.stdout is not None
        if turn % 3:
            assert b"recording into" in recorder.stdout.readline()
            child = fork(worker)
            if turn % 3 == 2:
                recorder.send_signal(signal.SIGINT)
                time.sleep(dice.uniform(0, 0.1))
        else:
            child = 0
            while not files_of(worker.pid) and recorder.poll() is None:
                time.sleep(0.0005)
            time.sleep(dice.uniform(0, 0.1))
        with contextlib.suppress(AssertionError, ProcessLookupError):
            os.kill(owner_of(recorder.pid), signal.SIGKILL)
        recorder.kill()
        recorder.communicate()
        done = cli.run("detach", "-p", str(worker.pid), "--all").good()
        for pid in (worker.pid, child) if child else (worker.pid,):
            assert not our_mappings(pid), done.stdout.decode()
            assert status_of(pid) is None
        assert worker.is_alive() and layout(worker.pid) == before, done.stdout.decode()
        assert not files_of(worker.pid)
        check_whole(worker, progs("forks_on"))


def test_a_detach_that_is_killed_is_done_by_the_next(progs: Programs, start: Start, tmp_path: Path, full: bool) -> None:
    dice = random.Random(11)
    for turn in range(200 if full else 4):
        worker = start(progs("forks_on"))
        before = layout(worker.pid)
        leave_behind(worker, tmp_path / "s.ptw", PROBE, "libc:clock_nanosleep a=+0(%dx)")
        detach = subprocess.Popen([*cli.COMMAND, "detach", "-p", str(worker.pid)], stdout=subprocess.DEVNULL)
        # Looking takes a moment; what matters comes with the tracing task.
        end = time.monotonic() + 5
        while time.monotonic() < end and detach.poll() is None:
            with contextlib.suppress(AssertionError, ProcessLookupError):
                owner = owner_of(detach.pid)
                time.sleep(dice.uniform(0, 0.02))
                if turn % 2:
                    os.kill(owner, signal.SIGKILL)
                break
        detach.kill()
        detach.wait()
        done = cli.run("detach", "-p", str(worker.pid)).good()
        assert worker.is_alive() and layout(worker.pid) == before, done.stdout.decode()
        assert not files_of(worker.pid)
        check_whole(worker, progs("forks_on"))


# ---------------------------------------------------------------- who records


def test_refusal_busy_while_another_recorder_is_at_work(progs: Programs, worker: Target, tmp_path: Path) -> None:
    with Recording("-p", str(worker.pid), "-e", PROBE, "-o", tmp_path / "s.ptw") as recording:
        who = f"in the hands of ptwprobe (pid {recording.process.pid})"
        for words in (["detach", "-p", str(worker.pid)], ["detach", "-p", str(worker.pid), "--all"]):
            refused = cli.run(*words)
            assert refused.exit_code == 4
            assert "refused (busy)" in refused.stderr and who in refused.stderr
        second = cli.run("record", "-p", str(worker.pid), "-e", "main", "-o", tmp_path / "2.ptw", "--duration", "0.1")
        assert second.exit_code == 4
        assert "refused (busy)" in second.stderr and who in second.stderr
        assert not (tmp_path / "2.ptw").exists()
        done = recording.stop().good()
    assert done.totals.hits > 0
    check_whole(worker, progs("forks_on"))


def test_a_recorder_is_known_when_its_lock_and_journal_were_removed(
    progs: Programs, worker: Target, tmp_path: Path
) -> None:
    with Recording("-p", str(worker.pid), "-e", PROBE, "-o", tmp_path / "s.ptw") as recording:
        for name in files_of(worker.pid):
            (FOLDER / name).unlink()
        found = status_of(worker.pid)
        assert found is not None
        assert (found["state"], found["recorder"]) == ("recorded", recording.process.pid)
        refused = cli.run("detach", "-p", str(worker.pid))
        assert refused.exit_code == 4
        assert f"(pid {recording.process.pid})" in refused.stderr
        again = cli.run("record", "-p", str(worker.pid), "-e", PROBE, "-o", tmp_path / "2.ptw", "--duration", "0.1")
        assert again.exit_code == 4
        recording.stop().good()
    check_whole(worker, progs("forks_on"))


def test_a_killed_recorder_restores_by_its_tracing_task_and_detach_waits_for_it(
    progs: Programs, worker: Target, tmp_path: Path
) -> None:
    with Recording("-p", str(worker.pid), "-e", PROBE, "-o", tmp_path / "s.ptw") as recording:
        recording.process.kill()
        recording.process.wait()
        done = cli.run("detach", "-p", str(worker.pid)).good()
    assert "nothing of ptwprobe" in done.stdout.decode() or "restored" in done.stdout.decode()
    assert not our_mappings(worker.pid)
    assert not files_of(worker.pid)
    check_whole(worker, progs("forks_on"))


def test_a_recording_restores_first_what_another_left(progs: Programs, worker: Target, tmp_path: Path) -> None:
    leave_behind(worker, tmp_path / "s.ptw", PROBE, "libc:clock_nanosleep a=%di")
    done = cli.run("record", "-p", str(worker.pid), "-e", PROBE, "-o", tmp_path / "2.ptw", "--duration", "0.2").good()
    assert "2 patched sites of an earlier recording: restored" in done.stderr
    assert len(cli.hits(tmp_path / "2.ptw")) == done.totals.hits > 0
    assert not our_mappings(worker.pid)
    assert not files_of(worker.pid)
    check_whole(worker, progs("forks_on"))


# ---------------------------------------------------------------- fork, exec, exit


@pytest.mark.parametrize("recorder", ["ended", "killed"])
def test_fork_children_are_found_and_restored(worker: Target, tmp_path: Path, recorder: str) -> None:
    with Recording("-p", str(worker.pid), "-e", PROBE, "-o", tmp_path / "s.ptw") as recording:
        children = [fork(worker, 1), fork(worker, 2)]
        first = status_of(children[0])
        assert first is not None
        assert (first["state"], first["recorder"]) == ("inherited", recording.process.pid)
        # A child is nobody's: it may be restored while its parent is recorded.
        cli.run("detach", "-p", str(children[0])).good()
        assert status_of(children[0]) is None
        if recorder == "ended":
            done = recording.stop().good()
            assert f"forked from process {worker.pid}" in done.stderr
            assert str(children[1]) in done.stderr and str(children[0]) not in done.stderr
            assert status_of(worker.pid) is None
        else:
            kill_both(recording.process)
    found = status_of(children[1])
    assert found is not None
    assert (found["state"], found["recorder"]) == ("inherited", None)
    assert [site["state"] for site in found["sites"]] == ["patched"]
    done = cli.run("detach", "-p", str(worker.pid), "--all").good()
    assert f"process {children[1]} (forks_on): 1 site restored" in done.stdout.decode()
    for pid in (worker.pid, *children):
        assert status_of(pid) is None
        assert not our_mappings(pid)
    assert worker.finish().endswith("wrong=0 bad=0\n")


def test_a_fork_child_is_recorded(worker: Target, tmp_path: Path) -> None:
    with Recording("-p", str(worker.pid), "-e", PROBE, "-o", tmp_path / "s.ptw") as recording:
        child = fork(worker)
        second = cli.run("record", "-p", str(child), "-e", PROBE, "-o", tmp_path / "2.ptw", "--duration", "0.3").good()
        assert "restored" in second.stderr
        done = recording.stop().good()
    for session, pid, who in (("s.ptw", worker.pid, 0), ("2.ptw", child, 1)):
        hits = cli.hits(tmp_path / session)
        assert hits
        assert {(hit["pid"], cli.arguments(hit)[0]) for hit in hits} == {(pid, who)}
    assert "forked from" not in done.stderr
    assert not our_mappings(child)
    assert worker.finish().endswith("wrong=0 bad=0\n")


def test_children_of_a_process_that_has_ended_are_restored(worker: Target, tmp_path: Path) -> None:
    with Recording("-p", str(worker.pid), "-e", PROBE, "-o", tmp_path / "s.ptw") as recording:
        child = fork(worker)
        # Killed, so that its child goes on: nobody closes the pipe that it looks at but its own end does.
        os.kill(child, signal.SIGSTOP)
        worker.process.kill()
        worker.process.wait()
        done = recording.finish().good()
    assert f"{child}; `ptwprobe detach -p {worker.pid} --all`" in done.stderr
    done = cli.run("detach", "-p", str(worker.pid), "--all").good()
    assert f"process {child} (forks_on): 1 site restored" in done.stdout.decode()
    assert not our_mappings(child)
    os.kill(child, signal.SIGKILL)


def test_detach_of_what_is_gone(tmp_path: Path) -> None:
    child = subprocess.Popen(["/bin/true"])
    child.wait()
    for words in (["detach", "-p"], ["status", "-p"]):
        done = cli.run(*words, str(child.pid))
        assert done.exit_code == 4
        assert "does not exist" in done.stderr


def test_after_an_exec_there_is_nothing_and_nothing_is_touched(progs: Programs, start: Start, tmp_path: Path) -> None:
    target = start(progs("execs"), "1000")
    leave_behind(target, tmp_path / "s.ptw")
    assert files_of(target.pid)
    target.go()
    target.wait_for("image=1")
    end = time.monotonic() + 10
    while our_mappings(target.pid):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert status_of(target.pid) is None
    assert not files_of(target.pid)
    assert "nothing of ptwprobe" in cli.run("detach", "-p", str(target.pid)).good().stdout.decode()
    assert target.finish() == "ready\nimage=1 sum=1000502500\nimage=2 sum=2000505500\n"


def test_a_journal_of_another_process_with_the_same_pid_is_not_used(worker: Target, tmp_path: Path) -> None:
    leave_behind(worker, tmp_path / "s.ptw")
    journal = next(FOLDER / name for name in files_of(worker.pid) if name.endswith(".json"))
    text = json.loads(journal.read_text())
    for change in ({"start_time": text["start_time"] - 5}, {"boot_id": "another"}):
        new = text | change
        stale = FOLDER / f"{new['pid']}-{new['start_time']}.json"
        stale.write_text(json.dumps(new))
        cli.run("status", "-p", str(worker.pid)).good()
        assert not stale.exists()
    cli.run("detach", "-p", str(worker.pid)).good()
    assert worker.finish().endswith("wrong=0 bad=0\n")
