"""The ops of generation, each with its plain-PyTorch reference: attention over a cache, and the choice of a token.

Neither has a gradient. Their arguments and results stay on the device, and their shapes do not depend on values, so a
decoding step can be captured in a CUDA graph. Shape suffixes: N rows, S slots, T positions of a slot, H query heads, K
key/value heads, E features of a query and a key, F features of a value, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from surogate_core.kernels.ops import hashed, wide
from surogate_core.kernels.registry import InPlace, in_place, op

SlotAttention = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int, float], Tensor]


def slot_attention_op(namespace: str, run: SlotAttention) -> SlotAttention:
    """A function that writes into the caches, as custom ops of a namespace.

    A block is traced with a form whose schema has no writes, because AOTAutograd's joint graphs allow none. Inductor
    gets the form that declares them (`registry.in_place`). Both run the same function.
    """
    traced = torch.library.custom_op(f"{namespace}::slot_attention", run, mutates_args=())
    declared = torch.library.custom_op(f"{namespace}::slot_attention_", run, mutates_args=("keys_STKE", "values_STKE"))

    def fake(q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, *rest: Any) -> Tensor:
        return q_NHE.new_empty(*q_NHE.shape[:2], v_NKE.shape[2])

    traced.register_fake(fake)
    declared.register_fake(fake)
    ops = getattr(torch.ops, namespace)
    in_place[ops.slot_attention.default] = InPlace(op=ops.slot_attention_.default, takes=lambda *arguments: True)
    call: SlotAttention = traced
    return call


def _slot_attention(
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKE: Tensor,
    keys_STKE: Tensor,
    values_STKE: Tensor,
    slots_N: Tensor,
    positions_N: Tensor,
    longest: int,
    scale: float,
) -> Tensor:
    rows, heads, features = q_NHE.shape
    kv_heads, last = k_NKE.shape[1], keys_STKE.shape[0] - 1
    keys_STKE[slots_N, positions_N] = k_NKE
    values_STKE[slots_N, positions_N] = v_NKE
    keys_NTKE, values_NTKF = keys_STKE[slots_N, :longest], values_STKE[slots_N, :longest]
    q_NKME = wide(q_NHE).view(rows, kv_heads, heads // kv_heads, features)
    scores_NKMT = torch.einsum("nkme,ntke->nkmt", q_NKME, wide(keys_NTKE)) * scale
    visible_NT = torch.arange(longest, device=q_NHE.device) <= positions_N[:, None]
    weights_NKMT = torch.softmax(scores_NKMT.masked_fill(~visible_NT[:, None, None], float("-inf")), dim=-1)
    # Positions behind the row's own may hold anything: zero times NaN would be NaN.
    shown_NTKF = wide(values_NTKF).masked_fill(~visible_NT[:, :, None, None], 0.0)
    out_NHF = torch.einsum("nkmt,ntkf->nkmf", weights_NKMT, shown_NTKF).reshape(rows, heads, -1)
    return out_NHF.masked_fill((slots_N == last)[:, None, None], 0.0).to(q_NHE.dtype)


_reference = slot_attention_op("surogate", _slot_attention)


@op
def slot_attention(
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKE: Tensor,
    keys_STKE: Tensor,
    values_STKE: Tensor,
    slots_N: Tensor,
    positions_N: Tensor,
    longest: int,
    scale: float,
) -> Tensor:
    """[N, H, F]: row n writes its key and value into its slot at its position, and attends to its slot up to there.

    `slots_N`, `positions_N`: int64. `longest`: more than every position; kernels may read, and cut their work, by it.
    Rows of the last slot do not count: their result is 0, and what that slot holds afterwards is undefined. Every other
    slot has at most one row. H is a multiple of K (grouped queries). The reference reads `longest` positions of each
    row.
    """
    return _reference(q_NHE, k_NKE, v_NKE, keys_STKE, values_STKE, slots_N, positions_N, longest, scale)


def gumbel(keys_N2: Tensor, numbers_N: Tensor, size: int) -> Tensor:
    """[N, V] fp32 noise with which the largest sum is a sample: a function of (key, number, token) only.

    `keys_N2`, `numbers_N`: int32; the number is that of the token in its completion.
    """
    return gumbel_of(keys_N2, numbers_N, torch.arange(size, dtype=torch.int32, device=keys_N2.device)[None])


def gumbel_of(keys_N2: Tensor, numbers_N: Tensor, tokens_NC: Tensor) -> Tensor:
    """[N, C] fp32: `gumbel` of some tokens of each row, int32."""
    first_N1, second_N1 = keys_N2[:, :1], keys_N2[:, 1:]
    row_N1 = hashed(first_N1 ^ hashed(second_N1 + numbers_N[:, None] * 0x1E3779B9))
    bits_NC = hashed(hashed(tokens_NC ^ row_N1) ^ hashed(row_N1 + second_N1))
    uniform_NC = ((bits_NC.long() & 0xFFFFFFFF).float() + 0.5) * 2.0**-32
    # Small values have the resolution, and they give the large noise that matters.
    return -torch.log(-torch.log1p(-uniform_NC.clamp(max=1 - 2.0**-24)))


def noisy(scores_NV: Tensor, temperature_N: Tensor, keys_N2: Tensor, numbers_N: Tensor) -> Tensor:
    """[N, V]: the scores plus the noise of their rows, whose largest token is the choice; without noise at 0."""
    noise_NV = gumbel(keys_N2, numbers_N, scores_NV.shape[1])
    return scores_NV + torch.where(temperature_N[:, None] == 0, 0.0, noise_NV)


def scaled(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """[N, V]: the logits over the temperature; as they are at 0."""
    return logits_NV / torch.where(temperature_N == 0, 1.0, temperature_N)[:, None]


@op
def choose_tokens(
    logits_NV: Tensor, temperature_N: Tensor, keys_N2: Tensor, numbers_N: Tensor
) -> tuple[Tensor, Tensor]:
    """(tokens_N int64, log-probabilities_N fp32 at temperature 1): a sample of each row, or its best at temperature 0.

    See `gumbel` for keys and numbers. Computed in fp32; of equal sums the first token wins.
    """
    logits_NV = logits_NV.float()
    tokens_N = noisy(scaled(logits_NV, temperature_N), temperature_N, keys_N2, numbers_N).argmax(dim=-1)
    return tokens_N, torch.log_softmax(logits_NV, dim=-1).gather(1, tokens_N[:, None])[:, 0]
