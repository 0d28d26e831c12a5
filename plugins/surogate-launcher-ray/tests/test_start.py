"""What the driver concludes while it prepares a start. The cluster and its actors are objects of this process."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import surogate_launcher_ray
from structlog.testing import capture_logs
from surogate_launcher_ray import cluster, head, launcher
from surogate_launcher_ray.facts import Facts, installed_in
from surogate_launcher_ray.head import HeadProbe
from surogate_launcher_ray.layout import RankLayout
from surogate_launcher_ray.node import PreparedMachine
from surogate_launcher_ray.options import RayOptions

from surogate_core.plugin import MachineError, SurogateError, UserError, launching, load_plugins
from surogate_testing.launchers import Probe

PENDING = None


class ActorError(Exception):
    actor_init_failed = False


class InitError(ActorError):
    actor_init_failed = True


class TaskError(Exception):
    cause = None


@cache
def plugins() -> Any:
    """What is installed here."""
    return load_plugins()


class FakeRay:
    """A cluster of machines of one CPU. A reference is a function that returns the answer, an error or `PENDING`.

    `lose_at`: the question on the second machine, or `victim`, at which it is lost. `answer`: what that question gets.
    """

    exceptions = SimpleNamespace(RayActorError=ActorError, RayTaskError=TaskError)

    def __init__(self, count: int = 2, *, lose_at: str = "", answer: Any = PENDING):
        self.machines = {f"n{i}": {"alive": True, "reason": ""} for i in range(count)}
        self.lose_at, self.answer = lose_at, answer
        self.asked: list[tuple[str, str]] = []
        self.reserved: list[int] = []
        self.bundles: list[Any] = []
        self.killed = 0
        self.victim = "n1"
        self.here = "n0"
        """The machine of the driver."""
        self.sharing = ["n0", "n1", "n2"]
        """The machines that see the driver's files."""

    def lose(self, name: str) -> None:
        self.machines[name] = {"alive": False, "reason": "no heartbeat\nfor 30 s"}

    @property
    def alive(self) -> list[str]:
        return [name for name, machine in self.machines.items() if machine["alive"]]

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: self.here)

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": name,
                "NodeManagerAddress": f"10.0.0.{name[1:]}",
                "Alive": machine["alive"],
                "Resources": {"CPU": 1.0},
                "DeathReasonMessage": machine["reason"],
            }
            for name, machine in self.machines.items()
        ]

    def wait(self, refs: list[Any], timeout: float, num_returns: int = 1) -> tuple[list[Any], list[Any]]:
        there = [ref for ref in refs if ref() is not PENDING]
        return there, [ref for ref in refs if ref not in there]

    def get(self, ref: Any) -> Any:
        found = ref()
        if isinstance(found, Exception):
            raise found
        return found

    def kill(self, actor: Any, no_restart: bool) -> None:
        self.killed += 1

    def remote(self, kind: Any) -> Any:
        return SimpleNamespace(options=lambda **keys: SimpleNamespace(remote=self._actor))

    def _actor(self, node: str, address: str) -> Any:
        facts = Facts(node=node, address=address, host=f"h{node}", installed=installed_in(plugins()), gpus=())
        prepared = PreparedMachine(port=29500, shares=node in self.sharing)
        gives = {"facts": facts, "prepare": prepared, "start": "started"}
        return SimpleNamespace(
            **{name: SimpleNamespace(remote=self._question(name, node, answer)) for name, answer in gives.items()}
        )

    def _question(self, name: str, node: str, answer: Any) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            self.asked.append((name, node))
            if name == self.lose_at and node == self.victim and node in self.alive:
                if self.answer is PENDING:
                    self.lose(node)
                return lambda: self.answer
            return lambda: answer if node in self.alive else PENDING

        return ask

    # -- as ray.util.placement_group

    def placement_group(self, bundles: list[Any], strategy: str) -> Any:
        self.reserved.append(len(bundles))
        self.bundles = bundles
        chosen = self.alive
        if (demanded := "node:10.0.0." + self.here[1:]) in bundles[0]:
            assert bundles[0][demanded] == 0.001
            chosen = [self.here, *(name for name in chosen if name != self.here)]
        places = dict(enumerate(chosen[: len(bundles)]))
        if self.lose_at in ("reserve", "placed") and len(self.reserved) == 1:
            self.lose("n1")
        placed = self.lose_at == "placed" or len(self.alive) >= len(bundles)
        return SimpleNamespace(ready=lambda: lambda: placed or PENDING, places=places)

    def placement_group_table(self, group: Any) -> dict[str, Any]:
        return {"bundles_to_node_id": group.places}


class Steps(Probe):
    """A job with micro-batches."""

    @property
    def config(self) -> dict[str, Any]:
        return {**super().config, "gradient_accumulation_steps": 1}


class QuietHead:
    """Answers always."""

    def look(self) -> None:
        return None

    def answers(self) -> bool:
        return True

    def wait(self, check: Any = None) -> None:
        return None


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cluster, "POLL", 0.0)
    monkeypatch.setattr(cluster, "RESERVE_SECONDS", 0.3)
    monkeypatch.setattr(cluster, "LOOK", 0.0)
    monkeypatch.setattr(launcher, "LOOK", 0.0)


def run(ray: FakeRay, monkeypatch: pytest.MonkeyPatch, place: Path, *, restarts: int = 1, **options: Any) -> Any:
    """The exit code, with the number of machines of each start that got as far as the watch."""
    group = ModuleType("ray.util.placement_group")
    group.placement_group, group.placement_group_table = ray.placement_group, ray.placement_group_table  # type: ignore[attr-defined]
    group.remove_placement_group = lambda group: None  # type: ignore[attr-defined]
    strategies = ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = lambda *given, **keys: None  # type: ignore[attr-defined]
    for module in (group, strategies):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("ray", "ray.util"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    watched: list[int] = []

    class Watch:
        def __init__(self, ray: Any, members: Any, signals: Any, **keys: Any):
            watched.append(len(members))
            self.lost = any(member.id not in ray.alive for member in members)

        def run(self) -> int | launching.Failure:
            return launching.Failure(rank=1, message="found by the watch.", code=1, at=0.0) if self.lost else 0

    monkeypatch.setattr(launcher, "RanksWatch", Watch)
    monkeypatch.setattr(HeadProbe, "of", lambda ray, environment: QuietHead())
    job: Any = Steps(directory=str(place), gpus=2)
    (place / "logs").mkdir(parents=True, exist_ok=True)
    signals = launching.Forwarding()
    one = launcher._Run(ray, job, RayOptions(num_nodes=2, **options), plugins(), signals)
    return launching.Restarts(job.config, restarts).run(one.start, signals), watched


@pytest.mark.parametrize("lose_at", ["reserve", "placed", "facts", "prepare"])
def test_a_machine_that_is_lost_before_the_ranks_start(
    lose_at: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = FakeRay(lose_at=lose_at)
    with capture_logs() as logs:
        assert run(ray, monkeypatch, tmp_path) == (0, [1])
    assert ray.reserved == [2, 1]
    assert ("start", "n0") in ray.asked
    assert ("start", "n1") not in ray.asked
    told = [line["event"] for line in logs if line["log_level"] == "warning"]
    who = {"facts": "rank 1 on 10.0.0.1", "prepare": "rank 1 on hn1 (10.0.0.1)"}.get(lose_at, "10.0.0.1")
    cause = "the machine or its Ray is lost: no heartbeat for 30 s"
    assert told == [
        f"the run starts again (restart 1 of 1): {who}: {cause}",
        "the run goes on with 1 of 2 machines: 1 rank for the 2 micro-batches of a step",
    ]


def test_the_number_of_micro_batches_may_vary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in reinforcement learning, whose record has none."""
    monkeypatch.setattr(HeadProbe, "of", lambda ray, environment: QuietHead())
    job: Any = Steps(directory=str(tmp_path), gpus=2)
    one = launcher._Run(FakeRay(), job, RayOptions(num_nodes=2), plugins(), launching.Forwarding())
    one._layout = RankLayout(nodes=2, per_node=1, on_gpus=False)
    assert one._micro_batches() == 2
    one._facts.write_text('{"micro_batches": null}')
    assert one._micro_batches() is None


@pytest.mark.parametrize("lose_at", ["reserve", "placed", "facts", "prepare"])
def test_without_restarts_the_loss_ends_the_run(lose_at: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        SurogateError, match=r"10\.0\.0\.1\)?: the machine .* is lost: no heart.*max_restarts=1"
    ) as error:
        run(FakeRay(lose_at=lose_at), monkeypatch, tmp_path, restarts=0)
    assert error.value.exit_code == 1


@pytest.mark.parametrize("lose_at", ["facts", "prepare"])
def test_the_death_of_a_supervisor_is_a_lost_machine(
    lose_at: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray still counts the machine as alive, so both take part again."""
    ray = FakeRay(lose_at=lose_at, answer=ActorError("its node\nhas died"))
    with pytest.raises(SurogateError, match=r"rank 1 on .*10\.0\.0\.1\)?: the machine .* is lost: its node has died"):
        run(ray, monkeypatch, tmp_path)
    assert ray.reserved == [2, 2]
    assert ray.killed == 4


def test_a_supervisor_that_cannot_start_is_no_loss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = FakeRay(lose_at="facts", answer=InitError("no memory"))
    with pytest.raises(MachineError, match=r"^10\.0\.0\.1: its supervisor cannot start\. no memory"):
        run(ray, monkeypatch, tmp_path)
    assert ray.reserved == [2]


def test_a_loss_while_ranks_start_is_the_watch_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some ranks run by then, and have to be ended."""
    ray = FakeRay(lose_at="start")
    assert run(ray, monkeypatch, tmp_path) == (0, [2, 1])


def test_fewer_machines_than_the_fewest_are_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = FakeRay(lose_at="facts")
    with pytest.raises(MachineError, match=r"has waited 0 seconds for 2 machines"):
        run(ray, monkeypatch, tmp_path, min_nodes=2)
    assert ray.reserved == [2, 2]


def test_a_machine_that_the_run_does_not_need_may_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert run(FakeRay(3, lose_at="reserve"), monkeypatch, tmp_path) == (0, [2])


def started(ray: FakeRay) -> list[str]:
    """The machines in the order of their ranks."""
    return [node for question, node in ray.asked if question == "start"]


def test_the_machine_of_the_command_has_rank_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = FakeRay()
    ray.here = "n1"
    assert run(ray, monkeypatch, tmp_path) == (0, [2])
    assert started(ray) == ["n1", "n0"]
    assert ray.bundles == [{"CPU": 1.0}] * 2


def test_machines_need_not_share_the_output_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = FakeRay()
    ray.here, ray.sharing = "n1", ["n1"]
    assert run(ray, monkeypatch, tmp_path) == (0, [2])
    assert started(ray) == ["n1", "n0"]


def test_the_machine_of_the_command_takes_part_if_the_others_do_not_share_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray chooses two of three machines, at first without the one of the command."""
    ray = FakeRay(3)
    ray.here, ray.sharing = "n2", ["n2"]
    assert run(ray, monkeypatch, tmp_path) == (0, [2])
    assert started(ray) == ["n2", "n0"]
    assert ray.reserved == [2, 2]


def test_a_restart_keeps_the_machine_of_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ray = FakeRay(4, lose_at="start")
    ray.here, ray.sharing, ray.victim = "n3", ["n3"], "n0"
    assert run(ray, monkeypatch, tmp_path) == (0, [2, 2])
    assert started(ray) == ["n3", "n0", "n3", "n1"]
    assert ray.reserved == [2, 2, 2]


def test_a_command_on_a_machine_without_room_needs_a_shared_output_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ray = FakeRay()
    ray.here, ray.sharing = "the head, which is not listed", []
    with pytest.raises(
        UserError, match=r"^launcher=ray: hn0 .* takes no part in the run\. Fix: start the command on a"
    ):
        run(ray, monkeypatch, tmp_path)
    ray.sharing = ["n0"]
    assert run(ray, monkeypatch, tmp_path) == (0, [2])


# ------------------------------------------------------------------------------- the head


@pytest.fixture
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LOOK", 0.01)


@pytest.mark.usefixtures("_hasty")
def test_a_head_that_takes_no_connections_is_lost() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{server.getsockname()[1]}"
    found = HeadProbe(address, 0.05)
    assert found.answers()
    assert found.look() is None
    assert found.wait() is None
    server.close()
    assert not found.answers()
    assert found.look() is None  # it may come back
    failure = found.wait()
    assert failure is not None
    assert failure.text == (
        f"the head of the Ray cluster, {address}, has not answered for 0 seconds, and without it Ray ends on all "
        "machines. Fix: start Ray again on all machines, then run the same command, which resumes the last "
        "checkpoint. max_restarts does not help."
    )
    assert (failure.code, failure.may_pass) == (1, False)
    assert found.look() is not None


@pytest.mark.usefixtures("_hasty")
def test_a_process_that_was_stopped_does_not_blame_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    found = HeadProbe("127.0.0.1:1", 0.0)
    assert not found.answers()
    assert found.look() is None


def test_the_wait_for_the_head_ends_by_a_signal() -> None:
    def stop() -> None:
        raise cluster.StoppedEarly

    with pytest.raises(cluster.StoppedEarly):
        HeadProbe("127.0.0.1:1", 60.0).wait(stop)


@pytest.mark.parametrize(("given", "limit"), [("", 30.0), ("600", 300.0), ("soon", 30.0)])
def test_the_head_has_half_of_the_time_that_ray_gives_it(given: str, limit: float) -> None:
    ray = SimpleNamespace(get_runtime_context=lambda: SimpleNamespace(gcs_address="[::1]:6379"))
    found = HeadProbe.of(ray, {"RAY_gcs_rpc_server_reconnect_timeout_s": given})
    assert (found._limit, found._place) == (limit, ("::1", 6379))


# ------------------------------------------------------------------------------- the directory


def test_a_directory_that_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "package"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    plugin = surogate_launcher_ray.surogate_launcher()
    job: Any = Probe(directory=str(tmp_path / "run"))
    try:
        with pytest.raises(UserError, match=r"the directory in which the run was started is gone\. Fix: .*'cd /shared"):
            plugin.launch(job, plugin.options(), SimpleNamespace())  # type: ignore[arg-type]
    finally:
        os.chdir(tmp_path)
    assert list(tmp_path.iterdir()) == []
