"""AdamW with moments of 8 bits (arXiv 2110.02861), over all parameters of a run."""

from __future__ import annotations

from collections.abc import Sequence

from surogate_core.plugin import adamw_8bit, bundles
from surogate_optimizer_adamw_8bit import AdamW8bitOptions


def build(groups: Sequence[bundles.ParamGroup], options: AdamW8bitOptions) -> adamw_8bit.BlockwiseAdamW:
    """The optimizer with zeroed state."""
    return adamw_8bit.BlockwiseAdamW(groups, beta1=options.beta1, beta2=options.beta2, epsilon=options.epsilon)
