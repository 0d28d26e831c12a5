"""Cross-entropy with one pass over the logits forward and one backward. Shape suffixes: N tokens, V vocabulary."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.plugin import IGNORE_LABEL, bundles, compute

THREADS = 512
"""As in the source."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_MODULE = compute.Module(compute.Sources.of(__file__), "cross_entropy")


def _rows(logits_NV: Tensor) -> Tensor:
    """With unit stride over V; there may be gaps between rows."""
    return logits_NV if logits_NV.stride(-1) == 1 else logits_NV.contiguous()


def _suffix(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@compute.compiled_ahead
@torch.library.custom_op("surogate::cuda_cross_entropy", mutates_args=())
def _forward(logits_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    logits_NV = _rows(logits_NV)
    rows, columns = logits_NV.shape
    loss_N = torch.empty(rows, dtype=torch.float32, device=logits_NV.device)
    lse_N = torch.empty_like(loss_N)
    if rows:
        _MODULE.launch(
            f"cross_entropy_loss_{_suffix(logits_NV)}",
            (rows,),
            THREADS,
            logits_NV,
            logits_NV.stride(0),
            labels_N.contiguous(),
            IGNORE_LABEL,
            np.int32(columns),
            loss_N,
            lse_N,
        )
    return loss_N, lse_N


@_forward.register_fake
def _(logits_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits_NV.shape[0]
    return logits_NV.new_empty(rows, dtype=torch.float32), logits_NV.new_empty(rows, dtype=torch.float32)


@compute.compiled_ahead
@torch.library.custom_op("surogate::cuda_cross_entropy_backward", mutates_args=())
def _backward(dloss_N: Tensor, logits_NV: Tensor, labels_N: Tensor, lse_N: Tensor) -> Tensor:
    logits_NV = _rows(logits_NV)
    rows, columns = logits_NV.shape
    dlogits_NV = torch.empty_like(logits_NV, memory_format=torch.contiguous_format)
    if rows:
        _MODULE.launch(
            f"cross_entropy_gradient_{_suffix(logits_NV)}",
            (rows,),
            THREADS,
            dloss_N.contiguous(),
            logits_NV,
            logits_NV.stride(0),
            labels_N.contiguous(),
            IGNORE_LABEL,
            lse_N,
            np.int32(columns),
            dlogits_NV,
            columns,
        )
    return dlogits_NV


@_backward.register_fake
def _(dloss_N: Tensor, logits_NV: Tensor, labels_N: Tensor, lse_N: Tensor) -> Tensor:
    return torch.empty_like(logits_NV, memory_format=torch.contiguous_format)


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        loss_N, lse_N = _forward(logits_NV, labels_N)
        ctx.save_for_backward(logits_NV, labels_N, lse_N)
        return loss_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss_N: Tensor) -> tuple[Tensor, None]:
        return _backward(dloss_N.float(), *ctx.saved_tensors), None


def cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """`surogate_core.kernels.ops.cross_entropy`: [N] fp32."""
    return _CrossEntropy.apply(logits_NV, labels_N)


def kernel() -> bundles.Kernel:
    """The kernel as the pack offers it."""
    return bundles.Kernel(
        op="cross_entropy",
        name="cuda",
        function=cross_entropy,
        supports=lambda device, dtype: device.type == "cuda" and dtype in DTYPES,
        priority=20,
    )
