"""Surogate plugin: the Ministral 3 model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import dsl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the options `model=ministral3…` are."""
    return "pkg://surogate_model_ministral3.conf"


@hookimpl
def surogate_model_family() -> bundles.ModelFamily:
    """Ministral 3, its language model."""
    from surogate_model_ministral3.presets import PRESETS

    return bundles.ModelFamily(
        name="ministral3", hf_model_types=("ministral3",), build=_build, presets=PRESETS, exports={"gguf": _gguf}
    )


def _build(config: Mapping[str, Any]) -> dsl.Model:
    # torch is imported when a model is built, not when a configuration is checked.
    from surogate_model_ministral3.model import build

    return build(config)


def _gguf(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a GGUF file needs to know. Raises `UserError` for what llama.cpp does not compute."""
    from surogate_model_ministral3.model import BETA, build

    model = build(config)
    (rope,) = model.ropes().values()
    window, beta = model.config.get("sliding_window"), rope.parameters[BETA]
    fits = {
        "sliding_window": not window or window >= model.positions,
        "rope_parameters": rope.kind == "yarn" and rope.amplitude == 1,
    }
    bundles.check_export("gguf", "llama.cpp's mistral3", fits)
    # llama.cpp divides its own amplitude of YaRN by the one of this multiplier.
    figures = {"rope.scaling.yarn_log_multiplier": 1.0, "rope.scaling.attn_factor": 1.0}
    return {
        "arch": "mistral3",
        "interleaved": True,
        "figures": {**figures, **({"attention.temperature_scale": float(beta)} if beta else {})},
        "rope": {"rope_parameters": dict(rope.parameters), "rope_scaling": None},
    }
