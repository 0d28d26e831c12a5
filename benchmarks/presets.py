"""Configurations of the published shapes that benchmarks run. torch is not imported, so that no peer pays for it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

import surogate_model_qwen3.presets
import surogate_model_qwen3_moe.presets

DENSE = surogate_model_qwen3.presets.PRESETS
SPARSE = {f"moe-{name}": config for name, config in surogate_model_qwen3_moe.presets.PRESETS.items()}


def installed_families() -> dict[str, str]:
    """Family → package of each other distribution ``surogate-model-…`` here."""
    found = [point for point in entry_points(group="surogate") if point.name.startswith("model-")]
    named = (surogate_model_qwen3.__name__, surogate_model_qwen3_moe.__name__)
    return {point.name.removeprefix("model-"): point.value for point in found if point.value not in named}


FAMILIES = {
    f"{family}-{name}": (package, config)
    for family, package in sorted(installed_families().items())
    for name, config in import_module(f"{package}.presets").PRESETS.items()
}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    **DENSE,
    **SPARSE,
    **{name: config for name, (_, config) in FAMILIES.items()},
}
"""Name → config.json: Qwen3's by their size, its MoE's after ``moe-``, other families' after their name."""
