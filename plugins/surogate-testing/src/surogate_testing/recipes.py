"""Checks of precision recipes: the product and its backward, packed weights, state, training, resume."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from surogate_core.plugin import MachineError, bundles, compute, dsl
from surogate_testing import tiny
from surogate_testing.check import NotApplicable, ensure
from surogate_testing.hostreads import no_host_reads

BOUND = 0.25
"""Largest relative error of a product, which four bits can satisfy."""
MOST_OFF = 0.03
"""Largest relative error of a product's magnitude, which must also be at most half its error; four bits give 0.01."""
MOST_BIAS = 0.85
"""The mean of a product's errors divided by their root mean square: up to 0.7 with four bits, 1 if all values are
truncated.
"""

SLOT = dsl.TracedSlot(
    name="q", module="self_attn.q_proj", inputs=64, outputs=32, bias=False, region="qkv", adapter=None, index=0
)


def built(spec: bundles.RecipeSpec, device: torch.device, options: Any = None) -> bundles.Recipe:
    """The recipe with these options or their defaults; `MachineError` if the device cannot run it."""
    dtype: Literal["fp32", "bf16"] = "bf16" if device.type == "cuda" else "fp32"
    recipe = spec.build(options or spec.options(), bundles.RecipeContext(device=device, dtype=dtype))
    ensure(isinstance(recipe, bundles.Recipe), f"build returns {type(recipe).__name__}, which is no Recipe")
    return recipe


def _on_devices(spec: bundles.RecipeSpec) -> list[tuple[torch.device, bundles.Recipe]]:
    """The devices of this machine that run the recipe, natively or emulated, each with its built recipe."""
    found, reason = [], ""
    for device in (tiny.CPU, *([torch.device("cuda")] if torch.cuda.is_available() else [])):
        try:
            found.append((device, built(spec, device)))
        except MachineError as error:
            reason = reason or str(error)
    if not found:
        raise NotApplicable(reason)
    return found


def _on_cpu(spec: bundles.RecipeSpec) -> bundles.Recipe:
    device, recipe = _on_devices(spec)[0]
    if device != tiny.CPU:
        raise NotApplicable("the kit's model trains on a CPU")
    return recipe


def says_what_it_is(spec: bundles.RecipeSpec) -> None:
    """The built recipe has the spec's name, and packs weights if the spec says so."""
    for _, recipe in _on_devices(spec):
        name = getattr(recipe, "name", None)
        ensure(name == spec.name, f"what is built has the name {name!r}, the spec {spec.name!r}")
        has = "a" if recipe.pack is not None else "no"
        ensure((has == "a") == spec.packs, f"`packs` of the spec is {spec.packs}, and what is built has {has} `pack`")


def _slot(recipe: bundles.Recipe, device: torch.device, *, packed: bool = False) -> dsl.TracedSlot:
    """The slot in a micro-step, with its row if the recipe has state."""
    state = recipe.state(1, device)
    row = state.rows[0].clone().requires_grad_() if state is not None else None
    return replace(SLOT, seed=torch.tensor(5, dtype=torch.int32, device=device), row=row, packed=packed)


def _products(recipe: bundles.Recipe, x: Tensor, weight: Tensor, upstream: Tensor | None = None) -> dict[str, Tensor]:
    """y, dx and dW, detached."""
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    y = recipe.linear(leaves[0], leaves[1], _slot(recipe, x.device))
    ensure(isinstance(y, Tensor), f"linear returned {type(y).__name__}, not a tensor")
    shape = (len(x), len(weight))
    ensure(y.shape == shape, f"y has the shape {tuple(y.shape)}, not {shape}")
    ensure(y.requires_grad, "y has no gradient: neither x nor the weight is in its graph")
    dy = (_normal(*shape) if upstream is None else upstream).to(y)
    found = dict(zip(("dx", "dW"), torch.autograd.grad(y, leaves, dy, allow_unused=True), strict=True))
    for name, gradient in found.items():
        ensure(gradient is not None, f"linear gives no {name}: its backward returns None for it, or does not use it")
    return {"y": y.detach(), **found}


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def _upstream(y: Tensor) -> Tensor:
    return _normal(*y.shape).to(y)


def _operands() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(32, 64, generator=generator), torch.randn(32, 64, generator=generator)


def _exact(x: Tensor, weight: Tensor, upstream: Tensor | None = None) -> dict[str, Tensor]:
    return _products(tiny.PLAIN, x.double(), weight.double(), upstream)


def multiplies(spec: bundles.RecipeSpec) -> None:
    """x Wᵀ and its gradients have the right shapes and dtypes, small errors, and the same bits each time."""
    for device, recipe in _on_devices(spec):
        x_NI, weight_OI = _operands()
        for dtype in (torch.float32, torch.bfloat16):
            x, weight = x_NI.to(device, dtype), weight_OI.to(device, dtype)
            found, again = _products(recipe, x, weight), _products(recipe, x, weight)
            for name, exact in _exact(x, weight).items():
                a = found[name]
                ensure(a.dtype == dtype, f"{name} is {a.dtype}, not {dtype}")
                ensure(bool(a.isfinite().all()), f"{name} in {dtype} is not finite")
                ensure(torch.equal(a, again[name]), f"{name} in {dtype}: the same product twice has other bits")
                error = tiny.relative_error(a, exact)
                ensure(error <= BOUND, f"{name} in {dtype}: relative error {error:.3f} is above {BOUND}")
                size = _size(a, exact)
                bound = min(MOST_OFF, 0.5 * error + 1e-6)
                ensure(
                    abs(size - 1) <= bound,
                    f"{name} in {dtype} is {size:.4g} times what it should be: more than rounding makes it",
                )
            if recipe.plain:
                ensure(
                    torch.equal(found["y"], x @ weight.t()), f"`plain` is true, but y in {dtype} is not x @ weight.t()"
                )


def _size(found: Tensor, exact: Tensor) -> float:
    """The factor of `exact` that is nearest to the result; it is about 1 with correct rounding."""
    a, b = found.double(), exact.double()
    return float((a * b).sum() / (b * b).sum())


def rounds_without_bias(spec: bundles.RecipeSpec) -> None:
    """Errors of products of positive operands have both signs; if values are always rounded down, all are negative."""
    generator = torch.Generator().manual_seed(1)
    sizes = ((96, 64), (32, 64), (96, 32))
    x_NI, weight_OI, dy_NO = (torch.rand(size, generator=generator) + 0.5 for size in sizes)
    for device, recipe in _on_devices(spec):
        x, weight, dy = (t.to(device) for t in (x_NI, weight_OI, dy_NO))
        found = _products(recipe, x, weight, dy)
        for name, exact in _exact(x, weight, dy).items():
            error = found[name].double() - exact
            spread = float(error.square().mean().sqrt())
            if spread <= 1e-6 * float(exact.abs().mean()):
                continue  # the rounding of fp32 sums
            bias = float(error.mean()) / spread
            way = "down" if bias < 0 else "up"
            ensure(
                abs(bias) <= MOST_BIAS,
                f"{name} is rounded {way} on average: the mean of its errors is {abs(bias):.0%} of their size",
            )


def takes_zeros(spec: bundles.RecipeSpec) -> None:
    """Rows of zeros and tensors of zeros give zeros; all results are finite."""
    for device, recipe in _on_devices(spec):
        for what in ("a row of x", "all of x", "a row of the weight", "all of dy"):
            x, weight = (t.to(device) for t in _operands())
            dy = _normal(len(x), len(weight)).to(device)
            part = x[3] if what == "a row of x" else x if what == "all of x" else weight[3]
            (dy if what == "all of dy" else part).zero_()
            found = _products(recipe, x, weight, dy)
            for name, tensor in found.items():
                ensure(bool(tensor.isfinite().all()), f"{name} is not finite where {what} is zeros")
            if what == "all of x":
                ensure(not found["y"].any(), "y is not zeros where all of x is zeros")


def reads_nothing_back(spec: bundles.RecipeSpec) -> None:
    """`linear` and its backward read no tensor's value on the host: they are traced, and run in CUDA graphs."""
    for device, recipe in _on_devices(spec):
        x, weight = (t.to(device) for t in _operands())
        with no_host_reads("linear"):
            _products(recipe, x, weight)


def multiplies_packed_weights(spec: bundles.RecipeSpec) -> None:
    """A packed frozen weight gives the same product and dx as the weight, in fp32 to 1e-5."""
    if not spec.packs:
        raise NotApplicable("the recipe packs no weights")
    for device, recipe in _on_devices(spec):
        x, weight = (t.to(device) for t in _operands())
        found = []
        assert recipe.pack is not None
        packed = recipe.pack(weight, SLOT)
        for tensor, is_packed in ((weight, False), (packed, True)):
            leaf = x.clone().requires_grad_()
            y = recipe.linear(leaf, tensor, _slot(recipe, device, packed=is_packed))
            found.append((y.detach(), *torch.autograd.grad(y, [leaf], _upstream(y))))
        for name, a, b in zip(("y", "dx"), *found, strict=True):
            error = tiny.relative_error(b, a)
            ensure(error <= 1e-5, f"{name} with the packed weight: relative error {error:.1e} to the weight itself")


EXPERTS = (
    dsl.TracedExperts(
        name="gate", module="experts.{e}.gate_proj", count=4, choices=2, inputs=64, outputs=32, region="ffn",
        fused=None, adapter=None, index=4,
    ),
    dsl.TracedExperts(
        name="up", module="experts.{e}.up_proj", count=4, choices=2, inputs=64, outputs=48, region="ffn",
        fused=None, adapter=None, index=5,
    ),
)  # fmt: skip
"""Two projections of the same rows."""
LOADS = {"uneven loads": (5, 0, 42, 1), "all rows on one expert": (0, 48, 0, 0)}
"""Rows of each expert."""


def _of_experts(
    recipe: bundles.Recipe, x_RI: Tensor, weights: list[Tensor], ends_E: Tensor, *, packed: bool = False
) -> dict[str, Tensor]:
    """y and dW of each projection, and dx, detached; of packed weights no dW."""
    assert recipe.grouped is not None
    seed = torch.tensor(5, dtype=torch.int32, device=x_RI.device)
    slots = [replace(slot, seed=seed, packed=packed) for slot in EXPERTS]
    leaves = [x_RI.clone().requires_grad_(), *(w if packed else w.clone().requires_grad_() for w in weights)]
    ys = recipe.grouped(leaves[0], leaves[1:], ends_E, slots)
    given = leaves[:1] if packed else leaves
    gradients = torch.autograd.grad(list(ys), given, [_upstream(y) for y in ys])
    names = ["dx", *(f"dW of {slot.name}" for slot in slots)]
    found = {f"y of {slot.name}": y.detach() for slot, y in zip(slots, ys, strict=True)}
    return {**found, **dict(zip(names, gradients, strict=False))}


def _rows_of_experts(loads: tuple[int, ...], device: torch.device) -> tuple[Tensor, list[Tensor], Tensor]:
    """(x_RI, the weights of each projection, ends_E)."""
    generator = torch.Generator().manual_seed(0)
    x_RI = torch.randn(sum(loads), 64, generator=generator)
    weights = [torch.randn(s.count, s.outputs, s.inputs, generator=generator) for s in EXPERTS]
    ends_E = torch.tensor(loads).cumsum(0).int()
    return x_RI.to(device), [w.to(device) for w in weights], ends_E.to(device)


def multiplies_experts(spec: bundles.RecipeSpec) -> None:
    """The products of experts, and their gradients, have small errors and the same bits each time, for experts without
    rows too; packed weights give the same products.
    """
    for device, recipe in _on_devices(spec):
        if recipe.grouped is None:
            raise NotApplicable("the recipe multiplies experts plainly")
        for what, loads in LOADS.items():
            x_RI, weights, ends_E = _rows_of_experts(loads, device)
            exact = _of_experts(_Plain(), x_RI.double(), [w.double() for w in weights], ends_E)
            for dtype in (torch.float32, torch.bfloat16):
                operands = x_RI.to(dtype), [w.to(dtype) for w in weights]
                found, again = (_of_experts(recipe, *operands, ends_E) for _ in range(2))
                for name, value in found.items():
                    ensure(value.dtype == dtype, f"{name} of experts is {value.dtype}, not {dtype}")
                    ensure(torch.equal(value, again[name]), f"{name} of experts: the same product has other bits")
                    error = tiny.relative_error(value, exact[name])
                    ensure(error <= BOUND, f"{name} of experts, {what}, {dtype}: relative error {error:.3f}")
        _rounds_experts_as_it_multiplies(recipe, x_RI, weights, ends_E)
        if recipe.pack_experts is not None:
            packed = [recipe.pack_experts(w, slot) for w, slot in zip(weights, EXPERTS, strict=True)]
            found, wide = (
                _of_experts(recipe, x_RI, packed, ends_E, packed=True),
                _of_experts(recipe, x_RI, weights, ends_E),
            )
            for name, value in found.items():
                error = tiny.relative_error(value, wide[name])
                ensure(error <= 1e-5, f"{name} of experts with packed weights: relative error {error:.1e}")


def _rounds_experts_as_it_multiplies(
    recipe: bundles.Recipe, x_RI: Tensor, weights: list[Tensor], ends_E: Tensor
) -> None:
    """`rounded_experts` gives the operands of the forward."""
    if recipe.rounded_experts is None:
        return
    found = _of_experts(recipe, x_RI, weights, ends_E)
    rows, clipped = recipe.rounded_experts(x_RI, "activation")
    is_mask = clipped.dtype == torch.bool and clipped.shape == x_RI.shape
    ensure(is_mask, "`rounded_experts` gives no mask of its operand")
    for slot, weights_EOI in zip(EXPERTS, weights, strict=True):
        y_RO = compute.grouped_product(rows, recipe.rounded_experts(weights_EOI, "weight")[0], ends_E)
        error = tiny.relative_error(found[f"y of {slot.name}"], y_RO)
        ensure(error <= 1e-4, f"y of {slot.name} is not that of `rounded_experts`: relative error {error:.1e}")


class _Plain(bundles.Recipe):
    def grouped(
        self, x_RI: Tensor, weights: Sequence[Tensor], ends_E: Tensor, slots: Sequence[dsl.TracedExperts]
    ) -> Sequence[Tensor]:
        return [compute.grouped_product(x_RI, weights_EOI, ends_E) for weights_EOI in weights]


def keeps_its_state(spec: bundles.RecipeSpec) -> None:
    """Its rows take in the observations of slots, in place; a skipped step changes no bit; another state can load
    it.
    """
    for device, recipe in _on_devices(spec):
        state, other = (recipe.state(2, device) for _ in range(2))
        if state is None or other is None:
            raise NotApplicable("the recipe has no state")
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


def trains(spec: bundles.RecipeSpec) -> None:
    """On a tiny model, with and without adapters, the loss is finite and falls."""
    recipe = _on_cpu(spec)
    for lora in (None, tiny.lora()):
        losses = tiny.train(tiny.engine(recipe=recipe, lora=lora), 5, lr=0.1, same=True)
        ensure(all(map(math.isfinite, losses)) and losses[-1] < losses[0], f"the loss does not fall: {losses}")


def resumes(spec: bundles.RecipeSpec) -> None:
    """A resumed run has the bits of an uninterrupted one."""
    recipe = _on_cpu(spec)
    tiny.ensure_resumes(lambda: tiny.engine(recipe=recipe))


CHECKS = (
    says_what_it_is,
    multiplies,
    rounds_without_bias,
    takes_zeros,
    reads_nothing_back,
    multiplies_packed_weights,
    multiplies_experts,
    keeps_its_state,
    trains,
    resumes,
)
