"""Panels under fp8-hybrid: the op's reference is the recipe's own product, and an engine trains alike with both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from surogate_recipe_fp8 import FP8Options
from surogate_recipe_fp8.gemm import FP8Hybrid
from surogate_recipe_fp8.panels import ScaledPanels
from torch import Tensor

from surogate_core.plugin import bundles, compute, dsl, ops
from surogate_core.plugin import fp8 as scaled
from surogate_core.service.engine import Engine, pieces, plain_layers, plan_panels
from surogate_core.service.kernels import TORCH_PACK
from surogate_core.service.model import Panel, Signature
from surogate_testing import tiny

RECIPE = FP8Hybrid.of(FP8Options(amax_history=3), "no FP8")
# What a device that multiplies FP8 would say; the products of this one are the reference's.
NATIVE = FP8Hybrid(native=False, margin=0, history=3, note="")
NATIVE.panel_op = ScaledPanels(0)
SHAPE = compute.PanelShape(inputs=256, outputs=(512, 256), rank=16, scale=2.0, dropout=0.25, salts=(3, 5), frozen=False)
CONFIG = {
    **tiny.CONFIG,
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 2,
}
TABLES = {"cu_seqlens": Signature((8,), torch.int32, torch.device("cpu"))}


def kernels() -> Iterable[bundles.Kernel]:
    function = compute.references["scaled_linears"].function
    return [bundles.Kernel(op="scaled_linears", name="panels", function=function, supports=lambda device, dtype: True)]


PACK = bundles.KernelPack(name="panels", kernels=kernels)


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def test_a_tile_is_in_the_order_of_its_description() -> None:
    matrix = torch.arange(256 * 384, dtype=torch.int32).view(256, 384)
    flat = scaled.tiled(matrix)
    for row, column in ((0, 0), (1, 0), (127, 127), (128, 5), (200, 300), (255, 383)):
        tile = (row // 128) * 3 + column // 128
        chunk = (column % 128 // 16) ^ (row % 8)
        assert flat[tile * 16384 + row % 128 * 128 + chunk * 16 + column % 16] == matrix[row, column]
    assert torch.equal(scaled.untiled(flat, 256, 384), matrix)


@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_a_panel_is_the_recipes_products_and_the_adapters(delayed: bool, dropout: float) -> None:
    """The same outputs, gradients and observations as slot by slot, in fp32."""
    shape = replace(SHAPE, dropout=dropout)
    x, seed = random(256, 256, seed=0), torch.tensor([11, 500], dtype=torch.int32)
    weights = [random(o, 256, seed=2 + i, scale=0.1 + i) for i, o in enumerate(shape.outputs)]
    rows = [torch.tensor([90.0, 0.0, 2e5 * 10**i]) * delayed for i in range(2)]
    adapters = [random(*s, seed=20 + i, scale=0.1) for i, o in enumerate(shape.outputs) for s in ((16, 256), (o, 16))]
    dys = [random(256, o, seed=30 + i, scale=10.0 ** (-2 * i)) for i, o in enumerate(shape.outputs)]

    def by_panel(x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        panel = shape.allocate(x.device, x.dtype)
        shape.load(panel, list(zip(adapters[::2], adapters[1::2], strict=True)))
        packed = [scaled.pack(w, 0) for w in weights]
        return tuple(scaled.scaled_linears(x, panel, seed, shape, 0, packed, tensors[:2], *tensors[2:]))

    def by_slot(x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        found = []
        for number, outputs in enumerate(shape.outputs):
            slot = dsl.LinearSlot(
                name="a", module="a", inputs=256, outputs=outputs, bias=False, region="qkv", adapter=None, index=number
            )
            traced = dsl.TracedSlot.of(slot, seed=None, row=tensors[number], packed=True)
            y = RECIPE.linear(x, RECIPE.pack(weights[number], slot), traced)
            a, b = tensors[2 + 2 * number : 4 + 2 * number]
            dropped = ops.dropout(x, seed, salt=shape.salts[number], p=dropout) if dropout else x
            found.append(y + shape.scale * (dropped @ a.t() @ b.t()))
        return tuple(found)

    results = []
    for function in (by_panel, by_slot):
        leaves = [t.clone().requires_grad_() for t in (x, *rows, *adapters)]
        outputs = function(*leaves)
        results.append([*outputs, *torch.autograd.grad(outputs, leaves, dys)])
    for number, (found, expected) in enumerate(zip(*results, strict=True)):
        if 3 <= number < 5:
            assert torch.equal(found, expected)
        else:
            assert tiny.relative_error(found, expected) < 1e-5, number


@cache
def engine(panels: bool) -> Engine:
    return tiny.engine(
        CONFIG,
        tokens=128,
        optimizer=tiny.ADAMW,
        lora=tiny.lora(16),
        packs=[TORCH_PACK, PACK] if panels else [TORCH_PACK],
        recipe=NATIVE,
    )


def batches(step: int) -> list[Any]:
    return [tiny.batch(tiny.documents([50, 60], seed=2 * step + i), tokens=128) for i in range(2)]


@pytest.mark.slow
def test_an_engine_plans_packs_and_trains_with_panels() -> None:
    engine.cache_clear()
    found, expected = engine(True), engine(False)
    assert not expected.parameters.panels
    names = {tuple(tuple(s.name for s in p.slots) for p in panels) for panels in found.parameters.panels.values()}
    assert names == {(("q", "k", "v"), ("o",), ("gate", "up"), ("down",))}
    one = tiny.gradients(found, batches(0), step=0), tiny.gradients(expected, batches(0), step=0)
    assert all(tiny.relative_error(one[0][name], value) < 1e-3 for name, value in one[1].items() if value.any())
    losses = [[e.train_step(batches(0), step=0, lr=1e-3).read()[0]] for e in (found, expected)]
    # A code that rounds the other way moves what comes behind it, the more the longer the training.
    states = [e.recipe_state.rows for e in (found, expected) if e.recipe_state is not None]
    torch.testing.assert_close(states[0], states[1], rtol=0.02, atol=0)
    for e, of_steps in zip((found, expected), losses, strict=True):
        of_steps += [e.train_step(batches(step), step=step, lr=1e-3).read()[0] for step in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert found.evaluate(batches(0))[0] == pytest.approx(expected.evaluate(batches(0))[0], rel=1e-3)


def test_the_adapters_of_a_panel_are_loaded_after_each_step() -> None:
    made = engine(True)
    made.train_step(batches(0), step=0, lr=1e-2)
    masters = made.parameters.masters()
    for piece in made.plan.layers:
        for panel, tensor in made.parameters.panel_tensors(piece):
            a, a_t, b = panel.shape.parts(tensor)
            assert torch.equal(a_t, a.t())
            for number, slot in enumerate(panel.slots):
                prefix = next(s.hf_name for s in piece.specs if s.name == f"{slot.name}.weight").removesuffix(".weight")
                own_a, own_b = panel.shape.adapter(tensor, number)
                assert torch.equal(own_a, masters[f"{prefix}.lora_A.weight"])
                assert torch.equal(own_b, 2 * masters[f"{prefix}.lora_B.weight"])
                own_b.zero_()
            assert not b.any()
    made.parameters.refresh()


def planned(config: dict[str, Any], first: int) -> dict[str, tuple[Panel, ...]]:
    lora, packs = tiny.lora(16), [TORCH_PACK, PACK]
    found = pieces(tiny.TinyModel(config), lora=lora, max_seqlen=128)
    made = tiny.assembly(config, recipe=NATIVE, lora=lora, packs=packs, tokens=128, plain_first=first)
    return plan_panels(made, found, plain=plain_layers(found, first=first, last=0), tables=TABLES)


def test_layers_left_alone_and_sizes_without_tiles_have_no_such_panels() -> None:
    two = {**CONFIG, "num_hidden_layers": 2}
    assert list(planned(two, 0)) == ["layer 0", "layer 1"]
    assert list(planned(two, 1)) == ["layer 1"]
    narrow = planned({**CONFIG, "intermediate_size": 384}, 0)["layer 0"]
    assert [tuple(s.name for s in panel.slots) for panel in narrow] == [("q", "k", "v"), ("o",)]
