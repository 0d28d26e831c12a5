"""AdamW with moments of 8 bits (arXiv 2110.02861), over all parameters of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surogate_core.bundles import OptimizerSettings, ParamGroup
from surogate_core.formats.adamw_8bit import BlockwiseAdamW


def build(groups: Sequence[ParamGroup], settings: OptimizerSettings, options: Any) -> BlockwiseAdamW:
    """The optimizer with zeroed state."""
    return BlockwiseAdamW(groups, settings)
