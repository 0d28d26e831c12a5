"""Experts in a weight format: packed one by one, unpacked into a workspace that the layers share."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from gpu_packs import triton_packs
from mixture import CONFIG, Mixture
from surogate_offload_host import surogate_offloader
from torch import Tensor

from surogate_core.bundles import RecipeContext, WeightFormat
from surogate_core.dsl.declare import TensorSpec
from surogate_core.dsl.experts import EXPERT
from surogate_core.engine.engine import Engine
from surogate_core.engine.planning.pieces import Kept, OneByOne
from surogate_core.engine.planning.prediction import TensorBytes, predict
from surogate_testing import tiny
from surogate_testing.weight_formats import built, rounded

LAYERS = {**CONFIG, "num_hidden_layers": 3}
EVERY = pytest.mark.parametrize("name", ["nf4", "fp8", "nvfp4"])


def weight_format(name: str) -> WeightFormat:
    return built(import_module(f"surogate_quant_{name}").surogate_weight_format())


def engine(**changes: Any) -> Engine:
    return tiny.engine(LAYERS, build=Mixture, lora=tiny.lora(dropout=0.1), optimizer=tiny.ADAMW, **changes)


def experts(made: Engine) -> list[tuple[TensorSpec, Tensor]]:
    """The frozen weights of experts as they are kept."""
    found = []
    for piece in made.plan.layers:
        stored = [s for s in piece.specs if s.hf_name not in made.parameters.flat.compute]
        kept = made.stores.weights.fetch(piece.key)
        found += [(s, t) for s, t in zip(stored, kept, strict=True) if EXPERT in s.hf_name]
        made.stores.weights.release(piece.key)
    return found


@pytest.mark.slow_cases("False-fp8", "True-fp8", "True-nf4", "False-nvfp4")
@EVERY
@pytest.mark.parametrize("recompute", [False, True])
def test_training_is_that_on_rounded_experts_bit_for_bit(recompute: bool, name: str) -> None:
    found = weight_format(name)
    made = engine(weight_format=found, recompute=recompute)
    plain = engine(source=rounded(found, tiny.random_source()), recompute=recompute)
    assert tiny.train(made, 3) == tiny.train(plain, 3)
    tiny.ensure_same_bits(tiny.snapshot(made), tiny.snapshot(plain), "with packed experts")
    exported = dict(made.parameters.base_tensors())
    assert "layers.1.experts.5.down_proj.weight" in exported
    tiny.ensure_same_bits(exported, dict(plain.parameters.base_tensors()), "exported")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_a_recipe_that_rounds_products_rounds_the_unpacked_experts(recipe: str) -> None:
    spec = import_module(f"surogate_recipe_{recipe}").surogate_recipe()
    found = weight_format("nf4")
    wide = {**LAYERS, "hidden_size": 64, "intermediate_size": 32}

    def losses(**changes: Any) -> list[float]:
        rounding = spec.build(spec.options(), RecipeContext(device=torch.device("cpu"), dtype="fp32"))
        made = tiny.engine(wide, build=Mixture, lora=tiny.lora(), recipe=rounding, **changes)
        return tiny.train(made, 2)

    assert losses(weight_format=found) == losses(source=rounded(found, tiny.random_source()))


@pytest.mark.slow_cases("nvfp4")
@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_codes_that_a_recipe_makes_of_unpacked_experts_are_not_kept_for_the_backward(recipe: str) -> None:
    """They would be half as large as the unpacked weights, in every layer."""
    spec = import_module(f"surogate_recipe_{recipe}").surogate_recipe()

    def kept(**changes: Any) -> list[int]:
        rounding = spec.build(spec.options(), RecipeContext(device=torch.device("cpu"), dtype="fp32"))
        made = tiny.assembly(LAYERS, build=Mixture, lora=tiny.lora(), recipe=rounding, compiler="inductor", **changes)
        return list(TensorBytes.of(made).residuals)

    codes = LAYERS["num_experts"] * LAYERS["hidden_size"] * LAYERS["intermediate_size"]
    _, *unpacked = kept(weight_format=weight_format("nf4"))
    _, *packed = kept()
    assert abs(unpacked[0] - packed[0]) < codes / 2, (unpacked, packed)


@pytest.mark.slow_cases("nf4", "nvfp4")
@EVERY
def test_each_expert_has_the_bits_that_its_matrix_has_alone(name: str) -> None:
    found = weight_format(name)
    made = engine(weight_format=found)
    for spec, kept in experts(made):
        values = tiny.random_source()(spec)
        assert isinstance(values, Tensor)
        assert kept.shape[0] == CONFIG["num_experts"]
        for row, weight in zip(kept, values, strict=True):
            alone = found.pack(weight)
            assert torch.equal(row[: len(alone)], alone)
            assert not row[len(alone) :].any()
            assert len(row) - len(alone) < 16


def test_the_router_and_what_is_left_out_stay_as_they_are() -> None:
    def skips(name: str) -> bool:
        return name == "layers.1.experts.4.up_proj.weight"

    made = engine(weight_format=weight_format("nf4"), skips=skips)
    kept = {spec.hf_name: tensor for spec, tensor in experts(made)}
    assert kept["layers.1.experts.{e}.up_proj.weight"].dtype == torch.float32
    assert kept["layers.1.experts.{e}.down_proj.weight"].dtype == torch.uint8
    assert kept["layers.2.experts.{e}.up_proj.weight"].dtype == torch.uint8
    exported = dict(made.parameters.base_tensors())
    plain = dict(engine().parameters.base_tensors())
    same = {name for name, value in exported.items() if torch.equal(value, plain[name])}
    assert {f"layers.1.experts.{e}.up_proj.weight" for e in range(6)} | {"layers.1.router.weight"} <= same
    assert "layers.1.experts.4.down_proj.weight" not in same


def test_one_expert_at_a_time_is_in_full_precision() -> None:
    alive: list[weakref.ref[Tensor]] = []
    found = weight_format("nf4")

    def source(spec: TensorSpec) -> Tensor | OneByOne:
        whole = tiny.random_source()(spec)
        assert isinstance(whole, Tensor)
        if EXPERT not in spec.hf_name or spec.role != "weight":
            return whole

        def read(number: int) -> Tensor | Kept:
            assert not any(ref() is not None for ref in alive), "the expert before is still in memory"
            value = whole[number].clone()
            alive.append(weakref.ref(value))
            return Kept(found.pack(value)) if number % 2 else value

        return OneByOne(read)

    made, plain = engine(weight_format=found, source=source), engine(weight_format=found)
    assert len(alive) == 2 * 3 * CONFIG["num_experts"]
    for (spec, kept), (_, expected) in zip(experts(made), experts(plain), strict=True):
        assert torch.equal(kept, expected), spec.hf_name


def test_an_expert_of_another_size_is_refused() -> None:
    """A shorter one would leave zeros behind it."""
    found = weight_format("nf4")

    def source(spec: TensorSpec) -> Tensor | OneByOne:
        whole = tiny.random_source()(spec)
        assert isinstance(whole, Tensor)
        if EXPERT not in spec.hf_name or spec.role != "weight":
            return whole
        return OneByOne(lambda number: Kept(found.pack(whole[number])[: -1 if number == 3 else None]))

    with pytest.raises(AssertionError, match=r"proj\.weight: an expert has torch\.Size"):
        engine(weight_format=found, source=source)


def test_the_plan_counts_experts_as_they_are_kept_and_one_layers_workspace() -> None:
    made = engine(weight_format=weight_format("nf4"))
    held = {h.kind: h.nbytes for h in predict(made.assembly).held}
    tensors = {t.data_ptr(): t for piece in made.parameters.pieces for t in made.stores.weights.fetch(piece.key)}
    assert held["weights"] == sum(t.nbytes for t in tensors.values())
    assert held["unpacked weights"] == sum(t.nbytes for t in made.parameters.shared)
    shapes = [tuple(t.shape) for t in made.parameters.shared]
    assert sorted(s for s in shapes if len(s) == 3) == [(6, 24, 32), (6, 24, 32), (6, 32, 24)]


HOST = surogate_offloader()
MOVES: Mapping[str, dict[str, Any]] = {
    "all weights": {"offloader": replace(HOST, kinds=frozenset({"weights", "residuals"}))},
    "experts": {"offloader": replace(HOST, kinds=frozenset()), "offload_experts": True},
    "experts that are not packed": {
        "offloader": replace(HOST, kinds=frozenset()),
        "offload_experts": True,
        "weight_format": None,
    },
}


@pytest.mark.slow_cases("all weights", "experts that are not packed")
@pytest.mark.parametrize("moved", MOVES)
def test_experts_may_be_offloaded(moved: str) -> None:
    changes = {"weight_format": weight_format("nvfp4"), **MOVES[moved]}
    here, there = engine(weight_format=changes["weight_format"]), engine(**changes)
    assert tiny.train(here, 2) == tiny.train(there, 2)
    tiny.ensure_same_bits(dict(there.parameters.base_tensors()), dict(here.parameters.base_tensors()), moved)
    held = {h.kind: h for h in predict(there.assembly).held}
    if moved == "all weights":
        assert there.stores.weights.nbytes()["device"] == 0
        return
    kept = sum(tensor.nbytes for _, tensor in experts(here))
    assert (held["experts"].place, held["experts"].nbytes) == ("host", kept)
    before = {h.kind: h.nbytes for h in predict(here.assembly).held}
    assert held["weights"].nbytes == before["weights"] - kept
    assert held["weights in use"].nbytes == kept  # the experts of two layers
    rest = there.stores.weights.nbytes()["device"]
    assert rest == here.stores.weights.nbytes()["device"] - kept


@pytest.mark.slow
@EVERY
def test_a_training_over_packed_experts_resumes(name: str) -> None:
    tiny.ensure_resumes(lambda: engine(weight_format=weight_format(name)))


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
@EVERY
def test_on_a_gpu_too_with_graphs_and_offloaded(name: str, recompute: bool) -> None:
    found = weight_format(name)
    config = {**LAYERS, "hidden_size": 128, "intermediate_size": 64, "vocab_size": 512}

    def source(spec: TensorSpec) -> Tensor:
        value = tiny.random_source(std=0.05, device="cuda")(spec)
        assert isinstance(value, Tensor)
        return value.bfloat16()

    def make(**more: Any) -> Engine:
        return tiny.engine(
            config,
            build=Mixture,
            device="cuda",
            tokens=256,
            lora=tiny.lora(16),
            optimizer=tiny.ADAMW,
            packs=triton_packs(),
            compiler="inductor",
            dtype=torch.bfloat16,
            cuda_graphs=True,
            recompute=recompute,
            **more,
        )

    runs = (
        make(weight_format=found, source=source),
        make(source=rounded(found, source)),
        make(weight_format=found, source=source, offloader=replace(HOST, kinds=frozenset()), offload_experts=True),
    )
    batches = [tiny.batch(tiny.documents([100, 90, 40], seed=s), tokens=256) for s in range(2)]
    losses = [[run.train_step(batches, step=step, lr=1e-2).read() for step in range(4)] for run in runs]
    assert losses[0] == losses[1] == losses[2]
    assert losses[0][-1][0] < losses[0][0][0]
    assert runs[2].stores.weights.nbytes()["host"] == sum(t.nbytes for _, t in experts(runs[0]))
