"""Ops of the optimizer step that kernel packs may take over: in place, over a whole flat group or many matrices of it.

B matrices [R rows, C columns] of one shape are treated together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surogate_core.bundles import ParamGroup
from surogate_core.kernels.optimizing.rounding import write_master
from surogate_core.kernels.registry import op

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrices:
    """B matrices of one shape within a flat group."""

    group: ParamGroup
    offsets: tuple[int, ...]
    offsets_B: Tensor
    """Where each begins, int64 on the group's device."""
    masters: tuple[Tensor, ...]
    """Views [R, C] of the group's, and the gradients too."""
    grads: tuple[Tensor, ...]

    @classmethod
    def of(cls, group: ParamGroup, offsets: Sequence[int], shape: tuple[int, int]) -> Matrices:
        """Those that begin at the offsets."""
        count = math.prod(shape)
        masters, grads = (
            tuple(flat[at : at + count].view(shape) for at in offsets) for flat in (group.master, group.grad)
        )
        places = torch.tensor(offsets, device=group.master.device)
        return cls(group=group, offsets=tuple(offsets), offsets_B=places, masters=masters, grads=grads)


@op
def matrix_momentum(momentum_BRC: Tensor, matrices: Matrices, *, clip: Tensor, skip: Tensor, beta: float) -> None:
    """M = β·M + (1−β)·clip·G in place, fp32. An element that is not finite counts as 0.

    `clip` and `skip` are 0-d fp32; nothing changes where `skip` is 1.
    """
    grad_BRC = torch.stack(matrices.grads).mul_(clip).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    momentum_BRC.lerp_(grad_BRC, (1 - beta) * (1 - skip))


@op
def matrix_update(
    o_BRC: Tensor, factor_BR: Tensor, matrices: Matrices, *, lr: Tensor, weight_decay: float, cautious: bool
) -> None:
    """W −= lr · (factor·O + wd·W) in place, `factor_BR` (fp32, not negative) for each row of O (bf16 or fp32).

    `cautious` (arXiv 2510.12402): only elements with O ⊙ W ≥ 0 decay. `lr`: 0-d fp32; where it is 0 nothing changes.
    bf16 masters are rounded by `kernels.rounding.write_master`.
    """
    wide_BRC = torch.stack(matrices.masters).float()
    change_BRC = o_BRC * (factor_BR * lr)[:, :, None]
    if weight_decay:
        decay_BRC = wide_BRC * (lr * weight_decay)
        change_BRC += torch.where(o_BRC * wide_BRC >= 0, decay_BRC, 0.0) if cautious else decay_BRC
    wide_BRC -= change_BRC
    if matrices.group.seed is None:
        torch._foreach_copy_(list(matrices.masters), list(wide_BRC.unbind()))
    else:
        for offset, wide_RC in zip(matrices.offsets, wide_BRC, strict=True):
            write_master(matrices.group, offset, wide_RC)
