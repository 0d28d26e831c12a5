"""Surogate plugin: the Mistral model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import UserError, bundles, hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import dsl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the options `model=mistral…` are."""
    return "pkg://surogate_model_mistral.conf"


@hookimpl
def surogate_model_family() -> bundles.ModelFamily:
    """Mistral 7B, Nemo, Small, and Ministral 8B."""
    from surogate_model_mistral.presets import PRESETS

    return bundles.ModelFamily(
        name="mistral", hf_model_types=("mistral", "ministral"), build=_build, presets=PRESETS, exports={"gguf": _gguf}
    )


def _build(config: Mapping[str, Any]) -> dsl.Model:
    # torch is imported when a model is built, not when a configuration is checked.
    from surogate_model_mistral.model import build

    return build(config)


def _gguf(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a GGUF file needs to know. Raises `UserError` for what llama.cpp does not compute."""
    window, positions = config.get("sliding_window", 4096), config.get("max_position_embeddings", 131072)
    if window is not None and window < positions:
        raise UserError(
            f"--format gguf: config.json: `sliding_window` is {window}, and llama.cpp lets every token of this model "
            f"see all {positions} positions. Fix: serve the model with transformers or vLLM."
        )
    return {"arch": "llama", "interleaved": True}
