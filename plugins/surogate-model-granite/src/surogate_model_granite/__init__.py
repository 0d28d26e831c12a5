"""Surogate plugin: the Granite model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import dsl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the options `model=granite…` are."""
    return "pkg://surogate_model_granite.conf"


@hookimpl
def surogate_model_family() -> bundles.ModelFamily:
    """Granite 3, dense."""
    from surogate_model_granite.presets import PRESETS

    return bundles.ModelFamily(
        name="granite", hf_model_types=("granite",), build=_build, presets=PRESETS, exports={"gguf": _gguf}
    )


def _build(config: Mapping[str, Any]) -> dsl.Model:
    # torch is imported when a model is built, not when a configuration is checked.
    from surogate_model_granite.model import build

    return build(config)


def _gguf(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a GGUF file needs to know."""
    names = {
        "attention.scale": "attention_multiplier",
        "embedding_scale": "embedding_multiplier",
        "residual_scale": "residual_multiplier",
        "logit_scale": "logits_scaling",
    }
    factors = {name: float(config.get(key) or 1.0) for name, key in names.items()}
    return {"arch": "granite", "interleaved": True, "figures": factors}
