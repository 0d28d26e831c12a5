"""What the ranks of a run share out, from the keys."""

from __future__ import annotations

from surogate_core.config.schema import RunConfig

EXACT_RANKS = (1, 2, 4, 8)
"""Numbers of ranks among which an exact run has equal bits."""


def level(config: RunConfig) -> int:
    """The ZeRO level of the trained state; 0 with `lora`, whose trained state every rank keeps.

    It does not depend on the number of GPUs, because the order of an exact sum follows it.
    """
    if config.lora:
        return 0
    return max(config.zero_level, 2 if config.shard_gradients else 0, 3 if config.shard_weights else 0)


def shards_base(config: RunConfig) -> bool:
    """Whether each rank keeps only its part of the weights between their uses."""
    return config.shard_weights or config.zero_level == 3


def exact(config: RunConfig) -> bool:
    """Whether gradients are added in an order that does not depend on the number of ranks."""
    if config.exact_reduction == "auto":
        return config.lora and not config.offload_grads and config.gpus in EXACT_RANKS
    return config.exact_reduction
