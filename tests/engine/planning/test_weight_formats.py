"""Weights in a weight format: unpacked into room that the layers share, with panels and without."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from gpu_packs import triton_packs
from panel_pack import PACK
from surogate_offload_host import surogate_offloader
from tiny_qwen3 import make_engine, strict_offloader, tiny_config
from torch import Tensor

from surogate_core.bundles import KernelPack, WeightFormat
from surogate_core.dsl.declare import TensorSpec
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.engine import Engine
from surogate_core.engine.planning.prediction import predict
from surogate_core.kernels.torch_pack import TORCH_PACK
from surogate_testing import tiny
from surogate_testing.weight_formats import built

CONFIG = tiny_config(vocab_size=64, num_hidden_layers=3)
BATCHES = [tiny.batch(tiny.documents([9, 14], seed=s)) for s in range(2)]
PACKS = {"plain": [TORCH_PACK], "panels": [TORCH_PACK, PACK]}


class Half(WeightFormat):
    """Weights in bf16."""

    name = "half"

    def nbytes(self, outputs: int, inputs: int) -> int:
        return 2 * outputs * inputs

    def pack(self, weight_OI: Tensor) -> Tensor:
        return weight_OI.bfloat16().view(torch.uint8).flatten()

    def unpack(self, packed: Tensor, room_OI: Tensor) -> None:
        room_OI.copy_(packed.view(torch.bfloat16).view(room_OI.shape))


HALF = Half()


def rounded(spec: TensorSpec) -> Tensor:
    value = tiny.random_source()(spec)
    return value.bfloat16().float() if spec.role == "weight" else value


def engine(packs: list[KernelPack], *, rank: int = 16, **settings: Any) -> Engine:
    return make_engine(CONFIG, packs=packs, lora=tiny.lora(rank, dropout=0.1), **settings)


def weight_format(name: str) -> WeightFormat:
    return built(import_module(f"surogate_quant_{name}").surogate_weight_format())


def train(made: Engine) -> list[tuple[float, float]]:
    return [made.train_step(BATCHES, step=step, lr=1e-2).read() for step in range(3)]


@pytest.mark.slow_cases("panels-False", "plain-False", "panels-True")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("packs", PACKS.values(), ids=PACKS)
def test_training_is_that_on_rounded_weights_bit_for_bit(packs: list[KernelPack], recompute: bool) -> None:
    policy = Recompute(block=recompute)
    made = engine(packs, weight_format=HALF, recompute=policy)
    plain = engine(packs, source=rounded, recompute=policy)
    assert train(made) == train(plain)
    for name, master in plain.parameters.masters().items():
        assert torch.equal(made.parameters.masters()[name], master), name
    assert made.evaluate(BATCHES) == plain.evaluate(BATCHES)
    exported = dict(made.parameters.base_tensors())
    for name, value in plain.parameters.base_tensors():
        assert torch.equal(exported[name], value), name


@pytest.mark.slow_cases("plain")
@pytest.mark.parametrize("packs", PACKS.values(), ids=PACKS)
def test_weights_that_are_left_out_stay_as_they_are(packs: list[KernelPack]) -> None:
    def skips(name: str) -> bool:
        return name.startswith("model.layers.1.mlp.")

    made = engine(packs, weight_format=HALF, skips=skips)
    plain = engine(packs, source=lambda spec: (tiny.random_source() if skips(spec.hf_name) else rounded)(spec))
    assert train(made) == train(plain)
    exported = dict(made.parameters.base_tensors())
    for name, value in plain.parameters.base_tensors():
        assert torch.equal(exported[name], value), name


@pytest.mark.parametrize("packs", PACKS.values(), ids=PACKS)
def test_one_layer_is_unpacked_at_a_time(packs: list[KernelPack]) -> None:
    made = engine(packs, weight_format=HALF)
    weights = [spec for spec in made.plan.layer("layer 0").specs if spec.role == "weight"]
    rooms = {id(room) for room in made.parameters.shared}
    count = {"plain": len(weights), "panels": 4}["panels" if made.parameters.panels else "plain"]
    assert len(rooms) == len(made.parameters.shared) == count
    kept = [
        t for key in made.plan.by_key for t in made.stores.weights.fetch(key) if t.dim() == 1 and t.dtype == torch.uint8
    ]
    assert len(kept) == 3 * len(weights)
    layers = [[t.data_ptr() for t in made.parameters.inputs(piece)] for piece in made.plan.layers]
    for spec, *addresses in zip(made.plan.layer("layer 0").specs, *layers, strict=True):
        assert (len(set(addresses)) == 1) == (spec.role == "weight"), spec.name


@pytest.mark.slow_cases("plain")
@pytest.mark.parametrize("packs", PACKS.values(), ids=PACKS)
def test_packed_weights_may_be_offloaded(packs: list[KernelPack]) -> None:
    offloader, _ = strict_offloader()
    made = engine(packs, weight_format=HALF, offloader=offloader)
    plain = engine(packs, weight_format=HALF)
    assert made.parameters.panels == plain.parameters.panels
    assert train(made) == train(plain)


def test_a_weight_that_is_left_out_may_be_offloaded_too() -> None:
    def skips(name: str) -> bool:
        return name == "model.layers.1.mlp.up_proj.weight"

    offloader, _ = strict_offloader()
    losses = train(engine(PACKS["panels"], weight_format=HALF, offloader=offloader, skips=skips))
    expected = train(engine(PACKS["panels"], weight_format=HALF, skips=skips))
    # Its projection may be multiplied alone there, and rounded otherwise.
    for (loss, _), (wanted, _) in zip(losses, expected, strict=True):
        assert loss == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow_cases("fp8", "nvfp4")
@pytest.mark.parametrize("name", ["nf4", "fp8", "nvfp4"])
def test_no_bit_depends_on_where_a_weight_in_a_format_rests(name: str) -> None:
    made = [
        engine(PACKS["plain"], weight_format=weight_format(name), recompute=Recompute(block=True), **more)
        for more in ({}, {"offloader": replace(surogate_offloader(), kinds=frozenset({"weights", "residuals"}))})
    ]
    assert train(made[0]) == train(made[1])
    for piece in made[1].plan.layers:
        stored = [s for s in piece.specs if not s.trainable]
        kept = [t.nbytes for t in made[1].stores.weights.fetch(piece.key)]
        assert kept == [made[1].parameters.kept_bytes(s) for s in stored]
        made[1].stores.weights.release(piece.key)
    assert made[1].stores.weights.nbytes()["device"] == 0


@pytest.mark.slow_cases("plain")
@pytest.mark.parametrize("packs", PACKS.values(), ids=PACKS)
def test_the_plan_counts_what_is_kept_and_the_room(packs: list[KernelPack]) -> None:
    made = engine(packs, weight_format=HALF)
    prediction = predict(made.assembly)
    held = {h.kind: h.nbytes for h in prediction.held}
    tensors = {t.data_ptr(): t for piece in made.parameters.pieces for t in made.stores.weights.fetch(piece.key)}
    assert held["weights"] == sum(t.nbytes for t in tensors.values())
    assert held["unpacked weights"] == sum(t.nbytes for t in made.parameters.shared)
    assert held.get("panels", 0) == made.parameters.edge_bytes()
    assert bool(made.parameters.edge_bytes()) == bool(made.parameters.panels)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["nf4", "fp8", "nvfp4"])
def test_on_a_gpu_too_with_panels_and_graphs(name: str, recompute: bool) -> None:
    from surogate_testing.weight_formats import rounded as rounded_by

    found = weight_format(name)
    config = tiny_config(hidden_size=128, intermediate_size=256, num_hidden_layers=3, vocab_size=512, head_dim=64)

    def source(spec: TensorSpec) -> Tensor:
        return tiny.random_source(std=0.05, device="cuda")(spec).bfloat16()

    def make(**more: Any) -> Engine:
        return make_engine(
            config,
            device="cuda",
            tokens=256,
            lora=tiny.lora(16),
            packs=triton_packs(),
            compiler="inductor",
            dtype=torch.bfloat16,
            cuda_graphs=True,
            recompute=Recompute(block=recompute),
            **more,
        )

    batches = [tiny.batch(tiny.documents([100, 90, 40], seed=s), tokens=256) for s in range(2)]
    host = replace(surogate_offloader(), kinds=frozenset({"weights", "residuals"}))
    runs = (
        make(weight_format=found, source=source),
        make(source=rounded_by(found, source)),
        make(weight_format=found, source=source, offloader=host),
    )
    assert runs[0].parameters.panels == runs[2].parameters.panels != {}
    losses = [[run.train_step(batches, step=step, lr=1e-2).read() for step in range(4)] for run in runs]
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][-1][0] < losses[0][0][0]
