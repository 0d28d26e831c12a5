"""The op `adamw_update`: one launch a group, at the rate of the memory."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from surogate_core.bundles import Kernel, ParamGroup
from surogate_core.kernels.rounding import PERIOD, SALTS
from surogate_kernels_triton import updates_programs as programs

BLOCK = 2048


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
    """`updates.adamw_update`."""
    length = group.master.numel()
    # In double: of 1 − β few digits would be left.
    corrections = [(1 - torch.pow(beta, count.double())).float() for beta in (beta1, beta2)]
    programs.adamw_update[(triton.cdiv(length, BLOCK),)](
        group.master,
        group.grad,
        first,
        second,
        lr,
        clip,
        skip,
        *corrections,
        group.seed,
        group.number * SALTS,
        length,
        group.weight_decay,
        1 - beta1,
        beta2,
        1 - beta2,
        epsilon,
        NARROW=group.seed is not None,
        PERIOD=PERIOD,
        C=BLOCK,
        num_warps=8,
    )


def kernel() -> Kernel:
    """The kernel."""
    return Kernel(
        op="adamw_update",
        name="triton",
        function=adamw_update,
        supports=lambda device, dtype: device.type == "cuda" and dtype == torch.float32,
        priority=10,
    )
