"""Whether a model and its recipe can share out experts among several GPUs."""

from __future__ import annotations

import math

from surogate_core.bundles import Recipe
from surogate_core.config.schema import RunConfig
from surogate_core.dsl import Model
from surogate_core.errors import ConfigError, Problem


def check_shares_experts(config: RunConfig, model: Model, recipe: Recipe) -> None:
    """Raise `ConfigError` if several GPUs are to share out experts and cannot do so evenly, or not even out loads."""
    size, found = config.ep_size, model.expert_slots()
    if size == 1:
        return
    counts = {slot.count for slots in found.values() for slot in slots}
    odd = next((count for count in sorted(counts) if count % size), None)
    if not counts:
        message = f"is {size}, and the model has no experts that GPUs could share out."
        raise ConfigError([Problem(key="ep_size", message=message, fix="ep_size: 1")])
    if odd is not None:
        message = f"is {size} and does not divide the {odd} experts of a layer."
        fix = f"ep_size: {math.gcd(odd, size)}, or another divisor of {odd}"
        raise ConfigError([Problem(key="ep_size", message=message, fix=fix)])
    if config.ep_load_balance_threshold is not None and recipe.grouped is not None and recipe.expert_parts is None:
        key = "ep_load_balance_threshold"
        message = (
            f"is set, and recipe {config.recipe.name} keeps or scales a GPU's experts together, so that none can be "
            f"sent alone."
        )
        raise ConfigError([Problem(key=key, message=message, fix=f"{key}: null, or recipe: bf16")])
