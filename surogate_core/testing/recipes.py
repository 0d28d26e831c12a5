"""Checks of precision recipes: the product and its backward, training, resume."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from surogate_core.bundles import Recipe
from surogate_core.dsl.slots import TracedSlot
from surogate_core.testing import tiny
from surogate_core.testing.check import NotApplicable, ensure

BOUND = 0.25
"""Relative error of a product that four bits can still keep."""

SLOT = TracedSlot(
    name="q", module="self_attn.q_proj", inputs=64, outputs=32, bias=False, group="qkv", adapter=None, index=0
)


def _device(recipe: Recipe) -> torch.device:
    reason = recipe.unavailable(tiny.CPU)
    if reason is None:
        return tiny.CPU
    cuda = torch.device("cuda")
    if torch.cuda.is_available() and recipe.unavailable(cuda) is None:
        return cuda
    raise NotApplicable(reason)


def _products(recipe: Recipe, x: Tensor, weight: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    y = recipe.linear(leaves[0], leaves[1], SLOT, recipe.options())
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def multiplies(recipe: Recipe) -> None:
    """x Wᵀ and its gradients have the shapes and dtypes of theirs, few errors, and the same bits each time."""
    device = _device(recipe)
    generator = torch.Generator().manual_seed(0)
    x_NI, weight_OI = torch.randn(32, 64, generator=generator), torch.randn(32, 64, generator=generator)
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = x_NI.to(device, dtype), weight_OI.to(device, dtype)
        found, again = _products(recipe, x, weight), _products(recipe, x, weight)
        exact = _products(tiny.PLAIN, x.double(), weight.double())
        for name, a, b, c in zip(("y", "dx", "dW"), found, again, exact, strict=True):
            ensure(a.dtype == dtype, f"{name} is {a.dtype}, not {dtype}")
            ensure(torch.equal(a, b), f"{name} in {dtype}: the same product twice has other bits")
            error = tiny.relative_error(a, c)
            ensure(error <= BOUND, f"{name} in {dtype}: relative error {error:.3f} is above {BOUND}")
        if recipe.plain:
            ensure(torch.equal(found[0], x @ weight.t()), f"`plain` is true, but y in {dtype} is not x @ weight.t()")


def trains(recipe: Recipe) -> None:
    """On a tiny model, with and without adapters, the loss is finite and falls."""
    if _device(recipe) != tiny.CPU:
        raise NotApplicable("the kit's model trains on a CPU")
    for lora in (None, tiny.adapters()):
        losses = tiny.train(tiny.engine(recipe=recipe, lora=lora), 5, lr=0.1, same=True)
        ensure(all(map(math.isfinite, losses)) and losses[-1] < losses[0], f"the loss does not fall: {losses}")


def resumes(recipe: Recipe) -> None:
    """A resumed run has the bits of an uninterrupted one."""
    if _device(recipe) != tiny.CPU:
        raise NotApplicable("the kit's model trains on a CPU")
    tiny.ensure_resumes(lambda: tiny.engine(recipe=recipe))


CHECKS = (multiplies, trains, resumes)
