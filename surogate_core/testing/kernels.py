"""Checks of kernel packs: every kernel against its op's reference in float64, forward and backward.

Shape suffixes as in `surogate_core.kernels.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surogate_core.bundles import Kernel, KernelPack
from surogate_core.data.batch import IGNORE_LABEL
from surogate_core.kernels.panels import PanelShape
from surogate_core.kernels.registry import references
from surogate_core.testing.check import NotApplicable, ensure

BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""Largest error over the largest value of a tensor, by dtype of the inputs."""

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Inputs:
    """Arguments of an op, made from the tensors that are differentiated."""

    leaves: tuple[Tensor, ...]
    """fp64, on the CPU."""
    call: Callable[[Callable[..., Any], list[Tensor]], Any]
    """(function, leaves in some dtype, on some device) → what the function returns."""


def _normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _turns(like: Tensor) -> tuple[Tensor, Tensor]:
    angles = _normal(48, 32, seed=90).to(like.device)
    wide = torch.promote_types(like.dtype, torch.float32)
    return angles.cos().to(wide), angles.sin().to(wide)


def _rms_norm() -> Inputs:
    return Inputs((_normal(48, 64, seed=0), _normal(64, seed=1)), lambda f, t: f(*t, EPS))


def _swiglu() -> Inputs:
    return Inputs((_normal(48, 64, seed=0), _normal(48, 64, seed=1)), lambda f, t: f(*t))


def _rope() -> Inputs:
    return Inputs((_normal(48, 4, 64, seed=0),), lambda f, t: f(t[0], *_turns(t[0])))


def _norm_rope() -> Inputs:
    heads = tuple(_normal(48, n, 64, seed=n) for n in (4, 2, 2))
    weights = (_normal(64, seed=8), _normal(64, seed=9))
    return Inputs((*heads, *weights), lambda f, t: f(*t, EPS, *_turns(t[0])))


def _attention() -> Inputs:
    def call(function: Callable[..., Any], t: list[Tensor]) -> Any:
        borders = torch.tensor([0, 20, 21, 48, 48], dtype=torch.int32, device=t[0].device)
        return function(*t, borders, 48, 0.125)

    return Inputs(tuple(_normal(48, n, 128, seed=s) for s, n in enumerate((4, 2, 2))), call)


def _cross_entropy() -> Inputs:
    labels = torch.randint(0, 128, (48,), generator=torch.Generator().manual_seed(3))
    labels[[0, 7, 47]] = IGNORE_LABEL
    return Inputs((_normal(48, 128, seed=0),), lambda f, t: f(t[0], labels.to(t[0].device)))


def _dropout() -> Inputs:
    def call(function: Callable[..., Any], t: list[Tensor]) -> Any:
        return function(t[0], torch.tensor(5, dtype=torch.int32, device=t[0].device), 3, 0.25)

    return Inputs((_normal(48, 64, seed=0),), call)


def _adapted_linears() -> Inputs:
    shape = PanelShape(inputs=64, outputs=(64, 128), rank=16, scale=0.75, dropout=0.0, salts=(0, 1))
    weights = [_normal(n, 64, seed=n) for n in shape.outputs]
    adapters = [_normal(*size, seed=s) for s, n in enumerate(shape.outputs) for size in ((16, 64), (n, 16))]

    def call(function: Callable[..., Any], t: list[Tensor]) -> Any:
        x, *ab = t
        panel = shape.allocate(x.device, x.dtype)
        for number, weight in enumerate(weights):
            # bf16 holds it in every dtype, so that all compute with the same weight.
            shape.weight(panel, number).copy_(weight.bfloat16())
        with torch.no_grad():
            shape.load(panel, list(zip(ab[::2], ab[1::2], strict=True)))
        return function(x, panel, None, shape, *ab)

    return Inputs((_normal(48, 64, seed=20), *adapters), call)


CASES: Mapping[str, Callable[[], Inputs]] = {
    "rms_norm": _rms_norm,
    "swiglu": _swiglu,
    "rope": _rope,
    "norm_rope": _norm_rope,
    "attention": _attention,
    "cross_entropy": _cross_entropy,
    "dropout": _dropout,
    "adapted_linears": _adapted_linears,
}
"""Op → inputs for it."""

WITHOUT_CASES = frozenset(
    {
        "adamw_8bit_update",
        "adamw_update",
        "matrix_momentum",
        "matrix_update",
        "nvfp4_quantised",
        "nvfp4_rounded",
        "quantise_both",
        "scaled_linears",
    }
)
"""Ops that work in place or give codes: no bound on an error says whether they are right, so packs test their bits."""


def _run(function: Callable[..., Any], inputs: Inputs, leaves: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in leaves]
    returned = inputs.call(function, leaves)
    values = list(returned) if isinstance(returned, tuple | list) else [returned]
    dys = [_normal(*y.shape, seed=70 + n).to(y) for n, y in enumerate(values)]
    return [*(y.detach() for y in values), *torch.autograd.grad(values, leaves, dys)]


def _takes(kernel: Kernel, inputs: Inputs, leaves: list[Tensor]) -> bool:
    answers: list[bool] = []
    inputs.call(lambda *args, **kwargs: answers.append(kernel.takes(*args, **kwargs)), leaves)
    return all(answers)


def _devices(pack: KernelPack) -> list[torch.device]:
    known = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
    reasons = {device: pack.unavailable(device) for device in known}
    usable = [device for device, reason in reasons.items() if reason is None]
    if not usable:
        raise NotApplicable("; ".join(str(r) for r in reasons.values()))
    return usable


def _offered(pack: KernelPack) -> Iterator[tuple[torch.device, Kernel, torch.dtype]]:
    for device in _devices(pack):
        for kernel in pack.kernels():
            for dtype in BOUNDS:
                if kernel.supports(device, dtype):
                    yield device, kernel, dtype


def names_ops(pack: KernelPack) -> None:
    """Every kernel is of an op that exists, with a name of its own, and above the reference."""
    _devices(pack)
    kernels = list(pack.kernels())
    for kernel in kernels:
        ensure(kernel.op in references, f"there is no op {kernel.op!r}; known: {', '.join(sorted(references))}")
        ensure(kernel.priority > references[kernel.op].priority, f"{kernel.name} is never above the reference")
    names = [(k.op, k.name) for k in kernels]
    ensure(len(set(names)) == len(names), "two kernels of an op have one name")


def equals_references(pack: KernelPack) -> None:
    """Values and gradients are those of the reference in float64, in each dtype that is said to be supported."""
    tried = 0
    for device, kernel, dtype in _offered(pack):
        if kernel.op not in CASES:
            continue
        inputs = CASES[kernel.op]()
        leaves = [t.to(device, dtype) for t in inputs.leaves]
        if not _takes(kernel, inputs, leaves):
            continue
        found = _run(kernel.function, inputs, leaves)
        expected = _run(references[kernel.op].function, inputs, [t.double() for t in leaves])
        for number, (a, b) in enumerate(zip(found, expected, strict=True)):
            ensure(a.shape == b.shape, f"{kernel.op} {kernel.name}: tensor {number} has shape {tuple(a.shape)}")
            error = float((a.double() - b.double()).abs().max() / b.double().abs().max())
            ensure(
                error <= BOUNDS[dtype],
                f"{kernel.op} {kernel.name} on {device.type} in {dtype}: error {error:.1e} of tensor {number}",
            )
        tried += 1
    if not tried:
        raise NotApplicable("no kernel supports a device of this machine and takes the kit's inputs")


def repeats_its_bits(pack: KernelPack) -> None:
    """A kernel that is `deterministic` gives equal bits for equal inputs."""
    for device, kernel, dtype in _offered(pack):
        if not kernel.deterministic or kernel.op not in CASES:
            continue
        inputs = CASES[kernel.op]()
        leaves = [t.to(device, dtype) for t in inputs.leaves]
        if not _takes(kernel, inputs, leaves):
            continue
        first, second = (_run(kernel.function, inputs, leaves) for _ in range(2))
        same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        ensure(same, f"{kernel.op} {kernel.name} on {device.type} in {dtype}: other bits the second time")


CHECKS = (names_ops, equals_references, repeats_its_bits)
