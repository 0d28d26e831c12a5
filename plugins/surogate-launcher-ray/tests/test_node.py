"""The supervisor of one machine, without Ray: as objects of this process, with real processes as ranks."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import surogate_launcher_ray
from surogate_launcher_ray import node as node_module
from surogate_launcher_ray.facts import Facts, compare, installed_in
from surogate_launcher_ray.launcher import forwarded
from surogate_launcher_ray.node import FailuresElsewhere, MachineReport, Node, Start, plan
from surogate_launcher_ray.output import Output
from surogate_launcher_ray.sockets import interface_of

from surogate_core.plugin import MachineError, PluginError, launching, load_plugins
from surogate_testing.launchers import Probe

HERE = "127.0.0.1"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Node]:
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUROGATE_LOG_DIR", str(tmp_path / "log"))
    made = Node("n0", HERE)
    yield made
    made.stop()
    signal.signal(signal.SIGINT, before)


def begin(directory: Path, *, first: int = 0, here: int = 1, world: int = 1, **probe: Any) -> Start:
    directory.mkdir(exist_ok=True)
    return Start(
        job=launching.sent(Probe(directory=str(directory), gpus=world, **probe), world, ()),  # type: ignore[arg-type]
        world=world,
        first=first,
        here=here,
        address=HERE,
        port=29500,
        logs=str(directory),
        silence=60,
        host="h0 (10.0.0.1)",
        environment={},
        on_gpus=False,
    )


def result_of(machine: Node) -> MachineReport:
    until = time.monotonic() + 60
    while (report := machine.look()).result is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    return report


def test_ranks_of_a_machine_end_with_their_code(machine: Node, tmp_path: Path) -> None:
    machine.start(begin(tmp_path / "run", code=7))
    assert result_of(machine).result == 7
    assert (tmp_path / "run/0 of 1").exists()


def test_a_failure_waits_for_the_verdict_of_the_driver(machine: Node, tmp_path: Path) -> None:
    """Ranks 2 and 3 of four, of which rank 3 fails."""
    machine.start(begin(tmp_path / "run", first=2, here=2, world=4, fails=3))
    until = time.monotonic() + 60
    while not (found := machine.look().failures):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert machine.look().result is None
    (failure,) = found
    assert (failure.rank, failure.host, failure.code) == (3, "h0 (10.0.0.1)", 1)
    assert 0 <= failure.at < 60  # seconds ago
    assert "raised by the conformance kit" in failure.message
    other = launching.Failure(rank=0, message="rank 0 was first.", code=9, at=0.0)
    machine.end(other)
    assert result_of(machine).result is other


def test_a_failure_elsewhere_ends_the_ranks_here(
    machine: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "plan", lambda *arguments: _sleeping(plan(*arguments)))
    machine.start(begin(tmp_path / "run", first=1, here=1, world=2))
    assert machine.look() == MachineReport(output=[], failures=[])
    other = launching.Failure(rank=0, message="rank 0 was first.", code=9, at=0.0)
    machine.end(other)
    assert result_of(machine).result is other


def _sleeping(found: Any) -> Any:
    from dataclasses import replace

    return replace(found, command=(sys.executable, "-c", "import time; time.sleep(600)"))


def test_an_error_of_the_supervisor_is_a_failure(
    machine: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> int:
        raise MachineError("no more processes.")

    monkeypatch.setattr("surogate_core.launch.supervisor.supervise", broken)
    machine.start(begin(tmp_path / "run"))
    report = result_of(machine)
    assert isinstance(report.result, launching.Failure)
    assert (report.result.code, report.result.kind, report.result.may_pass) == (3, MachineError, False)
    assert [failure.message for failure in report.failures] == ["no more processes."]


def test_the_verdict_is_the_own_first_failure_if_the_driver_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "VERDICT_SECONDS", 0.05)
    found = [launching.Failure(rank=rank, message=f"a bug {rank}", code=1, at=9.0 - rank) for rank in (1, 2)]
    assert FailuresElsewhere().first(found).message == "rank 2: a bug 2"


def test_each_rank_has_the_environment_of_its_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "77")  # as Ray sets it for the actor
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    start = begin(tmp_path / "run", first=2, here=2, world=4)
    found = plan(start, HERE, None)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [[ranks[name] for name in names] for ranks in found.environments] == [
        ["2", "0", "4", "2", HERE, "29500"],
        ["3", "1", "4", "2", HERE, "29500"],
    ]
    assert found.environments[0]["OMP_NUM_THREADS"] != "77"
    # They talk over the network by which Ray reaches the machine.
    assert found.environments[0]["GLOO_SOCKET_IFNAME"] == interface_of(HERE) != ""
    assert (found.first, found.here, found.job["path"]) == (2, 2, sys.path)


def test_a_network_that_is_not_here() -> None:
    assert interface_of("203.0.113.9") == ""


def test_a_machine_says_whether_it_shares_the_output_directory(machine: Node, tmp_path: Path) -> None:
    file = tmp_path / "out/logs/.shared"
    apart = machine.prepare(str(tmp_path), str(file), "abc")
    assert (apart.wrong, apart.shares) == ("", False)
    assert list(file.parent.iterdir()) == [], "its logs have a place here"
    file.write_text("other")
    assert not machine.prepare(str(tmp_path), str(file), "abc").shares
    file.write_text("abc")
    found = machine.prepare(str(tmp_path), str(file), "abc")
    assert (found.wrong, found.shares) == ("", True)
    with socket.create_server((HERE, found.port)):
        pass
    assert machine.prepare("/nowhere", str(file), "abc").wrong.startswith("cannot enter /nowhere (No such")
    file = tmp_path / "out/logs/.shared/file/.shared"
    assert machine.prepare(str(tmp_path), str(file), "abc").wrong.startswith("has no place for logs: output_dir ")


def test_a_machine_must_have_the_address_by_which_ray_knows_it(machine: Node, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("abc")
    machine._address = "203.0.113.9"
    found = machine.prepare(str(tmp_path), str(tmp_path / "file"), "abc")
    assert found.wrong.startswith("cannot listen at 203.0.113.9, its address in Ray (")


def test_to_stop_ends_the_wait_for_the_driver(machine: Node, tmp_path: Path) -> None:
    machine.start(begin(tmp_path / "run", fails=0))
    until = time.monotonic() + 60
    while not machine.look().failures:
        assert time.monotonic() < until
        time.sleep(0.05)
    machine.stop()
    result = result_of(machine).result
    assert isinstance(result, launching.Failure)
    assert "raised by the conformance kit" in result.message


def test_output_is_kept_in_order_until_it_is_taken() -> None:
    output = Output()
    with output as (out, err):
        os.write(out, b"one ")
        until = time.monotonic() + 10
        taken: list[tuple[int, bytes]] = []
        while not taken:
            assert time.monotonic() < until
            taken = output.take()
        assert taken == [(1, b"one ")]
        os.write(err, b"two")
    assert output.take() == [(2, b"two")]
    assert output.take() == []
    assert not [thread for thread in threading.enumerate() if thread in output._readers]


# ------------------------------------------------------------------------------- what is installed


def facts(**installed: tuple[str, str]) -> Facts:
    return Facts(node="n1", address="10.0.0.7", host="gpu07", installed=installed, gpus=())


def test_every_difference_is_named_with_its_machine() -> None:
    here = {"core": ("0.1.0", "aa"), "gone": ("1.0", "bb"), "old": ("2.0", "cc"), "same": ("1.0", "dd")}
    compare(here, [facts(**here)])
    there = facts(core=("0.1.0", "ab"), old=("1.9", "ce"), same=("1.0", "dd"), extra=("3.0", "ee"))
    with pytest.raises(PluginError) as raised:
        compare(here, [facts(**here), there])
    assert str(raised.value) == (
        "launcher=ray: not the same is installed everywhere. gpu07 (10.0.0.7): core 0.1.0 has other files, "
        "extra 3.0 is not installed on the machine that starts the run, gone is missing, old 1.9 instead of 2.0. "
        "Fix: install the same plugins in the same versions on all machines."
    )


def test_what_is_installed_has_versions_and_digests(machine: Node) -> None:
    found = installed_in(load_plugins())
    assert {"core", "launcher-ray", "python", "torch"} <= found.keys()
    assert len(found["launcher-ray"][1]) == 64
    assert machine.facts(None).installed == found


def test_variables_that_all_ranks_get() -> None:
    given = {"NCCL_DEBUG": "INFO", "SUROGATE_X": "1", "OMP_NUM_THREADS": "4", "HF_TOKEN": "secret", "PATH": "/bin"}
    assert forwarded(given) == {"NCCL_DEBUG": "INFO", "SUROGATE_X": "1", "OMP_NUM_THREADS": "4"}


# ------------------------------------------------------------------------------- without Ray


def test_without_ray_the_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    launcher = surogate_launcher_ray.surogate_launcher()
    message = r"^launcher=ray: the package ray is not installed\. Fix: pip install 'surogate-launcher-ray\[cluster\]'"
    with pytest.raises(MachineError, match=message):
        launcher.launch(Probe(directory=str(tmp_path)), launcher.options(), load_plugins())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
