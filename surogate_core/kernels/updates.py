"""Ops of the optimizer step that kernel packs may take over: in place, over a whole flat group."""

from __future__ import annotations

import torch
from torch import Tensor

from surogate_core.bundles import ParamGroup
from surogate_core.kernels.registry import op
from surogate_core.kernels.rounding import write_master

PIECE = 1 << 24
"""Elements of bf16 masters that are widened at a time; a multiple of a cache line, so that pieces are aligned."""


@op
def adamw_update(
    first: Tensor,
    second: Tensor,
    group: ParamGroup,
    *,
    count: Tensor,
    lr: Tensor,
    clip: Tensor,
    skip: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> None:
    """AdamW (arXiv 1711.05101) on a group's masters and their fp32 moments, in place.

    ``p *= 1 − lr·wd; p −= lr · m̂ / (√v̂ + ε)``. `count`, `lr`, `clip`, `skip`: 0-d fp32, the step counted from 1,
    the rate, the factor of the gradients, and 1 where nothing may change. bf16 masters are rounded by
    `kernels.rounding.write_master`.
    """
    narrow = group.master.dtype != torch.float32
    whole = group.master.numel()
    for start in range(0, whole, PIECE if narrow else whole):
        part = slice(start, start + (PIECE if narrow else whole))
        wide = group.master[part].float()
        torch._fused_adamw_(
            [wide],
            [group.grad[part]],
            [first[part]],
            [second[part]],
            [],
            [count],
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=group.weight_decay,
            eps=epsilon,
            amsgrad=False,
            maximize=False,
            grad_scale=clip.reciprocal(),
            found_inf=skip,
        )
        if narrow:
            write_master(group, start, wide)
