"""The op `cross_entropy` in Triton. Suffixes: N tokens, V vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.plugin import IGNORE_LABEL, bundles, compute
from surogate_kernels_triton import cross_entropy_programs as programs

COLUMNS = 4096


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::cross_entropy", mutates_args=())
def _forward(logits: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    n, vocabulary = logits.shape
    loss_N, lse_N = (logits.new_empty(n, dtype=torch.float32) for _ in range(2))
    programs.cross_entropy[n,](
        logits,
        labels_N,
        loss_N,
        lse_N,
        logits.stride(0),
        vocabulary,
        IGNORED=IGNORE_LABEL,
        C=COLUMNS // 4,
        num_warps=4,
    )
    return loss_N, lse_N


@_forward.register_fake
def _(logits: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    n = logits.shape[0]
    return logits.new_empty(n, dtype=torch.float32), logits.new_empty(n, dtype=torch.float32)


@compute.compiled_ahead
@torch.library.custom_op("surogate_triton::cross_entropy_backward", mutates_args=())
def _backward(dloss_N: Tensor, logits: Tensor, labels_N: Tensor, lse_N: Tensor) -> Tensor:
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    n, vocabulary = logits.shape
    out = logits.new_empty(n, vocabulary)
    programs.cross_entropy_backward[n, triton.cdiv(vocabulary, COLUMNS)](
        logits,
        labels_N,
        lse_N,
        dloss_N.contiguous(),
        out,
        logits.stride(0),
        out.stride(0),
        vocabulary,
        IGNORED=IGNORE_LABEL,
        C=COLUMNS,
        num_warps=8,
    )
    return out


@_backward.register_fake
def _(dloss_N: Tensor, logits: Tensor, labels_N: Tensor, lse_N: Tensor) -> Tensor:
    return logits.new_empty(logits.shape)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        loss_N, lse_N = _forward(logits_NV, labels_N)
        ctx.save_for_backward(logits_NV, labels_N, lse_N)
        return loss_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss_N: Tensor) -> tuple[Tensor, None]:
        return _backward(dloss_N, *ctx.saved_tensors), None


def cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """`ops.cross_entropy`."""
    found: Tensor = _CrossEntropy.apply(logits_NV, labels_N)
    return found


def kernel() -> bundles.Kernel:
    """The kernel."""
    return bundles.Kernel(
        op="cross_entropy",
        name="triton",
        function=cross_entropy,
        supports=lambda device, dtype: device.type == "cuda" and dtype in (torch.float16, torch.bfloat16),
        priority=10,
    )
