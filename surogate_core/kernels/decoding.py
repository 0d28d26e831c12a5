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

from surogate_core.kernels.ops import attention_weights, capped, hashed, wide
from surogate_core.kernels.registry import InPlace, in_place, op

SlotAttention = Callable[..., Tensor]


def slot_attention_op(namespace: str, run: SlotAttention) -> SlotAttention:
    """A function that writes into the caches, as custom ops of a namespace. It has the op's parameters and those of its
    extensions that it knows; they are not keyword-only, because custom ops have no such tensors.

    A block is traced with a form whose schema has no writes, because AOTAutograd's joint graphs allow none. Inductor
    gets the form that declares them (`registry.in_place`). Both run the same function.
    """
    traced = torch.library.custom_op(f"{namespace}::slot_attention", run, mutates_args=())
    declared = torch.library.custom_op(f"{namespace}::slot_attention_", run, mutates_args=("keys_STKE", "values_STKE"))

    def fake(q_NHE: Tensor, k_NKE: Tensor, v_NKF: Tensor, *rest: Any, **named: Any) -> Tensor:
        return q_NHE.new_empty(*q_NHE.shape[:2], v_NKF.shape[2])

    traced.register_fake(fake)
    declared.register_fake(fake)
    ops = getattr(torch.ops, namespace)
    in_place[ops.slot_attention.default] = InPlace(
        op=ops.slot_attention_.default, takes=lambda *arguments, **named: True
    )
    call: SlotAttention = traced
    return call


def seen(positions: Tensor, order_T: Tensor, window: int, ring: int) -> Tensor:
    """[…, T] bool: the places of a slot that rows at `positions` […, 1] see. With a window, position p is at place
    p mod `ring`.
    """
    if not window:
        return order_T <= positions
    # How many positions before the row's own the one that a place holds is; more than it if it is of no position.
    before = (positions - order_T) % ring
    return (before < window) & (before <= positions)


def _slot_attention(
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKF: Tensor,
    keys_STKE: Tensor,
    values_STKE: Tensor,
    slots_N: Tensor,
    positions_N: Tensor,
    longest: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    rows, heads, features = q_NHE.shape
    kv_heads, last = k_NKE.shape[1], keys_STKE.shape[0] - 1
    places_N = positions_N % keys_STKE.shape[1] if window else positions_N
    keys_STKE[slots_N, places_N] = k_NKE
    values_STKE[slots_N, places_N] = v_NKF
    keys_NTKE, values_NTKF = keys_STKE[slots_N, :longest], values_STKE[slots_N, :longest]
    q_NKME = wide(q_NHE).view(rows, kv_heads, heads // kv_heads, features)
    scores_NKMT = capped(torch.einsum("nkme,ntke->nkmt", q_NKME, wide(keys_NTKE)) * scale, softcap)
    order_T = torch.arange(keys_NTKE.shape[1], device=q_NHE.device)
    visible_NT = seen(positions_N[:, None], order_T, window, keys_STKE.shape[1])
    sinks_KM1 = None if sinks is None else sinks.view(kv_heads, -1, 1)
    weights_NKMT = attention_weights(scores_NKMT, visible_NT[:, None, None], sinks_KM1)
    # Positions behind the row's own may hold anything: zero times NaN would be NaN.
    shown_NTKF = wide(values_NTKF).masked_fill(~visible_NT[:, :, None, None], 0.0)
    out_NHF = torch.einsum("nkmt,ntkf->nkmf", weights_NKMT, shown_NTKF).reshape(rows, heads, -1)
    return out_NHF.masked_fill((slots_N == last)[:, None, None], 0.0).to(q_NHE.dtype)


_reference = slot_attention_op("surogate", _slot_attention)


@op
def slot_attention(
    q_NHE: Tensor,
    k_NKE: Tensor,
    v_NKF: Tensor,
    keys_STKE: Tensor,
    values_STKE: Tensor,
    slots_N: Tensor,
    positions_N: Tensor,
    longest: int,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """[N, H, F]: row n writes its key and value into its slot at its position, and attends to its slot up to there.

    `slots_N`, `positions_N`: int64. `longest`: more than every position; kernels may read, and cut their work, by it.
    Rows of the last slot do not count: their result is 0, and what that slot holds afterwards is undefined. Every other
    slot has one row at most, or holds the keys and values of its rows already. H is a multiple of K (grouped queries).
    The reference reads `longest` positions of each row.

    `window`, `softcap` and `sinks` as in `ops.attention`. With a window a slot is a ring: position p is at place
    p mod T, and T is at least the window.
    """
    arguments = (q_NHE, k_NKE, v_NKF, keys_STKE, values_STKE, slots_N, positions_N, longest, scale)
    return _reference(*arguments, window, softcap, sinks)


def gumbel(keys_N2: Tensor, numbers_N: Tensor, size: int) -> Tensor:
    """[N, V] fp32 noise with which the largest sum is a sample: a function of (key, number, token) only.

    `keys_N2`, `numbers_N`: int32; a number is the token's place in its completion.
    """
    first_N1, second_N1 = keys_N2[:, :1], keys_N2[:, 1:]
    row_N1 = hashed(first_N1 ^ hashed(second_N1 + numbers_N[:, None] * 0x1E3779B9))
    tokens_1V = torch.arange(size, dtype=torch.int32, device=keys_N2.device)[None]
    bits_NV = hashed(hashed(tokens_1V ^ row_N1) ^ hashed(row_N1 + second_N1))
    uniform_NV = ((bits_NV.long() & 0xFFFFFFFF).float() + 0.5) * 2.0**-32
    # Small values have the resolution, and they give the large noise that matters.
    return -torch.log(-torch.log1p(-uniform_NV.clamp(max=1 - 2.0**-24)))


def noisy(scores_NV: Tensor, temperature_N: Tensor, keys_N2: Tensor, numbers_N: Tensor) -> Tensor:
    """[N, V]: the scores plus the noise of their rows, whose largest token is the choice; without noise at 0."""
    noise_NV = gumbel(keys_N2, numbers_N, scores_NV.shape[1])
    return scores_NV + torch.where(temperature_N[:, None] == 0, 0.0, noise_NV)


def scaled(logits_NV: Tensor, temperature_N: Tensor) -> Tensor:
    """[N, V]: the logits over the temperature; as they are at 0."""
    return logits_NV / torch.where(temperature_N == 0, 1.0, temperature_N)[:, None]


def kept_of_sorted(sorted_NV: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor) -> Tensor:
    """[N, V] bool: what top-k, top-p and min-p keep of descending scores, in this order; the first always."""
    size = sorted_NV.shape[1]
    k_N1 = torch.where(top_k_N > 0, top_k_N, size).clamp(max=size)[:, None]
    # Tokens that are as probable as the last of the k are kept too.
    keep_NV = sorted_NV >= sorted_NV.gather(1, k_N1 - 1)
    probabilities = torch.softmax(sorted_NV.masked_fill(~keep_NV, float("-inf")), dim=-1)
    before_NV = probabilities.cumsum(dim=-1) - probabilities
    keep_NV = keep_NV & ((before_NV < top_p_N[:, None]) | (top_p_N[:, None] >= 1))
    keep_NV = keep_NV & (probabilities >= min_p_N[:, None] * probabilities[:, :1])
    keep_NV[:, 0] = True
    return keep_NV


@op
def token_bounds(
    logits_NV: Tensor, temperature_N: Tensor, top_k_N: Tensor, top_p_N: Tensor, min_p_N: Tensor
) -> tuple[Tensor, Tensor]:
    """(bounds_N fp32, lasts_N int32): what top-k, top-p and min-p keep of each row, in this order; see `kept`.

    The probabilities are of the logits over the temperature. Tokens that are as probable as the last of the k are
    kept too. A filter that keeps everything: 0, 1, 0. The most probable token is always kept, and at temperature 0
    every token.
    """
    sorted_NV, order_NV = scaled(logits_NV.float(), temperature_N).sort(dim=-1, descending=True, stable=True)
    keep_NV = kept_of_sorted(sorted_NV, top_k_N, top_p_N, min_p_N)
    last_N1 = keep_NV.sum(dim=-1, keepdim=True) - 1
    bounds_N, lasts_N = (t.gather(1, last_N1)[:, 0] for t in (sorted_NV, order_NV))
    greedy_N = temperature_N == 0
    return bounds_N.masked_fill(greedy_N, float("-inf")), lasts_N.int().masked_fill(greedy_N, logits_NV.shape[1])


def kept(scores_NV: Tensor, bounds_N: Tensor, lasts_N: Tensor) -> Tensor:
    """[N, V] bool: the tokens above the bound of their row, and of those that equal it the ones up to the last."""
    tokens_V = torch.arange(scores_NV.shape[1], device=scores_NV.device)
    equal_NV = scores_NV == bounds_N[:, None]
    return (scores_NV > bounds_N[:, None]) | (equal_NV & (tokens_V <= lasts_N[:, None]))


@op
def choose_tokens(
    logits_NV: Tensor,
    temperature_N: Tensor,
    keys_N2: Tensor,
    numbers_N: Tensor,
    bounds_N: Tensor | None = None,
    lasts_N: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(tokens_N int64, log-probabilities_N fp32 at temperature 1): a sample of each row, or its best at temperature 0.

    See `gumbel` for keys and numbers, `token_bounds` for bounds and lasts, without which every token may be chosen.
    Computed in fp32; of equal sums the first token wins. The log-probabilities are those without bounds.
    """
    logits_NV = logits_NV.float()
    scores_NV = scaled(logits_NV, temperature_N)
    if bounds_N is not None and lasts_N is not None:
        scores_NV = scores_NV.masked_fill(~kept(scores_NV, bounds_N, lasts_N), float("-inf"))
    tokens_N = noisy(scores_NV, temperature_N, keys_N2, numbers_N).argmax(dim=-1)
    return tokens_N, torch.log_softmax(logits_NV, dim=-1).gather(1, tokens_N[:, None])[:, 0]
