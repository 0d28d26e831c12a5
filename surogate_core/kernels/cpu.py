"""CPU kernels of the elementwise ops: torch's own vector kernels, in place where the reference allocates.

On a CPU a block spends its time on products and on memory: each temporary of a traced graph is a new allocation whose
pages must be faulted in. These kernels support fp32 and float64; other dtypes use the references. Results are
contiguous for any layout of the inputs, as the fakes say. Shape suffixes as in `kernels.ops`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.batch import IGNORE_LABEL
from surogate_core.bundles import Kernel
from surogate_core.kernels.ops import region

aten = torch.ops.aten


def _like(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors)


# ------------------------------------------------------------------------------- rms_norm


@torch.library.custom_op("surogate::cpu_rms_norm", mutates_args=())
def _norm(x_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x_ND = x_ND.contiguous()
    inverse_N1 = torch.linalg.vector_norm(x_ND, dim=-1, keepdim=True)
    inverse_N1.square_().div_(x_ND.shape[-1]).add_(eps).rsqrt_()
    return (x_ND * inverse_N1).mul_(weight_D), inverse_N1


@_norm.register_fake
def _(x_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _like(x_ND)[0], x_ND.new_empty((*x_ND.shape[:-1], 1))


@torch.library.custom_op("surogate::cpu_rms_norm_backward", mutates_args=())
def _norm_backward(
    dy_ND: Tensor, x_ND: Tensor, weight_D: Tensor, inverse_N1: Tensor, train_weight: bool
) -> tuple[Tensor, Tensor]:
    dy_ND, x_ND = dy_ND.contiguous(), x_ND.contiguous()
    xhat = x_ND * inverse_N1
    dweight_D = (dy_ND * xhat).flatten(0, -2).sum(0) if train_weight else weight_D.new_empty(0)
    dx = dy_ND * weight_D
    mean_N1 = torch.linalg.vecdot(dx, xhat).div_(x_ND.shape[-1]).unsqueeze(-1)
    return dx.addcmul_(xhat, mean_N1, value=-1).mul_(inverse_N1), dweight_D


@_norm_backward.register_fake
def _(dy_ND: Tensor, x_ND: Tensor, weight_D: Tensor, inverse_N1: Tensor, train_weight: bool) -> tuple[Tensor, Tensor]:
    return _like(x_ND)[0], _like(weight_D)[0] if train_weight else weight_D.new_empty(0)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        y_ND, inverse_N1 = _norm(x_ND, weight_D, eps)
        ctx.save_for_backward(x_ND, weight_D, inverse_N1)
        return y_ND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor | None, ...]:
        train_weight = ctx.needs_input_grad[1]
        dx_ND, dweight_D = _norm_backward(dy_ND, *ctx.saved_tensors, train_weight)
        return dx_ND, dweight_D if train_weight else None, None


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float, *, rounds_once: bool = False) -> Tensor:
    """`ops.rms_norm`, which rounds nothing in these dtypes."""
    with region("rmsnorm"):
        return _RMSNorm.apply(x_ND, weight_D, eps)


# --------------------------------------------------------------------------------- swiglu


@torch.library.custom_op("surogate::cpu_swiglu", mutates_args=())
def _swiglu(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate_NF.contiguous()).mul_(up_NF)


@_swiglu.register_fake
def _(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    return _like(gate_NF)[0]


@torch.library.custom_op("surogate::cpu_swiglu_backward", mutates_args=())
def _swiglu_backward(dy_NF: Tensor, gate_NF: Tensor, up_NF: Tensor) -> tuple[Tensor, Tensor]:
    dy_NF, gate_NF = dy_NF.contiguous(), gate_NF.contiguous()
    dup = torch.nn.functional.silu(gate_NF).mul_(dy_NF)
    dsilu = dy_NF * up_NF
    return aten.silu_backward.grad_input(dsilu, gate_NF, grad_input=dsilu), dup


@_swiglu_backward.register_fake
def _(dy_NF: Tensor, gate_NF: Tensor, up_NF: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = _like(gate_NF, up_NF)
    return dgate, dup


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_NF, up_NF)
        return _swiglu(gate_NF, up_NF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NF: Tensor) -> tuple[Tensor, Tensor]:
        return _swiglu_backward(dy_NF, *ctx.saved_tensors)


def swiglu(gate_NF: Tensor, up_NF: Tensor, *, ends_E: Tensor | None = None) -> Tensor:
    """`ops.swiglu`, of all rows."""
    with region("swiglu"):
        return _SwiGLU.apply(gate_NF, up_NF)


# ----------------------------------------------------------------------------------- rope


@torch.library.custom_op("surogate::cpu_rope", mutates_args=())
def _rope(x_NHE: Tensor, cos_NE: Tensor, sin_NE: Tensor, sign: int) -> Tensor:
    out = torch.empty_like(x_NHE, memory_format=torch.contiguous_format)
    first, second = x_NHE.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    cos, sin = cos_NE.unsqueeze(1), sin_NE.unsqueeze(1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    return out


@_rope.register_fake
def _(x_NHE: Tensor, cos_NE: Tensor, sin_NE: Tensor, sign: int) -> Tensor:
    return _like(x_NHE)[0]


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, x_NHE: Tensor, cos_NE: Tensor, sin_NE: Tensor) -> Tensor:
        ctx.save_for_backward(cos_NE, sin_NE)
        return _rope(x_NHE, cos_NE, sin_NE, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NHE: Tensor) -> tuple[Tensor | None, ...]:
        return _rope(dy_NHE, *ctx.saved_tensors, -1), None, None


def rope(x_NHE: Tensor, cos_NE: Tensor, sin_NE: Tensor) -> Tensor:
    """`ops.rope`."""
    return _Rope.apply(x_NHE, cos_NE, sin_NE)


# -------------------------------------------------------------------------- cross_entropy


LOGITS = 1 << 20
"""Number of logits whose exponentials exist at one time, because torch allocates them for its whole input at once."""


@torch.library.custom_op("surogate::cpu_cross_entropy", mutates_args=())
def _entropy(logits_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    rows = max(1, LOGITS // logits_NV.shape[1])
    lse_N = torch.cat([torch.logsumexp(part_RV, dim=-1) for part_RV in logits_NV.split(rows)])
    trained_N = labels_N != IGNORE_LABEL
    picked_N = logits_NV.gather(1, labels_N.clamp(min=0)[:, None])[:, 0]
    return (lse_N - picked_N).where(trained_N, 0.0), lse_N


@_entropy.register_fake
def _(logits_NV: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor]:
    n = logits_NV.shape[0]
    return logits_NV.new_empty(n), logits_NV.new_empty(n)


@torch.library.custom_op("surogate::cpu_cross_entropy_backward", mutates_args=())
def _entropy_backward(dloss_N: Tensor, logits_NV: Tensor, labels_N: Tensor, lse_N: Tensor) -> Tensor:
    logits_NV = logits_NV.contiguous()
    factor_N1 = dloss_N.where(labels_N != IGNORE_LABEL, 0.0)[:, None]
    dlogits = (logits_NV - lse_N[:, None]).exp_().mul_(factor_N1)
    return dlogits.scatter_add_(1, labels_N.clamp(min=0)[:, None], -factor_N1)


@_entropy_backward.register_fake
def _(dloss_N: Tensor, logits_NV: Tensor, labels_N: Tensor, lse_N: Tensor) -> Tensor:
    return _like(logits_NV)[0]


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        loss_N, lse_N = _entropy(logits_NV, labels_N)
        ctx.save_for_backward(logits_NV, labels_N, lse_N)
        return loss_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss_N: Tensor) -> tuple[Tensor, None]:
        return _entropy_backward(dloss_N, *ctx.saved_tensors), None


def cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """`ops.cross_entropy`."""
    return _CrossEntropy.apply(logits_NV, labels_N)


def _supports(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in (torch.float32, torch.float64)


def kernels() -> tuple[Kernel, ...]:
    """The kernels of this module."""
    functions = (rms_norm, swiglu, rope, cross_entropy)
    knows = {"rms_norm": frozenset({"rounds_once"}), "swiglu": frozenset({"ends_E"})}
    return tuple(
        Kernel(
            op=f.__name__, name="torch-cpu", function=f, supports=_supports, knows=knows.get(f.__name__, frozenset())
        )
        for f in functions
    )
