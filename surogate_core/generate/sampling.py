"""The choice of the next token.

Each row is a function of its own logits and key, so neighbours do not matter. Shape suffixes: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from surogate_core.bundles import Request, Sampling
from surogate_core.kernels.decoding import choose_tokens, noisy, scaled


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
    filters: bool
    """Whether any row keeps only some tokens."""

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
            filters=any(s.top_k or s.top_p < 1 or s.min_p > 0 for s in samplings),
        )


def choose(logits_NV: Tensor, rows: Rows, seen_NV: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(tokens_N int64, log-probabilities_N fp32 under the model itself).

    `seen_NV`: the tokens that the repetition penalty applies to.
    """
    if seen_NV is None and not rows.filters:
        return choose_tokens(logits_NV, rows.temperature_N, rows.keys_N2, rows.positions_N)
    logits_NV = logits_NV.float()
    scores_NV = logits_NV
    if seen_NV is not None:
        penalty_N1 = rows.penalty_N[:, None]
        penalised = torch.where(scores_NV > 0, scores_NV / penalty_N1, scores_NV * penalty_N1)
        scores_NV = torch.where(seen_NV, penalised, scores_NV)
    scores_NV = scaled(scores_NV, rows.temperature_N)
    if rows.filters:
        scores_NV = scores_NV.masked_fill(~kept(scores_NV, rows) & (rows.temperature_N[:, None] != 0), float("-inf"))
    tokens_N = noisy(scores_NV, rows.temperature_N, rows.keys_N2, rows.positions_N).argmax(dim=-1)
    return tokens_N, torch.log_softmax(logits_NV, dim=-1).gather(1, tokens_N[:, None])[:, 0]


def kept(scores_NV: Tensor, rows: Rows) -> Tensor:
    """[N, V] bool: what top-k, top-p and min-p keep, in this order; the most probable token always."""
    sorted_NV, order_NV = scores_NV.sort(dim=-1, descending=True, stable=True)
    size = scores_NV.shape[1]
    k_N1 = torch.where(rows.top_k_N > 0, rows.top_k_N, size).clamp(max=size)[:, None]
    # Tokens that are as probable as the last of the k are kept too.
    keep_NV = sorted_NV >= sorted_NV.gather(1, k_N1 - 1)
    probabilities = torch.softmax(sorted_NV.masked_fill(~keep_NV, float("-inf")), dim=-1)
    before_NV = probabilities.cumsum(dim=-1) - probabilities
    keep_NV = keep_NV & ((before_NV < rows.top_p_N[:, None]) | (rows.top_p_N[:, None] >= 1))
    keep_NV = keep_NV & (probabilities >= rows.min_p_N[:, None] * probabilities[:, :1])
    keep_NV[:, 0] = True
    return torch.zeros_like(keep_NV).scatter(1, order_NV, keep_NV)
