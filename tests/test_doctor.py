"""The check-up: on this machine, and on machines that folders stand in for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ptwprobe import doctor
from ptwprobe.doctor import Check, Machine
from ptwprobe.patch import runfolder


def by_name(machine: Machine | None = None) -> dict[str, Check]:
    return {check.name: check for check in doctor.checks(machine)}


@pytest.fixture
def elsewhere(tmp_path: Path) -> Machine:
    """A machine whose kernel shows nothing yet; tests put files into it."""
    (tmp_path / "sys").mkdir()
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("Name:\tx\nCapEff:\t0000000000000000\n")
    return Machine(tmp_path / "sys", tmp_path / "proc")


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_what_recording_needs_is_all_here_or_the_other_tests_mean_nothing() -> None:
    assert [check for check in doctor.checks() if check.needed_for == doctor.RING and not check.ok] == []


def test_a_failed_check_always_has_a_remedy(elsewhere: Machine) -> None:
    for machine in (None, elsewhere):
        assert [check.name for check in doctor.checks(machine) if not check.ok and not check.remedy] == []


def test_auto_takes_the_ring_and_says_why(elsewhere: Machine) -> None:
    name, reason = doctor.channel_choice(elsewhere)
    assert name == "ring"
    assert "no intel_pt PMU" in reason
    put(elsewhere.sysfs, "bus/event_source/devices/intel_pt/type", "8\n")
    name, reason = doctor.channel_choice(elsewhere)
    assert name == "ring"
    assert "does not record Intel PT" in reason


def test_no_channel_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    features = dict.fromkeys(("rdpid", "rdtscp", "fsgsbase", "ptwrite_cpuid", "invariant_tsc"), False)
    monkeypatch.setattr("ptwprobe._native.cpu_features", lambda: features)
    name, reason = doctor.channel_choice()
    assert name == ""
    assert "rdtscp" in reason
    assert not by_name()["cpu number"].ok
    assert not by_name()["time stamp counter"].ok


@pytest.mark.parametrize(
    ("cpuinfo", "said"),
    [
        ("flags : fpu hypervisor\n", "this virtual machine does not show Intel PT"),
        ("flags : fpu intel_pt\n", "the CPU has Intel PT, but"),
        ("flags : fpu\n", "the CPU has no Intel PT"),
    ],
)
def test_a_missing_pmu_is_told_apart_by_its_cause(elsewhere: Machine, cpuinfo: str, said: str) -> None:
    put(elsewhere.proc, "cpuinfo", cpuinfo)
    check = by_name(elsewhere)["intel_pt PMU"]
    assert not check.ok
    assert said in check.detail


def test_a_machine_with_pt_and_ptwrite(elsewhere: Machine) -> None:
    pmu = "bus/event_source/devices/intel_pt"
    put(elsewhere.sysfs, f"{pmu}/type", "8\n")
    put(elsewhere.sysfs, f"{pmu}/format/ptw", "config:12\n")
    put(elsewhere.sysfs, f"{pmu}/format/fup_on_ptw", "config:5\n")
    found = by_name(elsewhere)
    assert found["intel_pt PMU"].detail == "type 8"
    assert found["intel_pt/ptw"].ok and "config:12" in found["intel_pt/ptw"].detail
    assert found["intel_pt/fup_on_ptw"].ok


def test_yama_without_the_capability_is_a_failure_with_a_way_out(elsewhere: Machine) -> None:
    put(elsewhere.proc, "sys/kernel/yama/ptrace_scope", "1\n")
    check = by_name(elsewhere)["ptrace"]
    assert not check.ok
    assert "record -- CMD" in check.remedy
    put(elsewhere.proc, "self/status", "CapEff:\t0000000000080000\n")
    assert by_name(elsewhere)["ptrace"].ok


@pytest.mark.parametrize(("readme", "ok"), [("p[:...]\n", False), ("ptw[:[<group>/]<event>] ...\n", True)])
def test_a_kernel_that_takes_ptw_lines_is_found_by_its_readme(elsewhere: Machine, readme: str, ok: bool) -> None:
    put(elsewhere.sysfs, "kernel/tracing/README", readme)
    assert by_name(elsewhere)["tracefs"].ok
    assert by_name(elsewhere)["kernel ptwrite uprobes"].ok == ok


def test_report_as_json_says_the_same_as_the_text() -> None:
    told = json.loads(doctor.report(as_json=True))
    text = doctor.report(as_json=False)
    assert told["channel"] == "ring"
    for check in told["checks"]:
        assert f"{check['name']}: " in text
    assert told["absent_in_this_version"] == doctor.absent()
    assert all(feature in text for feature in doctor.absent())


def test_a_folder_for_journals_that_cannot_be_used_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runfolder, "candidates", lambda: [tmp_path / "no/such/place"])
    check = by_name()["journal"]
    assert not check.ok
    assert f"{tmp_path}/no/such/place: No such file or directory" in check.detail
    assert "usable" in check.remedy
