"""The loop's work around its steps."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from surogate_core.batch import MicroBatch
from surogate_core.config.schema import RunConfig
from surogate_core.data.sampler import StepLoader
from surogate_core.events import CheckpointSaved, ExpertLoads, Notice, Samples
from surogate_core.mesh.mesh import Mesh
from surogate_core.train.flops import ModelFlops
from surogate_core.train.leading import Interrupted, Leader
from surogate_core.train.loop import Loop, LoopState, most_steps
from surogate_core.train.measures import settled_objects
from surogate_core.train.prefetch import Batches as Made
from surogate_core.train.prefetch import Prefetcher
from surogate_core.train.sides import SideFigures
from surogate_core.train.signals import StopSignals
from surogate_testing import tiny

CPU = torch.device("cpu")
WORK = ModelFlops(products_per_token=1.0, attention_per_pair=0.0)


class Batches:
    """A loader that hands out the same micro-batch again and again."""

    epoch = 0.0

    def __init__(self) -> None:
        self.batch = tiny.batch([[1, 2, 3]])

    def next_step(self) -> list[MicroBatch]:
        return [self.batch]

    def state(self) -> dict[str, Any]:
        return {}


class Watched(Loop):
    """A loop whose steps only look around."""

    def __init__(self, fails: bool, device: str = "cuda") -> None:
        self.loader, self._work, self._telemetry = cast(StepLoader, Batches()), WORK, None
        settings = type("Settings", (), {"device": torch.device(device), "ranks": 1, "axes": tiny.axes()})
        self.engine = cast(Any, type("Engine", (), {"settings": settings}))
        self.leader = Leader(Mesh(), StopSignals())
        self.fails, self.frozen = fails, 0

    def _run(self, batches: Prefetcher) -> Any:
        self.frozen = gc.get_freeze_count()
        assert batches.take().batches
        if self.fails:
            raise RuntimeError("a step failed")
        return "finished"


@pytest.mark.parametrize("fails", [False, True])
def test_the_collector_passes_over_what_existed_before_the_loop_of_a_gpu(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Made, "of", lambda engine, loader, work: Prefetcher(loader, work, CPU))
    gc.unfreeze()
    loop = Watched(fails)
    if fails:
        with pytest.raises(RuntimeError, match="a step failed"):
            loop.run()
    else:
        assert loop.run() == "finished"
    assert loop.frozen > 10_000
    assert gc.get_freeze_count() == 0


def test_a_cpus_loop_begins_without_a_pass_of_the_collector() -> None:
    loop, before = Watched(False, "cpu"), gc.get_freeze_count()
    assert loop.run() == "finished"
    assert loop.frozen <= before, "what was kept before may be dropped meanwhile"


def test_garbage_is_freed_before_it_would_be_kept() -> None:
    class Freed:
        gone = False

        def __del__(self) -> None:
            Freed.gone = True

    circle: list[Any] = [Freed()]
    circle.append(circle)
    del circle
    gc.unfreeze()
    with settled_objects():
        assert Freed.gone
        assert gc.get_freeze_count()
    assert not gc.get_freeze_count()


def test_what_a_program_keeps_from_the_collector_stays_kept() -> None:
    gc.freeze()
    kept = gc.get_freeze_count()
    try:
        with settled_objects():
            assert gc.get_freeze_count() <= kept
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def made(device: torch.device) -> tuple[MicroBatch, MicroBatch]:
    """(what the loader hands out, what the loop takes)."""
    loader = Batches()
    batches = Prefetcher(cast(StepLoader, loader), WORK, device)
    try:
        (batch,) = batches.take().batches
    finally:
        batches.close()
    return loader.batch, batch


def test_a_cpu_takes_what_the_loader_made() -> None:
    given, taken = made(CPU)
    assert taken is given


@pytest.mark.gpu
def test_a_gpu_takes_micro_batches_in_pinned_memory() -> None:
    given, taken = made(torch.device("cuda"))
    for name in ("input_ids", "labels", "positions", "cu_seqlens"):
        value, source = getattr(taken, name), getattr(given, name)
        assert value.is_pinned()
        assert not source.is_pinned()
        assert torch.equal(value, source)
    assert (taken.tokens, taken.label_tokens, taken.columns) == (given.tokens, given.label_tokens, {})


class Saving(Loop):
    """A loop that has taken steps whose loads are not recorded yet, and saves nothing."""

    def __init__(self) -> None:
        self.engine, self.checkpoints, self.bus = (cast(Any, mock.MagicMock()) for _ in range(3))
        self.config, self.identity, self.leader = RunConfig(), {}, Leader(Mesh(), StopSignals())
        self.state, self.stop_reason, self._clock = LoopState(step=3), "", mock.MagicMock()
        self._save_asked, self._best_is_new, self._saved_step = False, False, None
        self._sides = SideFigures({"tokens": [0]}, every=100)
        for step in range(1, 4):
            list(self._sides.events(step, {"tokens": ("expert_tokens", torch.tensor([[3.0, 1.0]]))}, 1))
        self.told: list[Any] = []

    def emit(self, event: Any) -> bool:
        self.told.append(event)
        return False


@pytest.mark.parametrize("signalled", [False, True])
def test_a_checkpoint_that_nobody_planned_loses_no_loads(signalled: bool) -> None:
    """A resumed run begins a new record."""
    loop = Saving()
    loop._save({}, last=False, signalled=signalled)
    first, *others = loop.told
    assert (first.step, first.steps, first.tokens) == (3, 3, ((9, 3),))
    assert [type(event) for event in others if isinstance(event, ExpertLoads | CheckpointSaved)] == [CheckpointSaved]
    assert not list(loop._sides.flush(3))


class Sampling(Loop):
    """A loop that takes no steps, and whose sampler answers with what it is given."""

    def __init__(self, answer: Any, every: Any = "auto", signals: StopSignals | None = None) -> None:
        self.engine, self.bus, self.told = cast(Any, mock.MagicMock()), cast(Any, mock.MagicMock()), []
        self.config = RunConfig(eval_steps=4, sample_steps=every)
        self.signals = signals or StopSignals()
        self.state, self.total_steps, self._clock = LoopState(step=8), 10, mock.MagicMock()
        self.leader = Leader(Mesh(), self.signals)
        self.sampler = lambda engine, step, stopped: answer

    def emit(self, event: Any) -> bool:
        self.told.append(event)
        return False


def test_samples_come_with_evaluations_or_at_steps_of_their_own() -> None:
    def due(every: Any) -> list[int]:
        loop = Sampling(None, every)
        return [done for done in range(11) if loop._sampling_due(done)]

    assert due("auto") == [0, 4, 8, 10]
    assert due(3) == [0, 3, 6, 9, 10]
    assert due(0) == [0, 10]
    without = Sampling(None)
    without.sampler = None
    assert not without._sampling_due(0)


def test_samples_are_taken_once_a_step() -> None:
    samples = Samples(step=8, prompts=("a",), texts=("b",))
    loop = Sampling(samples)
    loop._sample()
    assert loop.told == [samples]
    assert not loop._sampling_due(8)
    assert loop._sampling_due(10)
    loop.engine.freshen.assert_called_once()


def test_a_sampler_that_fails_is_not_asked_again() -> None:
    notice = Notice(level="warning", message="no memory")
    loop = Sampling(notice)
    loop._sample()
    assert loop.told == [notice]
    assert loop.sampler is None
    loop._sample()
    assert loop.told == [notice]


def test_samples_that_a_signal_ended_are_due_again() -> None:
    loop = Sampling(None)
    with pytest.raises(Interrupted):
        loop._sample()
    assert loop.told == []
    assert loop._sampling_due(8)


def test_epoch_adjustment_may_make_a_run_read_every_row() -> None:
    """What is computed of the rows beforehand must be there for an epoch that is longer than `num_epochs` says."""
    loader = cast(StepLoader, SimpleNamespace(epoch=0.0, steps_per_epoch=9.5))
    assert most_steps(RunConfig(num_epochs=0.2), loader) == 2
    assert most_steps(RunConfig(num_epochs=0.2, epoch_adjustment=True), loader) == 10
    assert most_steps(RunConfig(num_epochs=2, epoch_adjustment=True), loader) == 19
