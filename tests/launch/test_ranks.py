"""Which rank an environment names, and which GPU the rank gets."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from surogate_core.errors import ConfigError, MachineError, UserError
from surogate_core.launch import gpus, local
from surogate_core.launch.gpus import rotated, visible
from surogate_core.launch.ranks import Rank, check_count, joined, rank_of

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "31234",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]-b,login1",
}


def test_torchrun_names_the_rank() -> None:
    assert rank_of(TORCHRUN) == Rank(
        rank=5, world=8, local_rank=1, local_world=4, address="host", port=29500, by="RANK and WORLD_SIZE"
    )
    least = {key: TORCHRUN[key] for key in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    found = rank_of(least)
    assert found is not None
    assert (found.local_rank, found.local_world) == (5, 8)


def test_slurm_names_the_rank() -> None:
    found = rank_of(SLURM)
    assert found == Rank(rank=5, world=7, local_rank=1, local_world=3, address="gpu07-b", port=31234, by="SLURM")
    found = rank_of({**SLURM, "MASTER_ADDR": "head", "MASTER_PORT": "4000"})
    assert found is not None
    assert (found.address, found.port) == ("head", 4000)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0", "WORLD_SIZE": "1"},
        # A batch script is one process, however many tasks its job may start.
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"},
        # It may export the address for the processes that it starts by srun.
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7", "MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
        # So is the shell of salloc, which is a step of one task.
        {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_one_process_joins_nothing(environment: dict[str, str]) -> None:
    assert rank_of(environment) is None


@pytest.mark.parametrize("given", [{"RANK": "16"}, {"WORLD_SIZE": "8"}, {"RANK": "high"}])
def test_one_name_alone_is_no_rank(given: dict[str, str]) -> None:
    """A script for LoRA may export RANK=16."""
    with capture_logs() as logs:
        assert rank_of(given) is None
    ((name, value),) = given.items()
    assert [entry["event"] for entry in logs] == [f"{name}={value} in the environment alone is no rank, and is ignored"]
    found = rank_of({**SLURM, **given})
    assert found is not None
    assert found.by == "SLURM"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": None}, r"the environment has RANK=5 but no WORLD_SIZE\. Fix: .*torchrun, or unset RANK"),
        ({"RANK": None}, r"the environment has WORLD_SIZE=8 but no RANK\."),
        ({"RANK": "8"}, r"rank 8 of 8; ranks are 0 to 7"),
        ({"RANK": "-1"}, r"rank -1 of 8"),
        ({"RANK": "one"}, r"RANK=one in the environment is not a whole number"),
        ({"MASTER_PORT": None}, r"RANK=5 and WORLD_SIZE=8 but no MASTER_PORT"),
        ({"MASTER_PORT": "0"}, r"MASTER_PORT=0 is no port"),
        ({"LOCAL_RANK": "4"}, r"local rank 4 of 4 on this machine, in a run of 8 processes"),
    ],
)
def test_half_a_name_is_refused(changes: dict[str, str | None], message: str) -> None:
    environment = {key: value for key, value in {**TORCHRUN, **changes}.items() if value is not None}
    with pytest.raises(UserError, match=message):
        rank_of(environment)


def test_gpus_agree_with_the_processes_that_were_started() -> None:
    found = rank_of(TORCHRUN)
    assert found is not None
    for agreeing in (0, 1, 4, 8):
        check_count(found, agreeing)
    with pytest.raises(ConfigError, match="gpus: 2 GPUs, but RANK and WORLD_SIZE started 8 processes"):
        check_count(found, 2)


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        found = Rank(rank=0, world=2, local_rank=0, local_world=2, address="127.0.0.1", port=port, by="SLURM")
        with pytest.raises(MachineError, match=rf"MASTER_PORT={port}: another process has this port\. Fix: set MASTER"):
            joined(found)


# --------------------------------------------------------------------------------------- GPUs


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2,3", ["2", "3"]),
        ("GPU-aa, GPU-bb", ["GPU-aa", "GPU-bb"]),
        ("1,7,2", ["1"]),  # CUDA ignores what follows an unknown number
        ("-1", []),
        ("", []),
    ],
)
def test_visible_gpus(named: str | None, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "count", lambda: 4)
    assert visible({} if named is None else {"CUDA_VISIBLE_DEVICES": named}) == expected


class Nvml:
    """As much of the library as counting needs."""

    def __init__(self, gpus: int | None):
        self.gpus, self.open = gpus, 0

    def nvmlInit_v2(self) -> int:  # noqa: N802
        self.open += 1
        return 0 if self.gpus is not None else 9

    def nvmlDeviceGetCount_v2(self, found: Any) -> int:  # noqa: N802
        found._obj.value = self.gpus
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.open -= 1
        return 0


def test_gpus_are_counted_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml(4)
    monkeypatch.setattr("ctypes.CDLL", lambda name: nvml)
    assert (gpus.count(), nvml.open) == (4, 0)
    # A library whose driver is not loaded, on a machine without its devices.
    monkeypatch.setattr("ctypes.CDLL", lambda name: Nvml(None))
    monkeypatch.setattr(gpus, "DEVICES", ("/nowhere/nvidiactl",))
    assert gpus.count() == 0


def test_each_rank_sees_its_own_gpu_first_and_all_others() -> None:
    assert [rotated(["4", "5", "6"], rank) for rank in range(3)] == ["4,5,6", "5,6,4", "6,4,5"]


def test_the_number_of_processes() -> None:
    assert [local.processes(wanted, "auto", 4) for wanted in (0, 1, 3)] == [4, 1, 3]
    assert [local.processes(wanted, "cpu", 0) for wanted in (0, 1, 3)] == [1, 1, 3]
    assert [local.processes(wanted, "auto", 0) for wanted in (0, 1)] == [1, 1]


@pytest.mark.parametrize(
    ("here", "message"),
    [
        (4, r"gpus=8: this machine has 4 GPUs\. Fix: gpus=0 for all of them\."),
        (1, r"gpus=8: this machine has 1 GPU\. Fix: gpus=1\."),
        (0, r"gpus=8: this machine has no GPU\. Fix: gpus=1, or device=cpu for 8 processes on the CPU\."),
    ],
)
def test_more_gpus_than_there_are(here: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(MachineError, match=message):
        local.processes(8, "auto", here)


def test_more_processes_than_a_machine_without_gpus_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand of them fill its memory before the first one has loaded torch."""
    for cores, most in ((1, 8), (2, 8), (16, 64)):
        monkeypatch.setattr(local, "cores", lambda cores=cores: cores)
        assert local.processes(most, "cpu", 0) == most
        message = rf"gpus={most + 1}: .*this machine has {cores} CPU cores? for them\. Fix: gpus={most} or fewer\."
        with pytest.raises(MachineError, match=message):
            local.processes(most + 1, "cpu", 0)


def test_hidden_gpus_are_the_likely_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(MachineError, match=r"this machine has 2 GPUs that CUDA_VISIBLE_DEVICES=0,1 lets it see"):
        local.processes(8, "auto", 2)


class Joining:
    """A job that notes with which GPU it would start."""

    task = "sft"

    def __init__(self, **config: Any):
        self.config = {"gpus": 1, "device": "auto", **config}
        self.ran: dict[str, Any] = {}

    def to_json(self, *, resume: bool = False, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        raise AssertionError("nothing is started")

    def run(self, **keys: Any) -> int:
        self.ran = {**keys, "gpus": local.os.environ.get("CUDA_VISIBLE_DEVICES")}
        return 7


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> Joining:
    """Under torchrun, on a machine with four GPUs."""
    for key, value in TORCHRUN.items():
        monkeypatch.setenv(key, value)
    # What the launcher sets is taken back after the test.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(gpus, "count", lambda: 4)
    return Joining()


def test_a_process_of_torchrun_joins_with_its_own_gpu(joining: Joining, installed: Any) -> None:
    assert local.launch(joining, local.LocalOptions(), installed) == 7
    assert (joining.ran["rank"], joining.ran["world"], joining.ran["gpus"]) == (5, 8, "1,2,3,0")


def test_restarts_are_the_other_launchers(joining: Joining, installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    with capture_logs() as logs:
        local.launch(joining, local.LocalOptions(max_restarts=2), installed)
    assert "max_restarts has no effect" in logs[0]["event"]


def test_a_task_of_slurm_keeps_the_gpu_that_it_was_given(
    joining: Joining, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert local.launch(joining, local.LocalOptions(), installed) == 7
    assert joining.ran["gpus"] == "2"


def test_more_processes_than_gpus(joining: Joining, installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(MachineError, match=r"rank 5: .* started 4 processes on this machine, which has 2 GPUs"):
        local.launch(joining, local.LocalOptions(), installed)


def test_each_rank_has_its_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(local, "cores", lambda: 13)
    monkeypatch.setattr(local, "LOOPBACK", tmp_path)
    found = local.environment({"HOME": "/h"}, 3, 4, ["0", "1", "2", "3"])
    assert found == {
        "HOME": "/h",
        "RANK": "3",
        "LOCAL_RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "4",
        "CUDA_VISIBLE_DEVICES": "3,0,1,2",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "3",
        "GLOO_SOCKET_IFNAME": tmp_path.name,
        "NCCL_SOCKET_IFNAME": tmp_path.name,
    }
    # What the user has set stays.
    given = {"OMP_NUM_THREADS": "9", "NCCL_SOCKET_IFNAME": "eth0"}
    assert local.environment(given, 0, 4, []).items() >= given.items()
