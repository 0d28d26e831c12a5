"""What runs before CUDA graphs are captured changes nothing."""

from __future__ import annotations

import gc
from functools import partial
from unittest import mock

import hybrids
import pytest
import torch
from rank_engines import engine_of
from torch import Tensor

from surogate_core.engine import graphs
from surogate_core.engine import step as step_module
from surogate_core.engine.engine import Engine
from surogate_core.engine.graphs import warm_up
from surogate_core.engine.ranks.sharded_gradients import ShardedGradients
from surogate_testing import tiny
from surogate_testing.virtual import VirtualFabric, in_threads


def first_steps(fabric: VirtualFabric, *, level: int, warm: bool) -> tuple[int, list[tuple[float, float]]]:
    """How many kinds of micro-step add to earlier sums in a kernel of their own, and the figures of two steps."""
    several = fabric.world > 1
    assembly = tiny.assembly(
        tiny.CONFIG,
        optimizer=tiny.ADAMW,
        max_seqlen=tiny.TOKENS,
        micro_batches=8,
        ranks=fabric.world,
        zero_level=level,
        shard_weights=level == 3,
    )
    engine = Engine(assembly, tiny.random_source(), mesh=fabric.mesh() if several else None)
    others, own = engine._adding_kinds(), engine.sharing.share(8).numbers
    if warm:
        warm_up(engine.step.train, engine.update.run, engine.update.spoil, others=others)
    figures = []
    for step in range(2):
        batches = [b if n in own else b.counts() for n, b in enumerate(tiny.batches(step, 8))]
        figures.append(engine.train_step(batches, step=step, lr=1e-2).read())
    engine.close()
    return len(others), figures


@pytest.mark.parametrize(("world", "level"), [(1, 0), (2, 1), (2, 3)])
def test_a_warm_up_leaves_nothing_in_the_first_steps(world: int, level: int) -> None:
    """On a GPU micro-steps run before the first step, and are spoilt. Alone and at level 3 one adds to the sums of
    another, in a kernel that no capture could load.
    """
    cold, warm = (in_threads(world, partial(first_steps, level=level, warm=warm)) for warm in (False, True))
    assert warm == cold
    assert [count for count, _ in warm] == [int(level == 3 or world == 1)] * world


@pytest.mark.parametrize("name", list(hybrids.CONFIGS))
def test_kernels_find_documents_before_the_first_micro_batch(name: str) -> None:
    """A scan that looked for one that is not there would read outside of its rows."""
    engine = hybrids.engine(name)
    warm_up(engine.step.train, engine.update.run, engine.update.spoil)
    borders = engine.inputs.cu_seqlens.tolist()
    assert borders == sorted(borders)
    assert (borders[0], borders[-1]) == (0, len(engine.inputs.input_ids))
    engine.close()


@pytest.mark.parametrize("steps", ["whole steps", "a step without a micro-batch", "steps of many sizes"])
def test_what_the_first_micro_step_writes_is_what_it_would_add_to_zeros(
    monkeypatch: pytest.MonkeyPatch, steps: str
) -> None:
    """Alone with all weights trained, nothing clears the sums of layers: whatever they have does not count."""
    counts = {"whole steps": [4, 4, 4], "a step without a micro-batch": [4, 0, 4], "steps of many sizes": [1, 5, 2]}

    def run(*, written: bool) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
        if not written:
            monkeypatch.setattr(step_module, "_written", lambda sharing, plan: ())
        assembly = tiny.assembly(tiny.CONFIG, optimizer=tiny.ADAMW, max_seqlen=tiny.TOKENS)
        engine = Engine(assembly, tiny.random_source())
        assert bool(engine.stores.written_first) == written
        cleared = sum(t.numel() for t in engine.update._cleared)
        assert (cleared < sum(t.numel() for t in engine.parameters.flat.sums())) == written
        warm_up(engine.step.train, engine.update.run, engine.update.spoil, others=engine._adding_kinds())
        figures = []
        for step, number in enumerate(counts[steps]):
            batches = tiny.batches(step, number) if number else []
            figures.append(engine.train_step(batches, step=step, lr=1e-2).read()[:2])
        masters = {name: t.clone() for name, t in engine.parameters.masters().items()}
        engine.close()
        return figures, masters

    (figures, masters), (expected, others) = run(written=True), run(written=False)
    assert figures == expected
    assert all(torch.equal(masters[name], others[name]) for name in others)


def test_a_step_without_a_micro_batch_takes_the_gradients_that_are_there() -> None:
    made, other = (tiny.engine(optimizer=tiny.ADAMW) for _ in range(2))
    made.accumulate(tiny.batches(0))
    made.accumulate([])
    _, norm = made.train_step([], step=0, lr=1e-2).read()
    assert norm == other.train_step(tiny.batches(0), step=0, lr=1e-2).read()[1]
    assert made.train_step([], step=1, lr=1e-2).read() == (0.0, 0.0)


def test_adapters_and_several_ranks_have_sums_that_are_cleared() -> None:
    lora = Engine(tiny.assembly(tiny.CONFIG, lora=tiny.lora(), optimizer=tiny.ADAMW), tiny.random_source())
    assert not lora.stores.written_first
    assert lora._adding_kinds() == []
    lora.close()


@pytest.mark.parametrize("layers", [1, 2])
def test_a_warm_up_adds_to_the_sums_of_the_first_layer(layers: int) -> None:
    """A micro-step that is not the last one leaves them to the next, and with one layer that is all that it adds."""

    def work(fabric: VirtualFabric) -> list[tuple[str, bool]]:
        config = {**tiny.SMALL_CONFIG, "num_hidden_layers": layers}
        engine = engine_of(fabric, micro_batches=8, zero_level=2, config=config)
        store, added = engine.stores.gradients, []
        assert isinstance(store, ShardedGradients)
        reduce = store._reduce

        def noted(piece: str, *, onto: bool) -> None:
            added.append((piece, onto))
            reduce(piece, onto=onto)

        store._reduce = noted  # type: ignore[method-assign]
        warm_up(engine.step.train, engine.update.run, engine.update.spoil, others=engine._adding_kinds())
        return added

    for added in in_threads(2, work):
        assert ("layer 0", True) in added


def test_each_gpu_captures_in_a_stream_of_its_own() -> None:
    """torch's own stream is on the GPU that captures first: what another one runs meanwhile is in no graph."""
    graphs._streams_of.cache_clear()
    streams = mock.patch("torch.cuda.Stream", side_effect=lambda device: f"a stream of GPU {device}")
    with streams, mock.patch("torch.cuda.graph") as capture:
        for device in (0, 1, 0):
            with mock.patch("torch.cuda.current_device", return_value=device), graphs._recorded(mock.Mock(), None):
                assert not gc.isenabled()
    graphs._streams_of.cache_clear()
    assert gc.isenabled()
    assert [call.kwargs["stream"] for call in capture.call_args_list] == [f"a stream of GPU {i}" for i in (0, 1, 0)]
