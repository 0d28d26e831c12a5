"""Trained weights that one input meets are multiplied as one: which, and that the numbers stay."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from surogate_offload_host import surogate_offloader
from tiny_qwen3 import make_engine, tiny_config
from torch import Tensor

from surogate_core.bundles import RolloutSettings
from surogate_core.dsl import Dim, Stack
from surogate_core.dsl.slots import BoundJoin, Join, LinearSlot
from surogate_core.engine.engine import Engine
from surogate_core.engine.planning import weight_plan
from surogate_core.generate.native import NativeEngine
from surogate_core.generate.weights import Weights
from surogate_core.mesh.axes import Axes
from surogate_testing import tiny

TOKENS, BORDERS = 64, 6
CONFIG = tiny_config(hidden_size=64, intermediate_size=128, num_hidden_layers=2, vocab_size=128, head_dim=32)

JOINED = (("q", "k", "v"), ("gate", "up"))


def engine(compiler: str = "inductor", **more: Any) -> Engine:
    settings = {"tokens": TOKENS, "borders": BORDERS, "source": tiny.random_source(std=0.05), "compiler": compiler}
    return make_engine(more.pop("config", CONFIG), **settings, **more)


def names(e: Engine | Weights) -> set[tuple[tuple[str, ...], ...]]:
    return {tuple(tuple(s.name for s in join.slots) for join in joins) for joins in e.parameters.joins.values()}


@pytest.fixture(scope="module", params=["traced", pytest.param("compiled", marks=pytest.mark.slow)])
def joined(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine whose graphs have joins: as they are before Inductor compiles them, or compiled, which takes 10 s."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "traced":
            patch.setattr(torch._inductor, "compile", lambda module, inputs, **options: module)
        yield engine()


def test_projections_of_one_input_are_joined(joined: Engine) -> None:
    assert names(joined) == {JOINED}


def test_a_join_is_a_view_of_the_weights(joined: Engine) -> None:
    piece = next(iter(joined.plan.layers))
    tensors = joined.parameters.inputs(piece)
    weights = {s.name: tensor for s, tensor in zip(piece.specs, tensors, strict=True)}
    for join, tensor in joined.parameters.join_tensors(piece, tensors):
        parts = [weights[f"{slot.name}.weight"] for slot in join.slots]
        assert torch.equal(tensor, torch.cat(parts))
        assert tensor.data_ptr() == parts[0].data_ptr()


def test_gradients_are_those_of_single_products(joined: Engine) -> None:
    batches = [tiny.batch(tiny.documents((30, 1, 20), vocabulary=128, seed=3), tokens=TOKENS, borders=BORDERS)]
    plain = engine("fx")
    assert not plain.parameters.joins
    error, name = tiny.worst(tiny.gradients(joined, batches), tiny.gradients(plain, batches))
    assert error <= 2e-6, f"{name}: {error:.1e}"
    assert joined.evaluate(batches)[0] == pytest.approx(plain.evaluate(batches)[0], rel=1e-6)


@pytest.mark.slow
def test_weights_that_come_from_the_host_are_joined_too(joined: Engine) -> None:
    """Copied as one they stand in a row on the device: the bits of a run without offloading, and no other copy."""
    e = engine(offloader=surogate_offloader(), dtype=torch.bfloat16)
    assert names(e) == names(joined)
    piece = next(iter(e.plan.layers))
    tensors = e.parameters.inputs(piece)
    found = {s.name: tensor for s, tensor in zip(piece.specs, tensors, strict=True)}
    for join, tensor in e.parameters.join_tensors(piece, tensors):
        parts = [found[f"{slot.name}.weight"] for slot in join.slots]
        assert torch.equal(tensor, torch.cat(parts))
        assert tensor.data_ptr() == parts[0].data_ptr()
    e.stores.weights.release(piece.key)
    plain = engine(dtype=torch.bfloat16)
    batch = tiny.batch(tiny.documents((30, 1), vocabulary=128), tokens=64, borders=6)
    assert [e.train_step([batch], step=s, lr=1e-2).read() for s in range(2)] == [
        plain.train_step([batch], step=s, lr=1e-2).read() for s in range(2)
    ]


def test_what_is_not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapted projections, and weights with a gap between them in their group. It is known before compiling."""
    monkeypatch.setattr(torch._inductor, "compile", lambda module, inputs, **options: module)
    assert not engine(lora=tiny.lora(4)).parameters.joins
    gap = tiny_config(hidden_size=24, intermediate_size=40, num_hidden_layers=1, vocab_size=128, head_dim=12)
    assert names(engine(config=gap)) == {()}


def test_frozen_weights_are_joined_where_a_gpu_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are rows of one matrix, with which the numbers stay."""
    adapted = engine("fx", lora=tiny.lora(4)).plan.assembly
    frozen = replace(tiny.lora(4), targets=frozenset[str]())
    assembly = replace(adapted, lora=frozen, settings=replace(adapted.settings, compiler="inductor"))
    document = tiny.documents((30,), vocabulary=128)[0]

    def loaded() -> tuple[Weights, list[float]]:
        weights = Weights.load(assembly, tiny.random_source(std=0.05))
        (logprobs,) = NativeEngine(weights, RolloutSettings(slots=1, context=32)).logprobs([document])
        return weights, logprobs

    plain, expected = loaded()
    assert not any(plain.parameters.joins.values())
    monkeypatch.setattr(weight_plan, "_stays_on_a_gpu", lambda assembly: True)
    joined, found = loaded()
    piece = joined.plan.layers[0]
    assert [tuple(s.name for s in join.slots) for join in joined.parameters.joins[piece.key]] == [*JOINED]
    tensors = joined.parameters.inputs(piece)
    weights = {s.name: tensor for s, tensor in zip(piece.specs, tensors, strict=True)}
    for join, tensor in joined.parameters.join_tensors(piece, tensors):
        assert tensor.data_ptr() == weights[f"{join.slots[0].name}.weight"].data_ptr()
    assert found == pytest.approx(expected, rel=1e-5)
    kept = dict(plain.parameters.base_tensors())
    assert all(torch.equal(value, kept.pop(name)) for name, value in joined.parameters.base_tensors())
    assert not kept


def test_a_slot_that_is_called_twice_is_in_one_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its matrix would be allocated, or copied in every call, for each."""

    class Twice(tiny.TinyBlock):
        def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
            y = self.k(x) + self.q(x) + self.k(x)
            return super().forward(x + self.q(y), tables)

    class Model(tiny.TinyModel):
        layers = Stack(Twice, Dim("num_hidden_layers"), "layers.{i}.")

    assembly = tiny.assembly(build=Model, lora=tiny.lora(targets=()))
    assembly = replace(assembly, settings=replace(assembly.settings, compiler="inductor"))
    document = tiny.documents((30,))[0]
    found = []
    for kept in (False, True):
        monkeypatch.setattr(weight_plan, "_stays_on_a_gpu", lambda assembly, kept=kept: kept)
        weights = Weights.load(assembly, tiny.random_source(std=0.05))
        assert names(weights) == ({(("k", "q"), ("gate", "up"))} if kept else {()})
        found += NativeEngine(weights, RolloutSettings(slots=1, context=32)).logprobs([document])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"device": torch.device("cuda")}, True),
        ({"device": torch.device("cpu")}, False),
        ({"device": torch.device("cuda"), "axes": Axes(shard=2, zero_level=3)}, False),
    ],
)
def test_which_frozen_weights_stay_on_a_gpu(settings: dict[str, Any], kept: bool) -> None:
    assembly = engine("fx", lora=tiny.lora(4)).plan.assembly
    changed = replace(assembly, settings=replace(assembly.settings, **settings))
    assert weight_plan._stays_on_a_gpu(changed) == kept
    assert not weight_plan._stays_on_a_gpu(replace(changed, offloader=surogate_offloader()))
    assert not weight_plan._stays_on_a_gpu(replace(changed, weight_format=SimpleNamespace()))


def test_what_a_join_has_handed_out_is_not_kept() -> None:
    """Launched one by one, layers would otherwise keep it until the collector comes by: gigabytes for long prompts."""
    shape = {"inputs": 8, "outputs": 8, "bias": False, "adapter": None, "region": "qkv"}
    slots = [LinearSlot(name=n, module=n, index=i, **shape) for i, n in enumerate("qkv")]
    weights = torch.randn(3, 8, 8).unbind()
    join = BoundJoin(Join(slots=tuple(slots)), torch.cat(weights), weights)
    x = torch.randn(5, 8)
    found = {slot.name: join.output(slot.name, x) for slot in slots}
    assert all(torch.allclose(found[n], x @ w.t(), atol=1e-5) for n, w in zip("qkv", weights, strict=True))
    assert torch.equal(join.output("k", x), found["k"])
    join.output("q", x), join.output("v", x)
    kept = weakref.ref(x)
    del x, found
    assert kept() is None
