"""Surogate plugin: the SmolLM3 model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import UserError, bundles, hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import dsl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the options `model=smollm3…` are."""
    return "pkg://surogate_model_smollm3.conf"


@hookimpl
def surogate_model_family() -> bundles.ModelFamily:
    """SmolLM3."""
    from surogate_model_smollm3.presets import PRESETS

    return bundles.ModelFamily(
        name="smollm3", hf_model_types=("smollm3",), build=_build, presets=PRESETS, exports={"gguf": _gguf}
    )


def _build(config: Mapping[str, Any]) -> dsl.Model:
    # torch is imported when a model is built, not when a configuration is checked.
    from surogate_model_smollm3.model import build

    return build(config)


def _gguf(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a GGUF file needs to know. Raises `UserError` for what llama.cpp does not compute."""
    layers, given = int(config["num_hidden_layers"]), config.get("no_rope_layers")
    interval = config.get("no_rope_layer_interval") or 4
    rotated = given or [int((number + 1) % interval != 0) for number in range(layers)]
    if [bool(one) for one in rotated[:layers]] != [(number + 1) % 4 != 0 for number in range(layers)]:
        raise UserError(
            "--format gguf: config.json: `no_rope_layers` is not every fourth layer, which llama.cpp assumes. "
            "Fix: serve the model with transformers or vLLM."
        )
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise UserError(
            "--format gguf: config.json: `use_sliding_window`: llama.cpp computes this model without a window. "
            "Fix: serve the model with transformers or vLLM."
        )
    return {"arch": "smollm3", "interleaved": True}
