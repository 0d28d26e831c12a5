"""The choice of the next token.

Each row is a function of its own logits and key, so neighbours do not matter. Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from surogate_core.bundles import Request, Sampling
from surogate_core.kernels.decoding import choose_tokens, gumbel_of, kept_of_sorted, noisy, scaled, token_bounds
from surogate_core.kernels.registry import offered

Filters = Literal["none", "few", "mass", "sorted"]
"""How rows choose among some of their tokens: they do not; only the `FEW` most probable tokens are looked at; the least
score is found by bisection; all tokens are sorted.
"""
FEW = 64
"""Tokens of a row that are looked at, if `top_k` is less for all rows."""
SPAN, HALVINGS = 32.0, 26
"""How far below the best score the least one is searched, and in how many steps."""


def key_of(request: Request) -> tuple[int, int]:
    """Two int32 that decide the random choices of a completion."""
    sequence = np.random.SeedSequence([request.sampling.seed & 0xFFFFFFFFFFFFFFFF, request.number, request.sample])
    first, second = sequence.generate_state(2, np.uint32).view(np.int32).tolist()
    return first, second


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """How the next token of each row is chosen."""

    temperature_N: Tensor
    top_k_N: Tensor
    top_p_N: Tensor
    min_p_N: Tensor
    penalty_N: Tensor
    keys_N2: Tensor
    """int32."""
    positions_N: Tensor
    """int32: the number of the token in its completion."""
    filters: Filters

    @classmethod
    def of(
        cls,
        samplings: Sequence[Sampling],
        keys: Sequence[tuple[int, int]],
        positions: Sequence[int],
        device: torch.device,
    ) -> Rows:
        """The rows of these completions."""

        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return cls(
            temperature_N=column([s.temperature for s in samplings]),
            top_k_N=column([s.top_k for s in samplings], torch.int64),
            top_p_N=column([s.top_p for s in samplings]),
            min_p_N=column([s.min_p for s in samplings]),
            penalty_N=column([s.repetition_penalty for s in samplings]),
            keys_N2=torch.tensor(list(keys), dtype=torch.int32, device=device),
            positions_N=column(positions, torch.int32),
            filters="sorted" if _filtered(samplings) else "none",
        )


def _filtered(samplings: Sequence[Sampling]) -> bool:
    return any(s.top_k or s.top_p < 1 or s.min_p > 0 for s in samplings)


def filters_of(samplings: Sequence[Sampling]) -> Filters:
    """The cheapest way to choose the tokens of these rows."""
    if not _filtered(samplings):
        return "none"
    sampled = [s for s in samplings if s.temperature > 0]
    if all(0 < s.top_k < FEW for s in sampled):
        return "few"
    return "sorted" if any(s.top_k for s in sampled) else "mass"


def choose(logits_NV: Tensor, rows: Rows, seen_NV: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(tokens_N int64, log-probabilities_N fp32 under the model itself).

    `seen_NV`: the tokens that the repetition penalty applies to.
    """
    if seen_NV is None and rows.filters == "none":
        return choose_tokens(logits_NV, rows.temperature_N, rows.keys_N2, rows.positions_N)
    scores_NV = logits_NV if seen_NV is None else _penalised(logits_NV.float(), rows, seen_NV)
    if rows.filters != "none" and offered("token_bounds", logits_NV.dtype):
        found = token_bounds(scores_NV, rows.temperature_N, rows.top_k_N, rows.top_p_N, rows.min_p_N)
        tokens_N, logprobs_N = choose_tokens(scores_NV, rows.temperature_N, rows.keys_N2, rows.positions_N, *found)
        return tokens_N, logprobs_N if seen_NV is None else _logprobs(logits_NV, tokens_N)
    logits_NV, scores_NV = logits_NV.float(), scores_NV.float()
    if rows.filters == "few":
        tokens_N = _choose_of_few(scores_NV, rows)
        return tokens_N, _logprobs(logits_NV, tokens_N)
    scores_NV = scaled(scores_NV, rows.temperature_N)
    if rows.filters != "none":
        keep_NV = kept(scores_NV, rows) if rows.filters == "sorted" else kept_by_mass(scores_NV, rows)
        scores_NV = scores_NV.masked_fill(~keep_NV & (rows.temperature_N[:, None] != 0), float("-inf"))
    tokens_N = noisy(scores_NV, rows.temperature_N, rows.keys_N2, rows.positions_N).argmax(dim=-1)
    return tokens_N, torch.log_softmax(logits_NV, dim=-1).gather(1, tokens_N[:, None])[:, 0]


def _logprobs(logits_NV: Tensor, tokens_N: Tensor) -> Tensor:
    logits_NV = logits_NV.float()
    return logits_NV.gather(1, tokens_N[:, None])[:, 0] - logits_NV.logsumexp(dim=-1)


def _penalised(scores_NV: Tensor, rows: Rows, seen_NV: Tensor) -> Tensor:
    penalty_N1 = rows.penalty_N[:, None]
    penalised = torch.where(scores_NV > 0, scores_NV / penalty_N1, scores_NV * penalty_N1)
    return torch.where(seen_NV, penalised, scores_NV)


def _choose_of_few(scores_NV: Tensor, rows: Rows) -> Tensor:
    """[N] int64: the choice among the most probable tokens alone. Of equal sums the first token wins."""
    best_NC, tokens_NC = scores_NV.topk(min(FEW, scores_NV.shape[1]), dim=-1)
    best_NC = scaled(best_NC, rows.temperature_N)
    greedy_N1 = rows.temperature_N[:, None] == 0
    best_NC = best_NC.masked_fill(~_kept_of_sorted(best_NC, rows) & ~greedy_N1, float("-inf"))
    best_NC = best_NC + torch.where(greedy_N1, 0.0, gumbel_of(rows.keys_N2, rows.positions_N, tokens_NC.int()))
    is_best_NC = best_NC == best_NC.amax(dim=-1, keepdim=True)
    return torch.where(is_best_NC, tokens_NC, scores_NV.shape[1]).amin(dim=-1).clamp(max=scores_NV.shape[1] - 1)


def kept(scores_NV: Tensor, rows: Rows) -> Tensor:
    """[N, V] bool: what top-k, top-p and min-p keep, in this order; the most probable token always."""
    sorted_NV, order_NV = scores_NV.sort(dim=-1, descending=True, stable=True)
    keep_NV = _kept_of_sorted(sorted_NV, rows)
    return torch.zeros_like(keep_NV).scatter(1, order_NV, keep_NV)


def kept_by_mass(scores_NV: Tensor, rows: Rows) -> Tensor:
    """[N, V] bool: what top-p and min-p keep, without a sort: a row's least score is found by bisection.

    Tokens as probable as the last one that is kept are kept too, up to `SPAN` / 2^`HALVINGS` of their scores.
    """
    below_NV = scores_NV - scores_NV.amax(dim=-1, keepdim=True)
    weights_NV = below_NV.exp()
    wanted_N1 = rows.top_p_N[:, None] * weights_NV.sum(dim=-1, keepdim=True)
    high_N1 = torch.zeros_like(wanted_N1)
    low_N1 = high_N1 - SPAN
    for _ in range(HALVINGS):
        middle_N1 = (low_N1 + high_N1) / 2
        above_N1 = torch.where(below_NV > middle_N1, weights_NV, 0.0).sum(dim=-1, keepdim=True)
        is_kept_N1 = above_N1 < wanted_N1
        high_N1 = torch.where(is_kept_N1, middle_N1, high_N1)
        low_N1 = torch.where(is_kept_N1, low_N1, middle_N1)
    keep_NV = (below_NV >= low_N1) | (rows.top_p_N[:, None] >= 1)
    return (keep_NV & (weights_NV >= rows.min_p_N[:, None])) | (below_NV == 0)


def _kept_of_sorted(sorted_NV: Tensor, rows: Rows) -> Tensor:
    return kept_of_sorted(sorted_NV, rows.top_k_N, rows.top_p_N, rows.min_p_N)
