"""The compute-optimal number of training tokens of a model."""

from __future__ import annotations

TOKENS_PER_PARAMETER = 20
"""Compute-optimal tokens per parameter (arXiv 2203.15556, table 3)."""


def token_budget(parameters: int) -> int:
    """Compute-optimal tokens for training `parameters` from random weights."""
    return TOKENS_PER_PARAMETER * parameters


def adjusted_epochs(parameters: int, tokens_per_epoch: int) -> float:
    """Epochs of `tokens_per_epoch` tokens that give the token budget; less than one if the data is larger."""
    return token_budget(parameters) / max(1, tokens_per_epoch)
