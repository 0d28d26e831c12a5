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
from surogate_core.kernels.decoding import choose_tokens, token_bounds

FORBIDDEN = -1e30
"""The score of a token that may not be chosen: no noise makes up for it, whatever the temperature divides it by."""


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
    """Whether some row may choose among some of its tokens only."""
    logprob_temperature_N: Tensor
    """What divides the logits of which the log-probabilities are: the temperature, or 1."""
    tempered: bool
    """Whether it is another value than 1 in some row."""

    @classmethod
    def of(
        cls,
        samplings: Sequence[Sampling],
        keys: Sequence[tuple[int, int]],
        positions: Sequence[int],
        device: torch.device,
    ) -> Rows:
        """The rows of these completions."""

        floats = torch.tensor([floats_of(s) for s in samplings], dtype=torch.float32, device=device).t().contiguous()
        return cls(
            **dict(zip(FLOATS, floats, strict=True)),
            top_k_N=torch.tensor([s.top_k for s in samplings], device=device),
            keys_N2=torch.tensor(list(keys), dtype=torch.int32, device=device),
            positions_N=torch.tensor(positions, dtype=torch.int32, device=device),
            filters=filtered(samplings),
            tempered=tempered(samplings),
        )


FLOATS = ("temperature_N", "top_p_N", "min_p_N", "penalty_N", "logprob_temperature_N")
"""The fields of `Rows` with what `floats_of` gives."""


def floats_of(sampling: Sampling) -> tuple[float, ...]:
    """What a row's choice depends on, in the order of `FLOATS`."""
    return (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        logprob_temperature(sampling),
    )


def filtered(samplings: Sequence[Sampling]) -> bool:
    """Whether one of them keeps only some tokens."""
    return any(s.top_k or s.top_p < 1 or s.min_p > 0 for s in samplings)


def logprob_temperature(sampling: Sampling) -> float:
    """What divides the logits of which a completion's log-probabilities are."""
    return sampling.temperature if sampling.tempered_logprobs and sampling.temperature > 0 else 1.0


def tempered(samplings: Sequence[Sampling]) -> bool:
    """Whether one of them wants log-probabilities at another temperature than 1."""
    return any(logprob_temperature(s) != 1 for s in samplings)


def choose(
    logits_NV: Tensor, rows: Rows, seen_NV: Tensor | None = None, allowed_NV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(tokens_N int64, log-probabilities_N fp32 of the logits over `Rows.logprob_temperature_N`).

    `seen_NV`: the tokens that the repetition penalty applies to. `allowed_NV`: those that may be chosen. The filters
    apply to what is allowed; the log-probabilities are those of all tokens.
    """
    scores_NV = logits_NV if seen_NV is None else _penalised(logits_NV.float(), rows, seen_NV)
    if allowed_NV is not None:
        # Kernels look at a row in parts, and of a part with nothing but infinities they get no number.
        scores_NV = scores_NV.float() if scores_NV.dtype == torch.float16 else scores_NV
        scores_NV = scores_NV.masked_fill(~allowed_NV, FORBIDDEN)
    bounds: tuple[Tensor, ...] = ()
    if rows.filters:
        bounds = token_bounds(scores_NV, rows.temperature_N, rows.top_k_N, rows.top_p_N, rows.min_p_N)
    tokens_N, logprobs_N = choose_tokens(scores_NV, rows.temperature_N, rows.keys_N2, rows.positions_N, *bounds)
    if seen_NV is not None or rows.tempered or allowed_NV is not None:
        logits_NV = logits_NV.float() / rows.logprob_temperature_N[:, None]
        all_N = torch.log_softmax(logits_NV, dim=-1).gather(1, tokens_N[:, None])[:, 0]
        # A row that asks for none of these keeps its bits: kernels add up in another order.
        plain_N = (rows.penalty_N == 1) & (rows.logprob_temperature_N == 1)
        if allowed_NV is not None:
            plain_N = plain_N & allowed_NV.all(dim=-1)
        logprobs_N = torch.where(plain_N, logprobs_N, all_N)
    return tokens_N, logprobs_N


def _penalised(scores_NV: Tensor, rows: Rows, seen_NV: Tensor) -> Tensor:
    penalty_N1 = rows.penalty_N[:, None]
    penalised = torch.where(scores_NV > 0, scores_NV / penalty_N1, scores_NV * penalty_N1)
    return torch.where(seen_NV, penalised, scores_NV)
