"""The products of experts against the values of their rounded operands."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from surogate_recipe_nvfp4 import NVFP4Options, surogate_recipe
from surogate_recipe_nvfp4.experts import unpack
from surogate_recipe_nvfp4.gemm import NVFP4
from torch import Tensor

from surogate_core.plugin import MachineError, nvfp4
from surogate_core.service.kernels import masked_factors, masked_product
from surogate_testing import tiny
from surogate_testing.recipes import EXPERTS, built

RECIPE = NVFP4(native=False, four_over_six=True, stochastic=True, note="")
LOADS = (5, 0, 40, 1)
ENDS = torch.tensor(LOADS).cumsum(0).int()
ROWS = sum(LOADS)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights() -> list[Tensor]:
    """Experts of very different sizes, and sides that are not multiples of 16."""
    sizes = torch.tensor([1.0, 1e-3, 100.0, 1e-6])[:, None, None]
    return [normal(4, outputs, 40, seed=1) * sizes for outputs in (24, 56)]


SLOTS = [replace(slot, inputs=40, outputs=n) for slot, n in zip(EXPERTS, (24, 56), strict=True)]


def rounded(x: Tensor, *, square: bool) -> Tensor:
    found = nvfp4.quantise(x, square=square, four_over_six=True)
    return (found.blocks(*x.shape) * found.decode).double()


@pytest.mark.parametrize("packed", [False, True], ids=["trained", "packed"])
def test_products_are_of_the_rounded_operands(packed: bool) -> None:
    """y and dx of both projections, each expert's weight by its own tensor scale; dW of operands that are not rounded.
    Without a seed gradients round to nearest.
    """
    slots = [replace(slot, packed=packed) for slot in SLOTS]
    x = normal(ROWS, 40, seed=0).requires_grad_()
    dys = [normal(ROWS, s.outputs, seed=2) * 1e-6 for s in slots]
    kept = [
        RECIPE.pack_experts(w, s) if packed else w.clone().requires_grad_()
        for w, s in zip(weights(), slots, strict=True)
    ]
    ys = RECIPE.grouped(x, kept, ENDS, slots)
    found = torch.autograd.grad(list(ys), [x] if packed else [x, *kept], dys)
    dx = torch.zeros(ROWS, 40, dtype=torch.float64)
    for number, (y, w, dy) in enumerate(zip(ys, weights(), dys, strict=True)):
        wide = torch.stack([rounded(expert, square=True) for expert in w])
        assert tiny.relative_error(y, masked_product(rounded(x.detach(), square=False), wide, ENDS)) < 1e-6
        dx += masked_product(rounded(dy, square=False), wide.transpose(1, 2), ENDS)
        if not packed:
            exact = masked_factors(dy.double(), x.detach().double(), ENDS)
            assert tiny.relative_error(found[1 + number], exact) < 1e-6
    assert tiny.relative_error(found[0], dx) < 1e-6


def test_gradients_round_stochastically_by_the_seed() -> None:
    def dx(seed: int) -> Tensor:
        slots = [replace(s, seed=torch.tensor(seed, dtype=torch.int32)) for s in SLOTS]
        x = normal(ROWS, 40, seed=0).requires_grad_()
        ys = RECIPE.grouped(x, weights(), ENDS, slots)
        return torch.autograd.grad(list(ys), x, [normal(ROWS, s.outputs, seed=2) for s in slots])[0]

    assert torch.equal(dx(1), dx(1))
    assert not torch.equal(dx(1), dx(2))


def test_packed_experts_have_the_codes_of_each_alone() -> None:
    for w, slot in zip(weights(), SLOTS, strict=True):
        packed = RECIPE.pack_experts(w, slot)
        found = unpack(packed, slot.outputs, slot.inputs)
        for number, expert in enumerate(w):
            alone = nvfp4.quantise(expert, square=True, four_over_six=True)
            assert torch.equal(found.codes[number], alone.codes)
            assert torch.equal(found.scales[number].view(torch.uint8), alone.scales.view(torch.uint8))
            assert torch.equal(found.decode[number], alone.decode)
        together = nvfp4.quantise(w, square=True, four_over_six=True)
        assert torch.equal(together.codes, found.codes)
        assert torch.equal(together.decode, found.decode)


def test_scales_of_frozen_experts_can_be_searched() -> None:
    recipe = built(surogate_recipe(), torch.device("cpu"), NVFP4Options(search_scales=True))
    w, slot = weights()[0], SLOTS[0]
    found = unpack(recipe.pack_experts(w, slot), slot.outputs, slot.inputs)
    alone = nvfp4.quantise(w[1], square=True, four_over_six=True, search=True)
    assert torch.equal(found.codes[1], alone.codes)
    assert not torch.equal(alone.codes, nvfp4.quantise(w[1], square=True, four_over_six=True).codes)


def test_experts_are_rounded_as_they_are_packed() -> None:
    """What adapters that start from rounding errors rely on."""
    options = NVFP4Options(frozen_blocks="1x16", search_scales=True)
    recipe = built(surogate_recipe(), torch.device("cpu"), options)
    w, slot = weights()[0], SLOTS[0]
    packed = unpack(recipe.pack_experts(w, slot), slot.outputs, slot.inputs)
    kept = packed.blocks(slot.outputs, slot.inputs) * packed.decode[:, None, None]
    assert recipe.rounded_experts is not None
    assert torch.equal(recipe.rounded_experts(w, "weight")[0], kept)


def test_emulation_may_be_refused() -> None:
    never = NVFP4.of(NVFP4Options(emulate="never"), torch.device("cuda"), None)
    assert "EMULATED NVFP4 (there is no product of experts" in never.note_of_experts
    with pytest.raises(
        MachineError, match=r"recipe\.emulate=never: products of experts.*Fix: set recipe\.emulate=auto"
    ):
        never.grouped(normal(ROWS, 40, seed=0), weights(), ENDS, SLOTS)
