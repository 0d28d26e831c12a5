"""Surogate plugin: the Gemma 3 model family (text)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import UserError, bundles, hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import dsl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the options `model=gemma3…` are."""
    return "pkg://surogate_model_gemma3.conf"


@hookimpl
def surogate_model_family() -> bundles.ModelFamily:
    """Gemma 3, its text model."""
    from surogate_model_gemma3.presets import PRESETS

    return bundles.ModelFamily(
        name="gemma3", hf_model_types=("gemma3_text",), build=_build, presets=PRESETS, exports={"gguf": _gguf}
    )


def _build(config: Mapping[str, Any]) -> dsl.Model:
    # torch is imported when a model is built, not when a configuration is checked.
    from surogate_model_gemma3.model import build

    return build(config)


def _gguf(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a GGUF file needs to know. Raises `UserError` for what llama.cpp does not compute."""
    from surogate_model_gemma3.model import build

    model = build(config)
    config, full, sliding = model.config, *map(model.rope_config, ("full_attention", "sliding_attention"))
    heads, features = config["num_attention_heads"], config["head_dim"]
    # llama.cpp knows the 27B model by its 62 layers.
    divisor = config["hidden_size"] // heads if config["num_hidden_layers"] == 62 else features
    sixth = ["full_attention" if number % 6 == 5 else "sliding_attention" for number in range(len(model.layer_types))]
    for key, fits in {
        "layer_types": list(model.layer_types) == sixth,
        "rope_local_base_freq": {"rope_type": "default", **sliding["rope_parameters"]}
        == {"rope_type": "default", "rope_theta": 1e4},
        "query_pre_attn_scalar": config["query_pre_attn_scalar"] == divisor,
        "final_logit_softcapping": not config.get("final_logit_softcapping"),
    }.items():
        if not fits:
            raise UserError(
                f"--format gguf: config.json: `{key}` has a value that llama.cpp does not read for gemma3. "
                f"Fix: serve the model with transformers or vLLM."
            )
    return {
        "arch": "gemma3",
        "figures": {"attention.sliding_window": config["sliding_window"]},
        "rope": {key: full[key] for key in ("rope_parameters", "rope_scaling")},
        "convert": lambda name, weight: weight.float() + 1 if name.endswith("norm.weight") else weight,
    }
