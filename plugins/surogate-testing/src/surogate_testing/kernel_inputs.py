"""Inputs of an op, on which a kernel is compared with the op's reference."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surogate_core.plugin import compute
from surogate_core.service.kernels import owner_of
from surogate_testing.check import ensure
from surogate_testing.guard import explained


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Arguments of an op, made from the tensors that are differentiated."""

    leaves: Mapping[str, Tensor]
    """Name → tensor, on the CPU. The kit casts them to float64, and to the dtypes of a kernel."""
    call: Callable[[Callable[..., Any], list[Tensor]], Any]
    """(function, leaves in some dtype, on some device) → the function's result."""
    what: str = ""
    """The special property of these inputs, in words."""
    apart: bool = False
    """Whether there are gaps between rows of the leaves and of the results' gradients."""


def normal(*shape: int, seed: int) -> Tensor:
    """Normal values, fp64, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def inputs_of(op: str) -> list[Inputs]:
    """The inputs that the module of a plugin's op offers, in float64: `INPUTS`, op → function without arguments →
    inputs. Raises `AssertionError` with op, module and plugin if they cannot be read.
    """
    module = compute.references[op].function.__module__
    offered: Any = getattr(sys.modules[module], "INPUTS", {})
    what = f'{owner_of(op)}: INPUTS["{op}"] of the module {module}'
    fix = "Fix: a function without arguments that yields Inputs(...)"
    ensure(isinstance(offered, Mapping), f"{what}: INPUTS is {type(offered).__name__}, not a mapping")
    ensure(op in offered, f"{what} is missing. {fix}; `tuple` for an op without a gradient")
    ensure(callable(offered[op]), f"{what} is {type(offered[op]).__name__}, not a function. {fix}")
    with explained(what):
        made = offered[op]()
        found = list(made) if isinstance(made, Iterable) else None
    ensure(found is not None, f"{what} returns {type(made).__name__}, not an iterable. {fix}")
    return [_in_float64(one, what) for one in found or ()]


def _in_float64(inputs: Any, what: str) -> Inputs:
    ensure(isinstance(inputs, Inputs), f"{what} gives {type(inputs).__name__}, not Inputs")
    leaves = inputs.leaves
    ensure(
        isinstance(leaves, Mapping), f"{what}: `leaves` is {type(leaves).__name__}, not a mapping of names to tensors"
    )
    for name, leaf in leaves.items():
        ensure(isinstance(leaf, Tensor), f"{what}: the leaf {name} is {type(leaf).__name__}, not a tensor")
        ensure(
            leaf.is_floating_point(),
            f"{what}: the leaf {name} is {leaf.dtype}, and leaves are differentiated. Fix: make it in `call`",
        )
    return replace(inputs, leaves={name: leaf.detach().double() for name, leaf in leaves.items()})
