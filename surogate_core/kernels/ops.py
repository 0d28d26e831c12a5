"""The ops that families use, each with its plain-PyTorch reference.

Every reference is differentiable, runs in any float dtype (float64 makes it the oracle) and can
be traced. Shape suffixes: N tokens, D features, H heads, K key/value heads, E head features,
F feed-forward features (in attention: features of a value), V vocabulary, S document borders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from surogate_core.batch import IGNORE_LABEL
from surogate_core.kernels.heads import over_shared_rows
from surogate_core.kernels.panels import PanelShape
from surogate_core.kernels.regions import choice as choice
from surogate_core.kernels.regions import region as region
from surogate_core.kernels.registry import op


def wide(x: Tensor) -> Tensor:
    """At least fp32; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_D: Tensor, eps: float, offset: float, rounds_once: bool) -> Tensor:
        wide_ND = wide(x_ND)
        inverse_N1 = torch.rsqrt(wide_ND.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x_ND, weight_D, inverse_N1)
        ctx.offset = offset
        if offset or rounds_once:
            return (wide_ND * inverse_N1 * (offset + wide(weight_D))).to(x_ND.dtype)
        return weight_D * (wide_ND * inverse_N1).to(x_ND.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_D, inverse_N1 = ctx.saved_tensors
        xhat = wide(x_ND) * inverse_N1
        dy = wide(dy_ND)
        dxhat = dy * (ctx.offset + wide(weight_D) if ctx.offset else wide(weight_D))
        dx = (dxhat - xhat * (dxhat * xhat).mean(-1, keepdim=True)) * inverse_N1
        dweight = None
        if ctx.needs_input_grad[1]:
            dweight = (dy * xhat).flatten(0, -2).sum(0).to(weight_D.dtype)
        return dx.to(x_ND.dtype), dweight, None, None, None


@op
def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float, *, offset: float = 0.0, rounds_once: bool = False) -> Tensor:
    """Root-mean-square norm over the last dim (arXiv 1910.07467); statistics in fp32.

    The normalised value is rounded to x's dtype before it is scaled, as transformers does for Llama. With an `offset`
    it is scaled by offset + weight, in fp32, and rounded once, as transformers does for Gemma and Qwen3-Next. With
    `rounds_once` it is scaled by the weight in the same way, as transformers does for Nemotron-H.
    """
    with region("rmsnorm"):
        return _RMSNorm.apply(x_ND, weight_D, eps, offset, rounds_once)


def _grouped(x: Tensor, groups: int) -> Tensor:
    return x.unflatten(-1, (groups, -1))


class _GatedRMSNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, gate_ND: Tensor, weight_D: Tensor, eps: float, groups: int, gate_first: bool
    ) -> Tensor:
        silu_ND = torch.nn.functional.silu(wide(gate_ND))
        normed = _grouped(wide(x_ND) * silu_ND if gate_first else wide(x_ND), groups)
        inverse = torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x_ND, gate_ND, weight_D, inverse)
        ctx.settings = groups, gate_first
        y_ND = weight_D * (normed * inverse).flatten(-2).to(x_ND.dtype)
        return y_ND if gate_first else (y_ND * silu_ND).to(x_ND.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, gate_ND, weight_D, inverse = ctx.saved_tensors
        groups, gate_first = ctx.settings
        x, gate, weight, dy = wide(x_ND), wide(gate_ND), wide(weight_D), wide(dy_ND)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        dsilu = sigmoid + silu * (1 - sigmoid)
        hats = _grouped(x * silu if gate_first else x, groups) * inverse
        hat = hats.flatten(-2)
        scaled = dy if gate_first else dy * silu
        dhats = _grouped(scaled * weight, groups)
        dnormed = ((dhats - hats * (dhats * hats).mean(-1, keepdim=True)) * inverse).flatten(-2)
        dx, dgate = (dnormed * silu, dnormed * x * dsilu) if gate_first else (dnormed, dy * weight * hat * dsilu)
        dweight = None
        if ctx.needs_input_grad[2]:
            dweight = (scaled * hat).flatten(0, -2).sum(0).to(weight_D.dtype)
        return dx.to(x_ND.dtype), dgate.to(gate_ND.dtype), dweight, None, None, None


@op
def gated_rms_norm(
    x_ND: Tensor, gate_ND: Tensor, weight_D: Tensor, eps: float, *, groups: int = 1, gate_first: bool = False
) -> Tensor:
    """rms_norm(x) · silu(gate), or rms_norm(x · silu(gate)) if `gate_first`; the gate and statistics in fp32.

    The norm first is the gated delta rule's (arXiv 2412.06464), the gate first Mamba-2's (arXiv 2405.21060). The last
    dim consists of `groups` of equal size, each with a mean square of its own. The normalised value is rounded to x's
    dtype before it is scaled, as transformers does.
    """
    with region("rmsnorm"):
        return _GatedRMSNorm.apply(x_ND, gate_ND, weight_D, eps, groups, gate_first)


class _SwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_NF, up_NF)
        return torch.nn.functional.silu(gate_NF) * up_NF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NF: Tensor) -> tuple[Tensor, Tensor]:
        gate_NF, up_NF = ctx.saved_tensors
        gate, up, dy = wide(gate_NF), wide(up_NF), wide(dy_NF)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        dgate = dy * up * (sigmoid + silu * (1 - sigmoid))
        return dgate.to(gate_NF.dtype), (dy * silu).to(up_NF.dtype)


@op
def swiglu(gate_NF: Tensor, up_NF: Tensor, *, ends_E: Tensor | None = None) -> Tensor:
    """silu(gate) · up (arXiv 2002.05202).

    `ends_E`, int32: rows are those of experts, which end there (`experts.sort_by_expert`). Rows behind the last of them
    may be computed, and nobody reads them.
    """
    with region("swiglu"):
        return _SwiGLU.apply(gate_NF, up_NF)


class _GeGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_NF, up_NF)
        gelu = torch.nn.functional.gelu(wide(gate_NF), approximate="tanh")
        return gelu.to(gate_NF.dtype) * up_NF

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NF: Tensor) -> tuple[Tensor, Tensor]:
        gate_NF, up_NF = ctx.saved_tensors
        gate, up, dy = wide(gate_NF), wide(up_NF), wide(dy_NF)
        dgate = torch.ops.aten.gelu_backward(dy * up, gate, approximate="tanh")
        dup = dy * torch.nn.functional.gelu(gate, approximate="tanh")
        return dgate.to(gate_NF.dtype), dup.to(up_NF.dtype)


@op
def geglu(gate_NF: Tensor, up_NF: Tensor) -> Tensor:
    """gelu(gate) · up (arXiv 2002.05202), with the tanh form of GELU, as in Gemma."""
    with region("swiglu"):
        return _GeGLU.apply(gate_NF, up_NF)


class _ClampedSwiGLU(Function):
    @staticmethod
    def forward(ctx: Any, gate_NF: Tensor, up_NF: Tensor, limit: float, alpha: float) -> Tensor:
        ctx.save_for_backward(gate_NF, up_NF)
        ctx.settings = limit, alpha
        gate, up = wide(gate_NF).clamp(max=limit), wide(up_NF).clamp(-limit, limit)
        return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(gate_NF.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NF: Tensor) -> tuple[Tensor | None, ...]:
        gate_NF, up_NF = ctx.saved_tensors
        limit, alpha = ctx.settings
        wide_gate, wide_up, dy = wide(gate_NF), wide(up_NF), wide(dy_NF)
        gate, up = wide_gate.clamp(max=limit), wide_up.clamp(-limit, limit)
        sigmoid = torch.sigmoid(alpha * gate)
        dgate = dy * (up + 1) * sigmoid * (1 + alpha * gate * (1 - sigmoid))
        dgate = dgate.masked_fill(wide_gate > limit, 0.0)
        dup = (dy * gate * sigmoid).masked_fill(wide_up.abs() > limit, 0.0)
        return dgate.to(gate_NF.dtype), dup.to(up_NF.dtype), None, None


@op
def clamped_swiglu(gate_NF: Tensor, up_NF: Tensor, limit: float, alpha: float) -> Tensor:
    """(up + 1) · gate · sigmoid(alpha · gate) of gates of at most `limit` and ups within ±`limit` (gpt-oss,
    arXiv 2508.10925).
    """
    with region("swiglu"):
        return _ClampedSwiGLU.apply(gate_NF, up_NF, limit, alpha)


class _SquaredReLU(Function):
    @staticmethod
    def forward(ctx: Any, x_NF: Tensor) -> Tensor:
        ctx.save_for_backward(x_NF)
        return torch.relu(x_NF).square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NF: Tensor) -> Tensor:
        (x_NF,) = ctx.saved_tensors
        return (2 * wide(dy_NF) * torch.relu(wide(x_NF))).to(x_NF.dtype)


@op
def squared_relu(x_NF: Tensor) -> Tensor:
    """max(x, 0)² (arXiv 2109.08668)."""
    with region("swiglu"):
        return _SquaredReLU.apply(x_NF)


def _rotate(x_NHE: Tensor, cos_NE: Tensor, sin_NE: Tensor) -> Tensor:
    first, second = wide(x_NHE).chunk(2, dim=-1)
    cos, sin = cos_NE.unsqueeze(1), sin_NE.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_NHE.dtype)


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, x_NHE: Tensor, cos_NE: Tensor, sin_NE: Tensor) -> Tensor:
        ctx.save_for_backward(cos_NE, sin_NE)
        return _rotate(x_NHE, cos_NE, sin_NE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NHE: Tensor) -> tuple[Tensor | None, ...]:
        cos_NE, sin_NE = ctx.saved_tensors
        return _rotate(dy_NHE, cos_NE, -sin_NE), None, None


@op
def rope(x_NHE: Tensor, cos_NE: Tensor, sin_NE: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864), halves rotated against each other.

    `cos_NE`, `sin_NE`: [N, E/2] fp32, one angle for each pair (i, i + E/2).
    """
    return _Rope.apply(x_NHE, cos_NE, sin_NE)


@op
def norm_rope(
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKE: Tensor,
    q_norm_E: Tensor,
    k_norm_E: Tensor,
    eps: float,
    cos_NE: Tensor,
    sin_NE: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs of attention: q and k normed over a head's features and rotated, v unchanged.

    One op, so that a kernel's backward may write the three gradients into adjacent columns.
    """
    q_NHE = rope(rms_norm(q_NHE, q_norm_E, eps), cos_NE, sin_NE)
    return q_NHE, rope(rms_norm(k_NKE, k_norm_E, eps), cos_NE, sin_NE), v_NKE


def document_ids(cu_seqlens_S: Tensor, tokens: int) -> Tensor:
    """[N] the index of each position's document."""
    steps = torch.arange(tokens, device=cu_seqlens_S.device, dtype=cu_seqlens_S.dtype)
    return torch.bucketize(steps, cu_seqlens_S, right=True)


def capped(scores: Tensor, softcap: float) -> Tensor:
    """c · tanh(scores / c), which bounds them softly by c (Gemma 2, arXiv 2408.00118); as they are if c is 0."""
    return softcap * torch.tanh(scores / softcap) if softcap else scores


def attention_weights(scores: Tensor, visible: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension of the visible scores; of each row something is visible.

    `sinks` [..., 1], one for the rows of a head, joins the sum as one more score, which carries no value: weights may
    then add up to less than 1.
    """
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    sinks = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, sinks), dim=-1), dim=-1)[..., :-1]


def _within(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Attention without a window that no document exceeds, so that any kernel computes it as plain attention."""

    @wraps(attention)
    def call(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, **named: Any
    ) -> Tensor:
        if named.get("window", 0) >= max_seqlen:
            named["window"] = 0
        return attention(q, k, v, cu_seqlens, max_seqlen, scale, **named)

    return call


@over_shared_rows
@_within
@op
def attention(
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKF: Tensor,
    cu_seqlens_S: Tensor,
    max_seqlen: int,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention within each document; H is a multiple of K (grouped queries).

    `max_seqlen` bounds a document's length. Returns [N, H, F]. The reference forms all N² scores.
    Where ranks share rows, N of the operands and of the result are this rank's positions, and the borders those of the
    whole micro-batch; kernels see all positions of this rank's heads.

    `window`: a position sees itself and the window - 1 positions before it, and its whole document if 0 (as
    transformers' sliding_window). Kernels are asked for windows below `max_seqlen` alone. `softcap`: see `capped`,
    applied to the scaled scores. `sinks` [H]: a logit of each head that joins the softmax and carries no value
    (gpt-oss, arXiv 2508.10925); ranks that share rows all have H.
    """
    with region("att"):
        return _attention(q_NHE, k_NKE, v_NKF, cu_seqlens_S, scale, window, softcap, sinks)


def _attention(
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKF: Tensor,
    cu_seqlens_S: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks_H: Tensor | None,
) -> Tensor:
    n, heads, _ = q_NHE.shape
    groups = heads // k_NKE.shape[1]
    k = k_NKE.repeat_interleave(groups, dim=1)
    v = v_NKF.repeat_interleave(groups, dim=1)
    document = document_ids(cu_seqlens_S, n)
    order = torch.arange(n, device=q_NHE.device)
    visible = (document[:, None] == document[None, :]) & (order[:, None] >= order[None, :])
    if window:
        visible = visible & (order[:, None] - order[None, :] < window)
    scores = capped(torch.einsum("nhe,mhe->hnm", wide(q_NHE), wide(k)) * scale, softcap)
    sinks = None if sinks_H is None else sinks_H[:, None, None]
    weights = attention_weights(scores, visible, sinks)
    return torch.einsum("hnm,mhe->nhe", weights, wide(v)).to(q_NHE.dtype)


def hashed(x: Tensor) -> Tensor:
    """Avalanche of int32 bits, each depending on all: Chris Wellons' lowbias32 (nullprogram.com/blog/2018/07/31)."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * (0x846CA68B - (1 << 32))
    return x ^ ((x >> 16) & 0xFFFF)


def random_key(seed: Tensor, salt: int) -> Tensor:
    """0-d int32: the key with which the counter of `random_bits` is mixed."""
    return hashed(seed + salt * 0x1E3779B9)


def random_bits(shape: torch.Size, seed: Tensor, *, salt: int, first: int | Tensor = 0) -> Tensor:
    """[shape] int32, every bit random: a function of (seed, salt, element number) only.

    Counter-based, so that recomputed blocks, replayed graphs and resumed runs draw the same
    bits, and CPUs and GPUs agree. `seed`: 0-d int32. Elements are counted from `first`, a number or 0-d int32.
    """
    key = random_key(seed, salt)
    counter = torch.arange(shape.numel(), dtype=torch.int32, device=seed.device) + first
    return hashed(counter ^ key).view(shape)


def dropout_mask(shape: torch.Size, seed: Tensor, *, salt: int, p: float, first: int | Tensor = 0) -> Tensor:
    """[shape] bool, True with probability 1 − p: a function of (seed, salt, element number), see `random_bits`."""
    threshold = round(p * 2**32) - 2**31
    return random_bits(shape, seed, salt=salt, first=first) >= threshold


def dropout_mask_of_rows(x_NI: Tensor, seed_2: Tensor, *, salt: int, p: float) -> Tensor:
    """[N, I] bool: the part of a micro-batch's `dropout_mask` that belongs to these rows.

    `seed_2`: [2] int32, the seed and the number of the first row, which is 0 unless other ranks have the rows before.
    """
    seed, first_row = seed_2.unbind()
    return dropout_mask(x_NI.shape, seed, salt=salt, p=p, first=first_row * x_NI.shape[-1])


class _Dropout(Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, seed_2: Tensor, salt: int, p: float) -> Tensor:
        mask = dropout_mask_of_rows(x_NI, seed_2, salt=salt, p=p)
        ctx.save_for_backward(mask)
        ctx.p = p
        return x_NI * mask * (1 / (1 - p))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return dy * mask * (1 / (1 - ctx.p)), None, None, None


@op
def dropout(x_NI: Tensor, seed_2: Tensor, salt: int, p: float) -> Tensor:
    """Zero elements with probability p, scale the rest by 1 / (1 − p); see `dropout_mask_of_rows`."""
    return _Dropout.apply(x_NI, seed_2, salt, p)


@op
def adapted_linears(
    x_NI: Tensor, panel_QP: Tensor, seed_2: Tensor | None, shape: PanelShape, *adapters: Tensor
) -> Sequence[Tensor]:
    """Projections of one input with their LoRA adapters: y = x Wᵀ + scale · dropout(x) Aᵀ Bᵀ for each.

    `panel_QP` contains W's, A's and B's in x's dtype. `adapters` are A_RI, B_OR of each projection in turn, in any
    dtype: the tensors that receive gradients and from which the panel was loaded; a kernel need not read them.
    `seed_2` as in `dropout_mask_of_rows`; no dropout without it.
    """
    found = []
    for number, (a_RI, b_OR) in enumerate(zip(adapters[::2], adapters[1::2], strict=True)):
        dropped_NI = x_NI
        if shape.dropout > 0 and seed_2 is not None:
            dropped_NI = dropout(x_NI, seed_2, salt=shape.salts[number], p=shape.dropout)
        u_NR = dropped_NI @ a_RI.to(x_NI.dtype).t()
        y_NO = x_NI @ shape.weight(panel_QP, number).t()
        found.append(torch.addmm(y_NO, u_NR, b_OR.to(u_NR.dtype).t(), alpha=shape.scale))
    return found


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        logits = wide(logits_NV)
        lse_N = torch.logsumexp(logits, dim=-1)
        trained_N = labels_N != IGNORE_LABEL
        index_N = torch.where(trained_N, labels_N, 0)
        picked_N = logits_NV.gather(1, index_N[:, None])[:, 0].to(logits.dtype)
        ctx.save_for_backward(logits_NV, lse_N, index_N, trained_N)
        return torch.where(trained_N, lse_N - picked_N, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss_N: Tensor) -> tuple[Tensor, None]:
        logits_NV, lse_N, index_N, trained_N = ctx.saved_tensors
        factor_N1 = torch.where(trained_N, dloss_N, 0.0)[:, None]
        softmax = torch.exp(wide(logits_NV) - lse_N[:, None])
        if logits_NV.device.type == "cpu":
            dlogits = (softmax * factor_N1).scatter_add(1, index_N[:, None], -factor_N1)
        else:
            # A comparison fuses into the same kernel; a scatter would be a second pass.
            columns = torch.arange(logits_NV.shape[1], device=logits_NV.device)
            dlogits = (softmax - (columns == index_N[:, None]).to(softmax.dtype)) * factor_N1
        return dlogits.to(logits_NV.dtype), None


@op
def cross_entropy(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """[N] fp32 negative log-likelihood of each label; 0 where the label is `IGNORE_LABEL`."""
    return _CrossEntropy.apply(logits_NV, labels_N)
