"""The ops of optimizer steps: one launch a group, or one for all matrices of a shape, at the rate of the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
from torch import Tensor

from surogate_core.plugin import bundles, compute
from surogate_kernels_triton import updates_programs as programs

BLOCK = 2048
TILE = 64
"""Rows and columns of a tile of a matrix."""


def adamw_update(
    first: Tensor,
    second: Tensor,
    group: bundles.ParamGroup,
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
        group.number * compute.SALTS,
        group.first,
        length,
        group.weight_decay,
        1 - beta1,
        beta2,
        1 - beta2,
        epsilon,
        NARROW=group.seed is not None,
        PERIOD=compute.PERIOD,
        C=BLOCK,
        num_warps=8,
    )


def matrix_momentum(
    momentum_BRC: Tensor, matrices: compute.Matrices, *, clip: Tensor, skip: Tensor, beta: float
) -> None:
    """`updates.matrix_momentum`."""
    count = momentum_BRC[0].numel()
    programs.matrix_momentum[(triton.cdiv(count, BLOCK), len(momentum_BRC))](
        momentum_BRC,
        matrices.group.grad,
        matrices.offsets_B,
        clip,
        skip,
        1 - beta,
        COUNT=count,
        SIZE=BLOCK,
        num_warps=8,
    )


def matrix_update(
    o_BRC: Tensor, factor_BR: Tensor, matrices: compute.Matrices, *, lr: Tensor, weight_decay: float, cautious: bool
) -> None:
    """`updates.matrix_update`."""
    group = matrices.group
    count, rows, columns = o_BRC.shape
    programs.matrix_update[(triton.cdiv(columns, TILE), triton.cdiv(rows, TILE), count)](
        group.master,
        o_BRC,
        factor_BR,
        matrices.offsets_B,
        lr,
        group.seed,
        group.number * compute.SALTS,
        weight_decay,
        *o_BRC.stride(),
        R=rows,
        C=columns,
        CAUTIOUS=cautious,
        NARROW=group.seed is not None,
        PERIOD=compute.PERIOD,
        ROWS=TILE,
        COLUMNS=TILE,
        num_warps=8,
    )


MOST_PARTS = 8
"""Parts of a sum that one launch adds."""


def add_tree_sum(total_K: Tensor, parts: Sequence[Tensor]) -> None:
    """`sums.add_tree_sum`; the parts are only read."""
    length, count = total_K.numel(), len(parts)
    if length:
        places = [*parts, *[parts[0]] * (MOST_PARTS - count)]
        programs.add_tree_sum[(triton.cdiv(length, BLOCK),)](total_K, *places, length, N=count, C=BLOCK, num_warps=8)


def _adds(total_K: Tensor, parts: Sequence[Tensor]) -> bool:
    dense = all(t.is_contiguous() and t.dtype == total_K.dtype for t in (total_K, *parts))
    return dense and 1 < len(parts) <= MOST_PARTS


def _of(*dtypes: torch.dtype) -> Callable[[torch.device, torch.dtype], bool]:
    return lambda device, dtype: device.type == "cuda" and dtype in dtypes


def kernels() -> tuple[bundles.Kernel, ...]:
    """The kernels."""
    adds = bundles.Kernel(
        op="add_tree_sum", name="triton", function=add_tree_sum, supports=_of(torch.float32), takes=_adds, priority=10
    )
    offered: dict[str, tuple[Callable[..., None], Callable[[torch.device, torch.dtype], bool]]] = {
        "adamw_update": (adamw_update, _of(torch.float32)),
        "matrix_momentum": (matrix_momentum, _of(torch.float32)),
        "matrix_update": (matrix_update, _of(torch.float32, torch.bfloat16)),
    }
    return (
        adds,
        *(
            bundles.Kernel(op=name, name="triton", function=function, supports=supports, priority=10)
            for name, (function, supports) in offered.items()
        ),
    )
