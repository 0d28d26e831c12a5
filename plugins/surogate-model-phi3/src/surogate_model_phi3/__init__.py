"""Surogate plugin: the Phi-4 and Phi-3 model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import dsl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the options `model=phi3…` are."""
    return "pkg://surogate_model_phi3.conf"


@hookimpl
def surogate_model_family() -> bundles.ModelFamily:
    """Phi-3, Phi-3.5, Phi-4 and Phi-4-mini."""
    from surogate_model_phi3.presets import PRESETS

    return bundles.ModelFamily(
        name="phi3", hf_model_types=("phi3",), build=_build, presets=PRESETS, exports={"gguf": _gguf}
    )


def _build(config: Mapping[str, Any]) -> dsl.Model:
    # torch is imported when a model is built, not when a configuration is checked.
    from surogate_model_phi3.model import build

    return build(config)


def _gguf(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a GGUF file needs to know. Raises `UserError` for what llama.cpp does not compute."""
    from surogate_model_phi3.model import build

    model = build(config)
    (rope,), config = model.ropes().values(), model.complete_config()
    window = config.get("sliding_window")
    fits = {
        "sliding_window": not window or window >= model.positions,
        "head_dim": config["head_dim"] * config["num_attention_heads"] == config["hidden_size"],
    }
    bundles.check_export("gguf", "llama.cpp's phi3", fits)
    # Without the key some versions of llama.cpp take a window from the size of the model.
    figures = {"attention.sliding_window": 0}
    if rope.kind != "longrope":
        return {"arch": "phi3", "figures": figures}
    return {
        "arch": "phi3",
        "figures": {
            **figures,
            "rope.scaling.original_context_length": int(rope.original),
            "rope.scaling.attn_factor": float(rope.amplitude),
        },
        "vectors": {f"rope_factors_{which}.weight": rope.parameters[f"{which}_factor"] for which in ("long", "short")},
        "rope": {
            "rope_scaling": None,
            "rope_parameters": {"rope_theta": rope.theta, "partial_rotary_factor": rope.partial},
        },
        "notes": (
            f"llama.cpp chooses the factors of longrope by the length of its context: with more than "
            f"{int(rope.original):,} positions every text has the long ones, and with fewer none can grow beyond.",
        ),
    }
