"""Whether a server's log-probabilities are those that a loss needs: `--logprobs-mode`.

vLLM sends them before temperature and filters (``raw_logprobs``, its default), or after both (``processed_logprobs``).
A loss needs them after the temperature and before the filters.
"""

from __future__ import annotations

from statistics import fmean

from surogate_core.plugin import MachineError, UserError, bundles
from surogate_rollout_vllm.client import Client
from surogate_rollout_vllm.wire import completed, scored

RAW, PROCESSED = "raw_logprobs", "processed_logprobs"
HOT = 4.0
"""Temperature of the probe, at which the two differ much more than by rounding."""
TOKENS = 16
"""Tokens of the probe."""


def mode_for(sampling: bundles.Sampling) -> str | None:
    """The mode that gives the loss its log-probabilities; None if no loss reads them or both modes are right.

    Raises `UserError` if neither is.
    """
    if not sampling.tempered_logprobs:
        return None
    tempered = sampling.temperature not in (0, 1)
    filtered = bool(sampling.top_k) or sampling.top_p < 1 or sampling.min_p > 0 or sampling.repetition_penalty != 1
    if tempered and filtered:
        raise UserError(
            f"rollout vllm: temperature={sampling.temperature:g} and a filter (top_k, top_p or min_p) do not work "
            "together: vLLM sends log-probabilities before both or after both, and the loss needs them in between. "
            "Fix: temperature=1, no filter, or rollout=native"
        )
    return PROCESSED if tempered else RAW if filtered else None


def check_mode(client: Client, model: str, request: bundles.Request, wanted: str, tolerance: float) -> None:
    """Compare the log-probabilities of a completion at a high temperature with those of the same tokens in a prompt,
    which are always raw. Raises `MachineError` if the server has the other mode.
    """
    hot = bundles.Request(
        prompt=request.prompt,
        max_new_tokens=max(1, min(TOKENS, request.max_new_tokens - 1)),
        number=request.number,
        sampling=bundles.Sampling(temperature=HOT, seed=request.sampling.seed),
    )
    found = completed(client, hot, model)
    raw = scored(client, model, (*hot.prompt, *found.ids))[-len(found.ids) :]
    apart = fmean(abs(a - b) for a, b in zip(found.logprobs, raw, strict=True))
    if (PROCESSED if apart > tolerance else RAW) != wanted:
        order, use = ("before", "") if wanted == PROCESSED else ("after", " with top_k, top_p or min_p")
        raise MachineError(
            f"rollout vllm: {client.url} sends log-probabilities {order} temperature and filters, which the loss "
            f"cannot use at temperature={request.sampling.temperature:g}{use}. Fix: serve with --logprobs-mode {wanted}"
        )
