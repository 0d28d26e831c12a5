"""Surogate plugin: the OLMo 2 and 3 model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import dsl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the options `model=olmo3…` are."""
    return "pkg://surogate_model_olmo3.conf"


@hookimpl
def surogate_model_family() -> bundles.ModelFamily:
    """OLMo 2 and 3."""
    from surogate_model_olmo3.presets import PRESETS

    return bundles.ModelFamily(
        name="olmo3", hf_model_types=("olmo3", "olmo2"), build=_build, presets=PRESETS, exports={"gguf": _gguf}
    )


def _build(config: Mapping[str, Any]) -> dsl.Model:
    # torch is imported when a model is built, not when a configuration is checked.
    from surogate_model_olmo3.model import build

    return build(config)


def _gguf(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a GGUF file needs to know. Raises `UserError` for what llama.cpp does not compute."""
    from surogate_model_olmo3.model import build

    model = build(config)
    types, config = model.layer_types, model.complete_config()
    fits = {
        "tie_word_embeddings": not model.tied,
        "head_dim": config["head_dim"] * config["num_attention_heads"] == config["hidden_size"],
    }
    found: dict[str, Any] = {"arch": "olmo2"}
    if "sliding_attention" in types:
        full, ropes = model.rope_config("full_attention"), model.ropes()
        one = ropes.get("_sliding_attention") or ropes[""]
        other = ropes.get("_full_attention") or ropes[""]
        slides = [kind == "sliding_attention" for kind in types]
        fits |= {
            "layer_types": slides == [number % 4 != 3 for number in range(len(types))],
            "rope_parameters": one.kind == "default" and one.theta == other.theta,
        }
        found["figures"] = {
            "attention.sliding_window": model.window,
            "attention.sliding_window_pattern": slides,
        }
        keys = ("rope_parameters", "rope_scaling", "rope_theta")
        found["rope"] = {key: full[key] for key in keys if key in full}
    bundles.check_export("gguf", "llama.cpp's olmo2", fits)
    return found
