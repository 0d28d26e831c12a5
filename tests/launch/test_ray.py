"""Whole runs on two fake machines of this one: gloo on the CPU."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_clusters import KEYS, Fake, Run, make_cluster, worker_processes
from surogate_launcher_ray import surogate_launcher

from surogate_core.errors import ConfigError, MachineError
from surogate_testing.launchers import CHECKS

TWO_MACHINES = ("gpus=2", "launcher=ray", "launcher.num_nodes=2", "gradient_accumulation_steps=1")
LORA = ("lora=true", "lora_dropout=0.1")
LONG = ("max_steps=120", "sequence_len=128")
"""So many steps that a machine can be lost among them: metrics.jsonl shows steps half a second late."""
FULL = ("lora=false", "exact_reduction=true", "optimizer=adamw")


Start = Callable[..., Run]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a run with more keys: `start("lora=true", name="a", address="host:port")`."""
    started: list[Run] = []

    def begin(*keys: str, name: str = "run", address: str = "") -> Run:
        place = tmp_path / name
        place.mkdir(exist_ok=True)
        latest = {text.partition("=")[0]: text for text in (*KEYS, *keys)}
        arguments = [*latest.values(), "output_dir=out", f"data_cache_dir={tmp_path / 'cache'}"]
        arguments += [f"launcher.ray_address={address}"] if address else []
        command = [sys.executable, "-m", "surogate_core", "sft", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "SUROGATE_LOG_DIR": str(tmp_path / "log")}
        process = subprocess.Popen(
            command,
            cwd=place,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        started.append(Run(process, place, place / "out"))
        return started[-1]

    yield begin
    for run in started:
        run.process.kill()
        run.process.wait()
        for process, _ in worker_processes(run.place).values():
            os.kill(process, signal.SIGKILL)


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[Fake]:
    """Two machines for all tests of the session."""
    fake = make_cluster()
    yield fake
    fake.cluster.shutdown()


@pytest.fixture
def own_cluster() -> Iterator[Callable[..., Fake]]:
    """Makes a cluster with the environments of its machines, for a test that changes it."""
    made: list[Fake] = []

    def make(*environments: dict[str, str]) -> Fake:
        made.append(make_cluster(environments or ({}, {})))
        return made[-1]

    yield make
    for fake in made:
        fake.cluster.shutdown()


def test_without_ray_the_run_is_refused(
    run_here: Any, base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    message = r"^launcher=ray: the package ray is not installed\. Fix: pip install 'surogate-launcher-ray\[cluster\]'"
    with pytest.raises(MachineError, match=message):
        run_here(tmp_path / "run", *base, "gpus=2", "launcher=ray", "launcher.num_nodes=2")
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_ray_client_is_refused(run_here: Any, base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"launcher\.ray_address: ray://head:10001%s is Ray Client.*Fix: ray job submit"
    with pytest.raises(ConfigError, match=message % ""):
        run_here(tmp_path / "run", *base, "launcher=ray", "launcher.ray_address=ray://head:10001")
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ConfigError, match=message % r" \(RAY_ADDRESS\)"):
        run_here(tmp_path / "run", *base, "launcher=ray")


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "trained"), [(4, LORA), (2, FULL)], ids=["lora", "all weights"])
def test_two_machines_give_the_bits_of_one_process(
    start: Any, shared_cluster: Any, ranks: int, trained: tuple[str, ...]
) -> None:
    one = start(*trained, "max_steps=6", f"gradient_accumulation_steps={ranks}", name="one")
    code, output = one.end()
    assert code == 0, output
    keys = ("max_steps=6", *TWO_MACHINES, f"gpus={ranks}")
    two = start(*trained, *keys, name="two", address=shared_cluster.address)
    supervisors = {rank: supervisor for rank, (_, supervisor) in two.wait_for_ranks(ranks).items()}
    half = ranks // 2
    machines = [shared_cluster.machine_of(supervisors[rank]) for rank in range(ranks)]
    assert machines == [machines[0]] * half + [machines[half]] * half
    assert machines[0] is not machines[half]
    code, output = two.end()
    assert code == 0, output
    # What rank 0 prints on its machine is seen here, once; what the others print is in their logs.
    assert output.count("Finished after 6 steps") == 1
    assert all((two.output / f"logs/rank-{rank}.log").is_file() for rank in range(1, ranks))
    assert two.history() == one.history()
    assert two.weights() == one.weights()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_after_one_step_and_one_process_resumes(
    start: Any, shared_cluster: Any, number: signal.Signals
) -> None:
    keys = (*LORA, "lr_scheduler_type=constant")
    run = start(*keys, "max_steps=100000", *TWO_MACHINES, address=shared_cluster.address)
    run.wait_for_steps(2)
    run.process.send_signal(number)
    code, output = run.end()
    assert code == 128 + number, output
    (end,) = run.records("run_end")
    assert end["reason"] == "signal"
    assert (run.output / f"checkpoint-{end['step']}").is_dir()
    last = f"max_steps={end['step'] + 3}"
    resumed, unbroken = start(*keys, last), start(*keys, last, name="unbroken")
    for one in (resumed, unbroken):
        code, output = one.end()
        assert code == 0, output
    assert resumed.records("run_start")[-1]["start_step"] == end["step"]
    assert resumed.history() == unbroken.history()
    assert resumed.weights() == unbroken.weights()


@pytest.mark.slow
def test_ctrl_c_reaches_rank_0_alone_also_in_a_cluster_of_the_run(start: Any, shared_cluster: Any) -> None:
    """A terminal sends it to all processes of the group, those of Ray among them."""
    run = start(*LORA, "max_steps=100000", "gpus=2", "launcher=ray", address="local")
    run.wait_for_steps(2)
    os.killpg(run.process.pid, signal.SIGINT)
    code, output = run.end()
    assert code == 130, output
    (end,) = run.records("run_end")
    assert end["reason"] == "signal"
    assert (run.output / f"checkpoint-{end['step']}").is_dir()


@pytest.mark.slow
def test_a_killed_rank_is_named_with_its_machine(start: Any, shared_cluster: Any) -> None:
    run = start(*LORA, "max_steps=100000", *TWO_MACHINES, address=shared_cluster.address)
    process, _ = run.wait_for_steps(3)[1]
    os.kill(process, signal.SIGKILL)
    code, output = run.end()
    assert code == 137
    message = output[output.rindex("surogate: rank 1") :].removeprefix("surogate: ").strip()
    assert message.startswith(f"rank 1 (process {process} on {os.uname().nodename} (")
    assert "was killed by SIGKILL" in message
    # Rank 0, on the other machine, ends the record of the run with the cause.
    (end,) = run.records("run_end")
    assert (end["reason"], end["message"]) == ("failed", message)


@pytest.mark.slow
def test_wrong_input_is_reported_once(start: Any, shared_cluster: Any) -> None:
    run = start("max_steps=2", "model=/nowhere/model", *TWO_MACHINES, address=shared_cluster.address)
    code, output = run.end()
    assert code == 2
    assert output.count("/nowhere/model") == 1, output


@pytest.mark.slow
def test_a_killed_driver_leaves_nothing_behind(start: Any, shared_cluster: Any) -> None:
    run = start(*LORA, "max_steps=100000", *TWO_MACHINES, address=shared_cluster.address)
    run.wait_for_steps(3)
    run.process.kill()
    run.process.wait()
    until = time.monotonic() + 10
    while worker_processes(run.place):
        assert time.monotonic() < until
        time.sleep(0.1)
    # The machines have one CPU each: the next run gets them because the killed one has given them back.
    code, output = start(*LORA, "max_steps=2", *TWO_MACHINES, name="next", address=shared_cluster.address).end()
    assert code == 0, output


@pytest.mark.slow
def test_a_lost_machine_ends_the_run_soon(start: Any, own_cluster: Any) -> None:
    cluster = own_cluster({}, {})
    run = start(*LORA, "max_steps=100000", *TWO_MACHINES, address=cluster.address)
    ranks = run.wait_for_steps(3)
    (rank,) = [r for r, (_, supervisor) in ranks.items() if cluster.machine_of(supervisor) is cluster.machines[1]]
    began = time.monotonic()
    cluster.lose(cluster.machines[1])
    code, output = run.end()
    assert time.monotonic() - began < 15
    assert code == 1
    message = output[output.rindex("surogate: ") :]
    assert message.startswith(f"surogate: rank {rank} on "), output
    assert re.search(r"\): the machine (or its Ray )?is lost: ", message)


@pytest.mark.slow
def test_a_run_goes_on_with_another_machine(start: Any, own_cluster: Any) -> None:
    unbroken = start(*LORA, *LONG, name="unbroken")
    code, output = unbroken.end()
    assert code == 0, output
    cluster = own_cluster({}, {})
    keys = (*LONG, "max_restarts=1", "launcher.min_nodes=2")
    run = start(*LORA, *keys, *TWO_MACHINES, address=cluster.address)
    run.wait_for_steps(6)
    cluster.lose(cluster.machines[1])
    cluster.add()
    code, output = run.end()
    assert code == 0, output
    assert "the run starts again from checkpoint-" in output
    assert [line["start_step"] > 0 for line in run.records("run_start")] == [False, True]
    assert run.history() == unbroken.history()
    assert run.weights() == unbroken.weights()


@pytest.mark.slow
def test_a_run_goes_on_with_the_machines_that_are_left(start: Any, own_cluster: Any) -> None:
    unbroken = start(*LORA, *LONG, name="unbroken")
    code, output = unbroken.end()
    assert code == 0, output
    cluster = own_cluster({}, {})
    run = start(*LORA, *LONG, *TWO_MACHINES, "max_restarts=1", address=cluster.address)
    run.wait_for_steps(6)
    cluster.lose(cluster.machines[1])
    code, output = run.end()
    assert code == 0, output
    assert "the run goes on with 1 of 2 machines: 1 rank for the 2 micro-batches of a step" in output
    assert [line["gpus"] for line in run.records("run_start")] == [2, 1]
    assert [line["start_step"] > 0 for line in run.records("run_start")] == [False, True]
    assert run.history() == unbroken.history()
    assert run.weights() == unbroken.weights()


OWN_DISK = """
import ctypes, os

if "OWN_DISK" not in os.environ:  # not in a process of one that has it
    os.environ["OWN_DISK"] = "1"
    libc = ctypes.CDLL(None, use_errno=True)
    CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 1 << 18
    failed = libc.unshare(CLONE_NEWNS) or libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None)
    if failed or libc.mount(b"tmpfs", {directory!r}.encode(), b"tmpfs", 0, None):
        os._exit(99)
"""
"""As `sitecustomize` of a machine's processes: a directory is on a disk that only this process and its children see."""


@pytest.mark.slow
def test_machines_with_disks_of_their_own(start: Any, own_cluster: Any, tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    unbroken = start(*LORA, *LONG, name="unbroken")
    code, output = unbroken.end()
    assert code == 0, output
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / "run").mkdir()
    (site / "sitecustomize.py").write_text(OWN_DISK.format(directory=str(tmp_path / "run")))
    cluster = own_cluster({}, {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])})
    run = start(*LORA, *LONG, *TWO_MACHINES, "max_restarts=1", address=cluster.address)
    process, supervisor = run.wait_for_steps(6)[1]
    assert cluster.machine_of(supervisor) is cluster.machines[1], "rank 0 is on the machine of the command"
    disk = Path(f"/proc/{process}/root{run.output}")
    assert sorted(path.name for path in disk.iterdir()) == ["logs", "surogate.rank-1.log"]
    assert not (run.output / "surogate.rank-1.log").exists()
    os.kill(process, signal.SIGKILL)
    code, output = run.end()
    assert code == 0, output
    assert "the run starts again from checkpoint-" in output
    assert [line["start_step"] > 0 for line in run.records("run_start")] == [False, True]
    assert '"a checkpoint was sent to ranks"' in (run.output / "surogate.log").read_text()
    assert run.history() == unbroken.history()
    assert run.weights() == unbroken.weights()


@pytest.mark.slow
@pytest.mark.parametrize("when", ["supervisors", "ranks"])
def test_a_machine_is_lost_before_the_first_checkpoint(start: Any, own_cluster: Any, when: str) -> None:
    keys = (*LONG, "save_steps=1000")
    unbroken = start(*LORA, *keys, name="unbroken")
    code, output = unbroken.end()
    assert code == 0, output
    cluster = own_cluster({}, {})
    run = start(*LORA, *LONG, *TWO_MACHINES, "max_restarts=1", address=cluster.address)
    cluster.wait_for_supervisor(cluster.machines[1]) if when == "supervisors" else run.wait_for_ranks(2)
    began = time.monotonic()
    cluster.lose(cluster.machines[1])
    code, output = run.end()
    assert code == 0, output
    assert time.monotonic() - began < 120
    assert re.search(r"the run starts again \(restart 1 of 1\): .*the machine (or its Ray )?is lost: ", output)
    assert "the run goes on with 1 of 2 machines: 1 rank for the 2 micro-batches of a step" in output
    assert [line["start_step"] for line in run.records("run_start")][-1] == 0
    assert run.history() == unbroken.history()
    assert run.weights() == unbroken.weights()


@pytest.mark.slow
def test_a_lost_head_is_told(start: Any, own_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself ends the process after the time, without a word of ours."""
    cluster = own_cluster({}, {})
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "30")
    run = start(*LORA, "max_steps=100000", *TWO_MACHINES, "max_restarts=1", address=cluster.address)
    run.wait_for_steps(3)
    cluster.lose_head()
    code, output = run.end()
    assert code == 1, output
    message = output[output.rindex("surogate: ") :]
    assert message.startswith(f"surogate: the head of the Ray cluster, {cluster.address}, has not answered"), output
    assert "Fix: start Ray again on all machines, then run the same command" in message
    assert "starts again" not in output
    (end,) = run.records("run_end")
    assert (end["reason"], "the head of the Ray cluster" in end["message"]) == ("failed", True)


@pytest.mark.slow
def test_machines_with_other_plugins_are_refused(start: Any, own_cluster: Any, tmp_path: Path) -> None:
    site = tmp_path / "site"
    info = site / "dist_extra-1.2.3.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dist-extra\nVersion: 1.2.3\n")
    (info / "entry_points.txt").write_text("[surogate]\nextra = plugin_extra\n")
    (site / "plugin_extra").mkdir()
    (site / "plugin_extra/__init__.py").write_text('SUROGATE_API = ">=2,<3"\n')
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    cluster = own_cluster({}, {"PYTHONPATH": path})
    run = start(*LORA, "max_steps=2", *TWO_MACHINES, address=cluster.address)
    code, output = run.end()
    assert code != 0
    message = output[output.rindex("surogate: ") :]
    assert "launcher=ray: not the same is installed everywhere" in message
    assert "extra 1.2.3 is not installed on the machine that starts the run" in message
    assert not run.output.joinpath("metrics.jsonl").exists()


@pytest.mark.slow
def test_more_machines_than_the_cluster_has(start: Any, shared_cluster: Any) -> None:
    keys = ("gpus=3", "launcher=ray", "launcher.num_nodes=3")
    code, output = start(*LORA, "max_steps=2", *keys, address=shared_cluster.address).end()
    assert code == 3
    assert "launcher.num_nodes=3: the Ray cluster has 2 machines with a CPU" in output
    assert "Fix: launcher.num_nodes=2" in output


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_launcher_conforms_on_a_cluster(
    check: Any, shared_cluster: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", shared_cluster.address)
    monkeypatch.setenv("SUROGATE_LOG_DIR", str(tmp_path / "log"))
    check(surogate_launcher())
