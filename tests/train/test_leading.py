"""Rank 0's orders, and the ranks that follow them, as threads."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from surogate_core.batch import MicroBatch
from surogate_core.bundles import Stopped
from surogate_core.config.schema import RunConfig
from surogate_core.errors import MachineError
from surogate_core.mesh.axes import Axes
from surogate_core.mesh.lifeline import Lifeline
from surogate_core.mesh.mesh import Mesh
from surogate_core.train import follow, leading
from surogate_core.train.checkpoint import CheckpointDir
from surogate_core.train.flops import ModelFlops
from surogate_core.train.follow import Follower
from surogate_core.train.leading import Interrupted, Leader, Order, Ranks
from surogate_core.train.signals import StopSignals
from surogate_testing import tiny
from surogate_testing.virtual import in_threads

CPU = torch.device("cpu")


class Engine:
    """Records what it does."""

    model = None

    def __init__(self, mesh: Mesh):
        self.settings = SimpleNamespace(device=CPU, axes=Axes.of(mesh.world, micro_batches=mesh.world))
        self.sharing = SimpleNamespace(share=lambda count: SimpleNamespace(numbers=range(mesh.rank, mesh.rank + 1)))
        self.own_work = SimpleNamespace(mean=lambda: mesh.rank + 0.5)
        self.mesh, self.done = mesh, list[Any]()

    def train_step(self, batches: Any, *, step: int, lr: float) -> Any:
        self.done.append((step, lr, [isinstance(batch, MicroBatch) for batch in batches]))
        return SimpleNamespace(read=lambda: None)

    def evaluate(self, batches: Any) -> None:
        self.done.append("evaluation begins")
        self.done.append(len(list(batches)))

    def serve(self) -> None:
        self.done.append(self.mesh.largest([0.0]))

    def freshen(self) -> None:
        self.done.append("fresh")

    def dismiss(self) -> None:
        self.mesh.largest([1.0])


class Steps:
    """A stream of equal steps."""

    epoch = steps_per_epoch = 0.0

    def next_step(self) -> list[MicroBatch]:
        return [tiny.batch([[1, 2, 3]])] * 2

    def state(self) -> dict[str, Any]:
        return {}


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has no model to count."""
    monkeypatch.setattr(
        ModelFlops, "of", lambda model, frozen: ModelFlops(products_per_token=1.0, attention_per_pair=0.0)
    )


def led(
    lead: Callable[[Leader, Engine, StopSignals], Any], tmp_path: Path, received: int = 0, **options: Any
) -> tuple[Any, list[Any]]:
    """(what rank 0 returns, what the engine of rank 1 did); rank 1 received a signal."""

    def rank(fabric: Any) -> Any:
        mesh, signals = fabric.mesh(), StopSignals()
        engine: Any = Engine(mesh)
        if mesh.leads:
            leader = Leader(mesh, signals)
            try:
                return lead(leader, engine, signals)
            finally:
                leader.end()
        if received:
            signals.received = signal.Signals(received)
        held: Any = [tiny.batch([[1, 2]])] * 5
        steps = options.pop("steps", Steps())
        Follower(RunConfig(), engine, steps, held, tmp_path, mesh=mesh, signals=signals, **options).run()
        return engine.done

    first, second = in_threads(2, rank)
    return first, second


def test_a_follower_does_what_rank_0_orders(tmp_path: Path) -> None:
    def lead(leader: Leader, engine: Any, signals: StopSignals) -> None:
        for step, lr in enumerate((0.1, 0.3)):
            with leader.ordering(Order.STEP, lr):
                engine.train_step([], step=step, lr=lr)
        with leader.ordering(Order.EVALUATE):
            assert len(list(leader.interruptible([tiny.batch([[1]])] * 5))) == 5
        with leader.served(engine):
            pass

    _, done = led(lead, tmp_path)
    shared = [False, True]
    assert done == [(0, 0.1, shared), (1, 0.3, shared), "evaluation begins", 5, [1.0]]


def test_a_follower_makes_steps_and_plays_with_rank_0(tmp_path: Path) -> None:
    class Online(Steps):
        made = 0

        def attach(self, engine: Any) -> None: ...

        def next_step(self) -> list[MicroBatch]:
            self.made += 1
            if self.made == 2:
                raise Stopped
            return [tiny.batch([[1, 2, 3]])] * 3

    played: list[int] = []

    def lead(leader: Leader, engine: Any, signals: StopSignals) -> Any:
        with leader.ordering(Order.PLAY):
            leader.hear_signals()
        with leader.ordering(Order.MAKE):
            pass
        with leader.ordering(Order.STEP, 0.1):
            pass
        with suppress(Stopped), leader.ordering(Order.MAKE):
            leader.hear_signals()
            raise Stopped
        with leader.served(engine):
            pass
        return signals.received

    # Rank 1 alone has the signal, and its evaluation and its second step end early.
    received, done = led(lead, tmp_path, signal.SIGTERM, steps=Online(), evaluator=played.append)
    assert received == signal.SIGTERM
    assert played == [0]
    assert done == ["fresh", "fresh", (0, 0.1, [False, True, False]), "fresh", [1.0]]


def test_all_ranks_load_the_checkpoint_that_rank_0_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []
    monkeypatch.setattr(CheckpointDir, "load", lambda path, *, digests: (path, digests))
    monkeypatch.setattr(leading, "load_tensors", lambda engine, found: loaded.append((engine.mesh.rank, *found)))

    def lead(leader: Leader, engine: Any, signals: StopSignals) -> None:
        for step in (7, 3):
            with leader.ordering(Order.LOAD, step):
                leader.load(engine, tmp_path / f"checkpoint-{step}", print)

    led(lead, tmp_path)
    # Rank 0 has checked the digests.
    expected = [(rank, tmp_path / f"checkpoint-{step}", False) for step in (7, 3) for rank in (0, 1)]
    assert sorted(loaded) == sorted(expected)


def test_a_follower_gives_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "peak_memory", lambda engine: 11 + engine.mesh.rank)

    def lead(leader: Leader, engine: Any, signals: StopSignals) -> Any:
        with leader.ordering(Order.FIGURES):
            return leader.figures(100, 0.5)

    assert led(lead, tmp_path)[0] == ((100, 12), (0.5, 1.5))


@pytest.mark.parametrize("measured", [True, False])
def test_every_rank_learns_the_figures_of_all(measured: bool) -> None:
    def rank(fabric: Any) -> Any:
        ranks = Ranks(fabric.mesh(), StopSignals())
        return ranks.figures(100 + fabric.rank, 0.5 + fabric.rank if measured or fabric.rank else None)

    expected = ((100, 101, 102), (0.5, 1.5, 2.5) if measured else ())
    assert in_threads(3, rank) == [expected] * 3


def test_the_supervisor_hears_when_a_step_may_take_any_time() -> None:
    class Line(Lifeline):
        said: ClassVar[list[Any]] = []

        def beat(self, step: int) -> None:
            self.said.append(step)

        def rest(self) -> None:
            self.said.append("rest")

    leader = Leader(Mesh(lifeline=Line()), StopSignals())
    for step in (1, 2):
        with leader.ordering(Order.STEP, 0.1):
            pass
        leader.step_ends(step)
    with leader.ordering(Order.EVALUATE), leader.served(None):  # type: ignore[arg-type]
        pass
    with leader.ordering(Order.STEP, 0.1):
        pass
    assert Line.said == [0, 1, 2, "rest", "rest", 2], "after other work the step begins with a report"


def test_a_signal_to_any_rank_reaches_rank_0_with_the_next_step(tmp_path: Path) -> None:
    def lead(leader: Leader, engine: Any, signals: StopSignals) -> Any:
        assert signals.received is None
        with leader.ordering(Order.STEP, 0.5):
            pass
        return signals.received

    received, done = led(lead, tmp_path, received=signal.SIGTERM)
    assert received == signal.SIGTERM
    assert done == [(0, 0.5, [False, True])], "the step is taken all the same"


def test_a_signal_interrupts_the_evaluation_of_all_ranks_together(tmp_path: Path) -> None:
    def lead(leader: Leader, engine: Any, signals: StopSignals) -> int:
        seen = 0

        def held() -> Iterator[MicroBatch]:
            nonlocal seen
            for number in range(5):
                seen += 1
                if number == 2:
                    signals.received = signal.SIGINT
                yield tiny.batch([[1, 2]])

        with pytest.raises(Interrupted), leader.ordering(Order.EVALUATE):
            list(leader.interruptible(held()))
        return seen

    seen, done = led(lead, tmp_path)
    assert seen == 3, "the ranks agree before every round of one micro-batch each"
    assert done == ["evaluation begins"]


def test_a_signal_during_the_exchange_waits_for_the_next_one() -> None:
    """The other ranks have not heard of it, and go on."""
    signals = StopSignals()

    class Fabric:
        def largest(self, values: Any) -> list[float]:
            signals.received = signal.SIGTERM
            return list(values)

    fabric: Any = Fabric()
    batches = Ranks(Mesh(world=2, fabric=fabric), signals).interruptible([tiny.batch([[1]])] * 3)
    assert [next(batches).tokens for _ in range(2)] == [1, 1], "a round of two"
    with pytest.raises(Interrupted):
        next(batches)


def test_a_full_disk_lets_the_others_go(tmp_path: Path) -> None:
    def lead(leader: Leader, engine: Any, signals: StopSignals) -> None:
        with pytest.raises(MachineError, match="full"), leader.served(engine):
            raise MachineError("the disk is full")
        with leader.ordering(Order.STEP, 0.25):
            pass

    assert led(lead, tmp_path)[1] == [[1.0], (0, 0.25, [False, True])]


def test_nobody_is_waited_for_after_an_error_in_common_work() -> None:
    """The other ranks may be anywhere, and rank 0 must end with its error."""

    class Fabric:
        calls = 0

        def largest(self, values: Any) -> list[float]:
            self.calls += 1
            return list(values)

    fabric: Any = Fabric()
    leader = Leader(Mesh(world=2, fabric=fabric), StopSignals())
    with pytest.raises(RuntimeError), leader.ordering(Order.STEP, 0.1):
        raise RuntimeError
    leader.end()
    assert fabric.calls == 1


def test_one_rank_exchanges_nothing() -> None:
    leader = Leader(Mesh(), StopSignals())
    with leader.ordering(Order.STEP, 0.1), leader.served(None):  # type: ignore[arg-type]
        pass
    leader.end()
    signals = StopSignals()
    batches = Ranks(Mesh(), signals).interruptible([tiny.batch([[1]])] * 2)
    next(batches)
    signals.received = signal.SIGINT
    with pytest.raises(Interrupted):
        next(batches)
