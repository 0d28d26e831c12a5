"""Weights of which every rank keeps a share: what is fetched is what was put, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import surogate_offload_disk as disk
import surogate_offload_host as host
import torch
from tiny_qwen3 import StrictStore
from torch import Tensor

from surogate_core.bundles import OffloaderSpec, Store, Stores, TensorKind
from surogate_core.bundles.fabrics import Fabric
from surogate_core.engine.engine import Engine
from surogate_core.engine.ranks.owned import Owned, Within
from surogate_core.engine.ranks.sharded_weights import ALIGNMENT, ShardedWeights
from surogate_core.engine.ranks.sharding import owners
from surogate_core.engine.ranks.stages import Stages
from surogate_core.engine.schedule import EMBED, HEAD, evaluation_schedule, layer_key, training_schedule
from surogate_testing import tiny
from surogate_testing.virtual import in_threads

CPU = torch.device("cpu")
LAYERS = 4
WORLDS = [1, 2, 3, 4, 8]


class CountingFabric:
    """A fabric that notes its gathers."""

    def __init__(self, fabric: Fabric, log: list[str]):
        self._fabric, self.log = fabric, log
        self.rank, self.world = fabric.rank, fabric.world

    def gather(self, parts: Sequence[Tensor]) -> None:
        self.log.append("gather")
        self._fabric.gather(parts)


def _layer(number: int) -> list[Tensor]:
    """Tensors of several dtypes, lengths and strides."""
    drawn = torch.Generator().manual_seed(number)
    return [
        torch.randn(7, 11, generator=drawn).bfloat16(),
        torch.randn(5, 3, generator=drawn).t(),
        torch.randint(0, 256, (300 + 100 * number,), generator=drawn, dtype=torch.uint8),
        torch.randn(33, 4, generator=drawn).to(torch.float8_e4m3fn),
        torch.randn(4, 1, generator=drawn).expand(4, 6),
        torch.randn((), generator=drawn),
    ]


def _same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return len(found) == len(expected) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.float(), b.float())
        for a, b in zip(found, expected, strict=True)
    )


def _pass(store: ShardedWeights, expected: Callable[[str], Sequence[Tensor]], *, training: bool) -> None:
    """Take a store through a schedule; between fetch and release the tensors are right."""
    held = {}
    actions = training_schedule(LAYERS, train_embedding=True) if training else evaluation_schedule(LAYERS)
    store.begin_pass()
    for action in actions:
        if action.kind != "weights":
            continue
        if action.verb == "prefetch":
            store.prefetch(action.key)
        elif action.verb == "fetch":
            held[action.key] = store.fetch(action.key)
            assert all(a is b for a, b in zip(store.fetch(action.key), held[action.key], strict=True))
        elif action.verb == "release":
            assert _same(held.pop(action.key), expected(action.key)), action
            store.release(action.key)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("inside", [False, True], ids=["device", "inner"])
def test_every_rank_fetches_what_was_put(world: int, inside: bool) -> None:
    pieces = {layer_key(i): _layer(i) for i in range(LAYERS)}
    tied = torch.randn(10, 8)
    pieces |= {EMBED: [tied], HEAD: [torch.ones(8), tied]}

    def work(fabric: Fabric) -> dict[str, int]:
        inner = StrictStore("weights") if inside else None
        store = ShardedWeights(Stages.over(fabric), CPU, inner=inner)
        for key, tensors in pieces.items():
            store.put(key, tensors)
        held = dict(store.nbytes())
        for training in (True, False, True):
            _pass(store, pieces.__getitem__, training=training)
        assert inner is None or not inner.out
        return held

    total = sum(t.numel() * t.itemsize for key, tensors in pieces.items() if key.startswith("layer") for t in tensors)
    whole = tied.nbytes + 32 + (tied.nbytes if inside else 0)  # `StrictStore` copies a tied tensor twice
    for held in in_threads(world, work):
        share = held["host" if inside else "device"] - whole
        assert total / world <= share <= total / world + LAYERS * ALIGNMENT * (6 / world + 1)
        assert not inside or not held["device"]


def test_strides_of_dense_tensors_are_kept() -> None:
    def work(fabric: Fabric) -> list[tuple[int, ...]]:
        store = ShardedWeights(Stages.over(fabric), CPU)
        store.put("layer 0", _layer(0))
        return [t.stride() for t in store.fetch("layer 0")]

    assert in_threads(2, work)[1][:2] == [(11, 1), (1, 3)]


def test_a_piece_is_put_again() -> None:
    def work(fabric: Fabric) -> None:
        store = ShardedWeights(Stages.over(fabric), CPU)
        for tensors in (_layer(1), _layer(1), _layer(3)):
            store.put("layer 0", tensors)
            assert _same(store.fetch("layer 0"), tensors)
            store.release("layer 0")

    in_threads(2, work)


def test_the_turn_gathers_nothing_again() -> None:
    """Two buffers: the last two layers of the forward are the first two of the backward."""

    def work(fabric: Fabric) -> None:
        log: list[str] = []
        store = ShardedWeights(Stages.over(CountingFabric(fabric, log)), CPU)  # type: ignore[arg-type]
        for i in range(LAYERS):
            store.put(layer_key(i), _layer(i))
        store.put(EMBED, [])
        store.put(HEAD, [])
        for _ in range(2):
            log.clear()
            _pass(store, lambda key: _layer(int(key[6:])) if key.startswith("layer") else [], training=True)
            assert len(log) == 2 * LAYERS - 2

    in_threads(2, work)


def test_three_pieces_do_not_fit() -> None:
    def work(fabric: Fabric) -> None:
        store = ShardedWeights(Stages.over(fabric), CPU)
        for i in range(3):
            store.put(layer_key(i), _layer(i))
        store.fetch("layer 0")
        store.fetch("layer 1")
        with pytest.raises(AssertionError, match="two pieces are in use"):
            store.fetch("layer 2")
        store.begin_pass()  # the pass has ended by an error, such as one that a capture may raise
        assert _same(store.fetch("layer 2"), _layer(2))

    in_threads(2, work)


def test_an_inner_store_is_read_beside_the_computation() -> None:
    """What may block waits until the computation of the piece before it has been launched."""

    def work(fabric: Fabric) -> list[tuple[str, str]]:
        inner = StrictStore("weights")
        store = ShardedWeights(Stages.over(fabric), CPU, inner=inner)
        for i in range(3):
            store.put(layer_key(i), _layer(i))
        inner.log.clear()
        store.prefetch("layer 0")
        store.prefetch("layer 1")
        store.fetch("layer 0")
        inner.log.append(("compute", "layer 0"))
        store.release("layer 0")
        store.prefetch("layer 2")
        store.release("layer 1")
        store.release("layer 2")
        return inner.log

    log = in_threads(2, work)[0]
    assert log.index(("prefetch", "layer 1")) < log.index(("compute", "layer 0")) < log.index(("fetch", "layer 1"))
    assert log.count(("fetch", "layer 2")) == log.count(("release", "layer 2")) == 1


def _in_memory(kind: str, directory: str) -> Store | None:
    """An inner store of live shards."""
    if kind == "device":
        return None
    spec = {"host": host, "disk": disk}[kind].surogate_offloader()
    return spec.build(spec.options(), directory, CPU).store("weights")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("inside", ["device", "host", "disk"])
def test_trained_weights_are_gathered_as_they_are_now(world: int, inside: str, tmp_path: Path) -> None:
    """Five units a layer: with four and eight ranks some own less, or nothing."""
    elements, shapes = 5 * 256, {0: (20, 10), 256: (1000,)}

    def values(step: int, key: str) -> Tensor:
        return torch.randn(elements, generator=torch.Generator().manual_seed(100 * step + int(key[6:]))).bfloat16()

    def expected(step: int, key: str) -> list[Tensor]:
        flat = values(step, key)
        return [flat[at : at + torch.Size(shape).numel()].view(shape) for at, shape in shapes.items()]

    def work(fabric: Fabric) -> None:
        store = ShardedWeights(Stages.over(fabric), CPU, inner=_in_memory(inside, str(tmp_path)))
        start, stop = owners((0, elements), world)[fabric.rank]
        shards = {layer_key(i): torch.zeros(stop - start, dtype=torch.bfloat16) for i in range(LAYERS)}
        for key, shard in shards.items():
            members = [Within(key, at, shape) for at, shape in shapes.items()]
            store.put_trained(key, Owned(owners=owners((0, elements), world), shard=shard), members)
        store.put(EMBED, [])
        store.put(HEAD, [])
        for step in range(2):
            for key, shard in shards.items():
                shard.copy_(values(step, key)[start:stop])
            _pass(store, lambda key, s=step: expected(s, key) if key in shards else [], training=step == 0)
        buffers = 2 * world * owners((0, elements), world)[0][1]
        # A host's or a disk's store leaves live tensors to their owner.
        kept = LAYERS * (stop - start) if inside == "device" else 0
        assert store.nbytes()["device"] == 2 * (kept + buffers)

    in_threads(world, work)


def test_uneven_parts_in_front_are_refused() -> None:
    def work(fabric: Fabric) -> None:
        owned = Owned(owners=[(0, 256), (256, 1024)], shard=torch.zeros(256))
        with pytest.raises(AssertionError, match="only the last parts"):
            ShardedWeights(Stages.over(fabric), CPU).put_trained("layer 0", owned, [])

    in_threads(1, work)


class _LaterFabric:
    """A fabric whose engine is built before its thread starts, because tracing takes one thread."""

    def __init__(self, rank: int, world: int):
        self.rank, self.world = rank, world

    def gather(self, parts: Sequence[Tensor]) -> None:
        self.fabric.gather(parts)


class _ShardedStores(Stores):
    def __init__(self, fabric: Fabric):
        self.fabric = fabric

    def store(self, kind: TensorKind) -> ShardedWeights:
        return ShardedWeights(Stages.over(self.fabric), CPU)


def _sharded_engine(fabric: Fabric, **settings: Any) -> Engine:
    """An engine whose frozen weights are sharded, with all of its programs."""
    stores = _ShardedStores(fabric)
    spec = OffloaderSpec(name="sharded", kinds=frozenset({"weights"}), place="host", build=lambda *a: stores)
    engine = tiny.engine(offloader=spec, **settings)
    for piece in engine.plan.layers:
        engine.programs.evaluation_layer(piece)
    for chunk in engine.programs.chunks():
        engine.programs.head(engine.plan.head, chunk.stop - chunk.start, training=False)
    return engine


def test_an_engine_on_a_sharded_base() -> None:
    """LoRA on two virtual ranks that take the same micro-batches: the bits of one process."""
    batches = [tiny.batch(tiny.documents([11, 9])), tiny.batch(tiny.documents([11]))]
    config = {**tiny.SMALL_CONFIG, "num_hidden_layers": 3}
    settings = {"build": tiny.SmallModel, "optimizer": tiny.ADAMW, "lora": tiny.lora(dropout=0.2), "config": config}
    plain = tiny.engine(**settings)
    fabrics = [_LaterFabric(rank, 2) for rank in range(2)]
    engines = [_sharded_engine(fabric, **settings) for fabric in fabrics]  # type: ignore[arg-type]
    gradients, evaluated = tiny.gradients(plain, batches), plain.evaluate(batches)
    logits, base = plain.logits(batches[0]), dict(plain.parameters.base_tensors())

    def work(fabric: Fabric) -> None:
        fabrics[fabric.rank].fabric = fabric
        engine = engines[fabric.rank]
        tiny.ensure_same_bits(tiny.gradients(engine, batches), gradients, "sharded")
        assert engine.evaluate(batches) == evaluated
        assert torch.equal(engine.logits(batches[0]), logits)
        found = {name: t.clone() for name, t in engine.parameters.base_tensors()}
        tiny.ensure_same_bits(found, base, "sharded base")

    in_threads(2, work)
