"""Inputs of an op, on which a kernel is compared with the op's reference."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surogate_core.kernels.registry import references


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Arguments of an op, made from the tensors that are differentiated."""

    leaves: Mapping[str, Tensor]
    """Name → tensor, fp64, on the CPU."""
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


def inputs_of(op: str) -> Iterable[Inputs]:
    """The inputs that the module of a plugin's op offers: `INPUTS`, op → function without arguments → inputs."""
    module = sys.modules[references[op].function.__module__]
    offered: Mapping[str, Callable[[], Iterable[Inputs]]] = getattr(module, "INPUTS", {})
    return offered[op]() if op in offered else ()
