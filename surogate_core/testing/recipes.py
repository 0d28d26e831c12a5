"""Checks of precision recipes: the product and its backward, packed weights, state, training, resume."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from surogate_core.bundles import Recipe, RecipeSettings
from surogate_core.dsl.slots import TracedSlot
from surogate_core.errors import MachineError
from surogate_core.testing import tiny
from surogate_core.testing.check import NotApplicable, ensure

BOUND = 0.25
"""Relative error of a product that four bits can still keep."""

SLOT = TracedSlot(
    name="q", module="self_attn.q_proj", inputs=64, outputs=32, bias=False, group="qkv", adapter=None, index=0
)


def _on_devices(recipe: Recipe) -> list[tuple[torch.device, Any]]:
    """The devices of this machine that run the recipe, natively or emulated, with the options made ready for each."""
    found, reason = [], ""
    for device in (tiny.CPU, *([torch.device("cuda")] if torch.cuda.is_available() else [])):
        try:
            found.append((device, recipe.prepare(recipe.options(), RecipeSettings(), device)))
        except MachineError as error:
            reason = reason or str(error)
    if not found:
        raise NotApplicable(reason)
    return found


def _on_cpu(recipe: Recipe) -> Any:
    device, prepared = _on_devices(recipe)[0]
    if device != tiny.CPU:
        raise NotApplicable("the kit's model trains on a CPU")
    return prepared


def _slot(recipe: Recipe, device: torch.device, prepared: Any, *, packed: bool = False) -> TracedSlot:
    """The slot in a micro-step, with a row of its own where the recipe has state."""
    state = recipe.state(1, device, prepared) if recipe.state is not None else None
    row = state.rows[0].clone().requires_grad_() if state is not None else None
    return replace(SLOT, seed=torch.tensor(5, dtype=torch.int32, device=device), row=row, packed=packed)


def _products(recipe: Recipe, x: Tensor, weight: Tensor, prepared: Any) -> list[Tensor]:
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    y = recipe.linear(leaves[0], leaves[1], _slot(recipe, x.device, prepared), prepared)
    return [y.detach(), *torch.autograd.grad(y, leaves, _upstream(y))]


def _upstream(y: Tensor) -> Tensor:
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y)


def _operands() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(32, 64, generator=generator), torch.randn(32, 64, generator=generator)


def multiplies(recipe: Recipe) -> None:
    """x Wᵀ and its gradients have the shapes and dtypes of theirs, few errors, and the same bits each time."""
    for device, prepared in _on_devices(recipe):
        x_NI, weight_OI = _operands()
        for dtype in (torch.float32, torch.bfloat16):
            x, weight = x_NI.to(device, dtype), weight_OI.to(device, dtype)
            found, again = _products(recipe, x, weight, prepared), _products(recipe, x, weight, prepared)
            exact = _products(tiny.PLAIN, x.double(), weight.double(), tiny.PLAIN.options())
            for name, a, b, c in zip(("y", "dx", "dW"), found, again, exact, strict=True):
                ensure(a.dtype == dtype, f"{name} is {a.dtype}, not {dtype}")
                ensure(torch.equal(a, b), f"{name} in {dtype}: the same product twice has other bits")
                error = tiny.relative_error(a, c)
                ensure(error <= BOUND, f"{name} in {dtype}: relative error {error:.3f} is above {BOUND}")
            if recipe.plain:
                ensure(
                    torch.equal(found[0], x @ weight.t()), f"`plain` is true, but y in {dtype} is not x @ weight.t()"
                )


def multiplies_packed_weights(recipe: Recipe) -> None:
    """With a frozen weight as `pack` has made it: the same product and dx as with the weight, in fp32 to 1e-5."""
    if recipe.pack is None:
        raise NotApplicable("the recipe packs no weights")
    for device, prepared in _on_devices(recipe):
        x, weight = (t.to(device) for t in _operands())
        found = []
        packed = recipe.pack(weight, SLOT, prepared)
        for tensor, is_packed in ((weight, False), (packed, True)):
            leaf = x.clone().requires_grad_()
            y = recipe.linear(leaf, tensor, _slot(recipe, device, prepared, packed=is_packed), prepared)
            found.append((y.detach(), *torch.autograd.grad(y, [leaf], _upstream(y))))
        for name, a, b in zip(("y", "dx"), *found, strict=True):
            error = tiny.relative_error(b, a)
            ensure(error <= 1e-5, f"{name} with the packed weight: relative error {error:.1e} to the weight itself")


def keeps_its_state(recipe: Recipe) -> None:
    """Its rows take in what slots observe, in place; a step that is skipped changes no bit; state goes into another."""
    if recipe.state is None:
        raise NotApplicable("the recipe has no state")
    for device, prepared in _on_devices(recipe):
        state, other = (recipe.state(2, device, prepared) for _ in range(2))
        rows = state.rows
        ensure(rows.ndim == 2 and len(rows) == 2 and rows.dtype == torch.float32, "`rows` is no fp32 tensor [P, K]")
        observed = torch.rand(rows.shape, generator=torch.Generator().manual_seed(3)).to(device) + 0.5
        for skip in (1.0, 0.0):
            before = {name: tensor.clone() for name, tensor in state.state().items()}
            state.update(observed.fill_(math.nan) if skip else observed.fill_(2.0), torch.tensor(skip, device=device))
            same = all(torch.equal(tensor, before[name]) for name, tensor in state.state().items())
            ensure(same == bool(skip), "a skipped step changed the state" if skip else "an update changed no state")
        ensure(state.rows.data_ptr() == rows.data_ptr(), "`update` did not write `rows` in place")
        ensure(bool(rows.isfinite().all()), "`rows` are not finite")
        for name, tensor in other.state().items():
            tensor.copy_(state.state()[name])
        state.update(observed, torch.tensor(0.0, device=device))
        other.update(observed, torch.tensor(0.0, device=device))
        tiny.ensure_same_bits(other.state(), state.state(), "with copied state")


def trains(recipe: Recipe) -> None:
    """On a tiny model, with and without adapters, the loss is finite and falls."""
    prepared = _on_cpu(recipe)
    for lora in (None, tiny.adapters()):
        losses = tiny.train(tiny.engine(recipe=recipe, recipe_options=prepared, lora=lora), 5, lr=0.1, same=True)
        ensure(all(map(math.isfinite, losses)) and losses[-1] < losses[0], f"the loss does not fall: {losses}")


def resumes(recipe: Recipe) -> None:
    """A resumed run has the bits of an uninterrupted one."""
    prepared = _on_cpu(recipe)
    tiny.ensure_resumes(lambda: tiny.engine(recipe=recipe, recipe_options=prepared))


CHECKS = (multiplies, multiplies_packed_weights, keeps_its_state, trains, resumes)
