"""AdamW with moments of 8 bits (arXiv 2110.02861), over all parameters of a run."""

from __future__ import annotations

from collections.abc import Sequence

from surogate_core.bundles import ParamGroup
from surogate_core.formats.adamw_8bit import BlockwiseAdamW
from surogate_optimizer_adamw_8bit import AdamW8bitOptions


def build(groups: Sequence[ParamGroup], options: AdamW8bitOptions) -> BlockwiseAdamW:
    """The optimizer with zeroed state."""
    return BlockwiseAdamW(groups, beta1=options.beta1, beta2=options.beta2, epsilon=options.epsilon)
