"""How many tokens a model of a size can use."""

from __future__ import annotations

TOKENS_PER_PARAMETER = 20
"""Tokens for each parameter at which training compute is spent best (arXiv 2203.15556, table 3)."""


def token_budget(parameters: int) -> int:
    """Tokens that training a model of `parameters` from random weights is worth."""
    return TOKENS_PER_PARAMETER * parameters


def adjusted_epochs(parameters: int, tokens_per_epoch: int) -> float:
    """Epochs over `tokens_per_epoch` tokens that make up the token budget; a part of one if the data is larger."""
    return token_budget(parameters) / max(1, tokens_per_epoch)
