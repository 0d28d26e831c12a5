"""Cores and memory of the host: the limits of containers and jobs count, whatever the machine has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
import torch

from surogate_core import host
from surogate_core.engine.device_memory import free_memory
from surogate_core.host import MEMORY_FILES, cores, free_host_memory, memory_of_machine

MIB = 1 << 20
V1, V2 = MEMORY_FILES[1], MEMORY_FILES[2]
Names = tuple[str, str, str, str]


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of control groups; the process is in none yet."""
    monkeypatch.setattr(host, "GROUPS", tmp_path)
    monkeypatch.setattr(host, "GROUPS_OF_PROCESS", tmp_path / "of_process")
    return tmp_path


def write(group: Path, names: Names, limit: object, used: int = 0, cached: int = MIB) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / names[0]).write_text(f"{limit}\n")
    (group / names[1]).write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon {used}\n{names[2]} {cached - MIB}\n{names[3]} {MIB}\n")


def physical() -> int:
    return int(psutil.virtual_memory().total)


CASES: Mapping[str, tuple[str, list[tuple[str, Names, object, int, int]], tuple[int, int] | None]] = {
    "a container": ("0::/", [("", V2, 64 * MIB, 20 * MIB, 5 * MIB)], (64, 49)),
    "no limit": ("0::/", [("", V2, "max", 20 * MIB, 0)], None),
    "a job within a smaller step": (
        "0::/slurm/job/step",
        [("slurm/job", V2, 80 * MIB, 10 * MIB, 0), ("slurm/job/step", V2, 90 * MIB, 60 * MIB, 0)],
        (80, 30),
    ),
    "version 1": ("4:cpu,memory:/pod\n0::/", [("memory/pod", V1, 70 * MIB, 10 * MIB, 4 * MIB)], (70, 64)),
    "version 1 without a limit": ("4:memory:/", [("memory", V1, 9223372036854771712, 10 * MIB, 0)], None),
    "the path outside of the container": ("4:memory:/docker/ab", [("memory", V1, 32 * MIB, MIB, 0)], (32, 31)),
    "more is used than allowed": ("0::/", [("", V2, 8 * MIB, 9 * MIB, 0)], (8, 0)),
}


@pytest.mark.parametrize("case", CASES)
def test_the_smallest_limit_of_memory_counts(groups: Path, case: str) -> None:
    process, files, expected = CASES[case]
    (groups / "of_process").write_text(f"12:cpuset:/\n{process}\n")
    for name, names, limit, used, cached in files:
        write(groups / name, names, limit, used, cached)
    if expected is None:
        assert memory_of_machine() == physical()
        assert free_host_memory() > 64 * MIB
        return
    assert memory_of_machine() == expected[0] * MIB
    assert free_host_memory() == expected[1] * MIB
    assert free_memory(torch.device("cpu"), ranks=2) == expected[1] * MIB // 2


def test_a_sandbox_may_show_the_limit_alone(groups: Path) -> None:
    (groups / "of_process").write_text("0::/")
    (groups / "memory.max").write_text(str(64 * MIB))
    assert memory_of_machine() == free_host_memory() == 64 * MIB
    (groups / "memory.current").write_text(str(4 * MIB))
    (groups / "memory.stat").write_text("anon 5\n")
    assert free_host_memory() == 60 * MIB


@pytest.mark.parametrize("text", [None, "", "of another form"])
def test_a_system_without_control_groups_has_its_memory(groups: Path, text: str | None) -> None:
    if text is not None:
        (groups / "of_process").write_text(text)
    assert memory_of_machine() == physical()
    assert 0 < free_host_memory() <= physical()


@pytest.mark.parametrize(
    ("process", "file", "text", "expected"),
    [
        ("0::/", "cpu.max", "250000 100000", 2),
        ("0::/", "cpu.max", "50000 100000", 1),
        ("0::/", "cpu.max", "max 100000", 13),
        ("0::/", "cpu.max", "9900000 100000", 13),
        ("0::/slurm/job/step", "slurm/job/cpu.max", "400000 100000", 4),
        ("3:cpu,cpuacct:/pod", "cpu/pod/cpu.cfs_quota_us", "300000", 3),
        ("3:cpu,cpuacct:/pod", "cpu/pod/cpu.cfs_quota_us", "-1", 13),
        ("3:memory:/pod", "cpu.max", "100000 100000", 13),
    ],
)
def test_the_smallest_quota_of_cores_counts(
    groups: Path, monkeypatch: pytest.MonkeyPatch, process: str, file: str, text: str, expected: int
) -> None:
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: set(range(13)), raising=False)
    (groups / "of_process").write_text(process)
    (groups / file).parent.mkdir(parents=True, exist_ok=True)
    (groups / file).write_text(text)
    (groups / file).with_name("cpu.cfs_period_us").write_text("100000")
    monkeypatch.setattr(host.os, "cpu_count", lambda: 64)
    assert cores() == expected
    most = 64 if expected == 13 else expected
    assert cores(ranks=2) == max(min(13, most // 2), 1), "a rank may be bound to cores of its own"
