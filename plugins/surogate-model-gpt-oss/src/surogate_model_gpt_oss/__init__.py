"""Surogate plugin: the gpt-oss model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import dsl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the options `model=gpt-oss…` are."""
    return "pkg://surogate_model_gpt_oss.conf"


@hookimpl
def surogate_model_family() -> bundles.ModelFamily:
    """gpt-oss."""
    from surogate_model_gpt_oss.presets import PRESETS

    return bundles.ModelFamily(
        name="gpt-oss", hf_model_types=("gpt_oss",), build=_build, presets=PRESETS, exports={"gguf": _gguf}
    )


def _build(config: Mapping[str, Any]) -> dsl.Model:
    # torch is imported when a model is built, not when a configuration is checked.
    from surogate_model_gpt_oss.model import build

    return build(config)


def _gguf(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a GGUF file needs to know. Raises `UserError` for what llama.cpp does not compute."""
    from surogate_model_gpt_oss.model import build

    model = build(config)
    (rope,), config = model.ropes().values(), model.config
    slides = [kind == "sliding_attention" for kind in model.layer_types]
    fits = {
        "layer_types": slides == [number % 2 == 0 for number in range(len(slides))],
        "swiglu_limit": config["swiglu_limit"] == 7,
        "swiglu_alpha": config["swiglu_alpha"] == 1.702,
        "attention_bias": bool(config["attention_bias"]),
        "tie_word_embeddings": not model.tied,
    }
    bundles.check_export("gguf", "llama.cpp's gpt-oss", fits)
    gate_up, down = (f"model.layers.{{}}.mlp.experts.{name}_proj" for name in ("gate_up", "down"))
    gate, up = slice(0, None, 2), slice(1, None, 2)
    rounded = rope.kind == "yarn" and not rope.parameters.get("truncate", True)
    return {
        "arch": "gpt-oss",
        "biases": (
            *("attn_q", "attn_k", "attn_v", "attn_output"),
            *("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
        ),
        "tensors": {
            "model.layers.{}.self_attn.sinks": "blk.{}.attn_sinks.weight",
            gate_up: {"blk.{}.ffn_gate_exps": gate, "blk.{}.ffn_up_exps": up},
            f"{gate_up}_bias": {"blk.{}.ffn_gate_exps.bias": gate, "blk.{}.ffn_up_exps.bias": up},
            f"{down}_bias": "blk.{}.ffn_down_exps.bias",
        },
        "figures": {
            "attention.sliding_window": model.window,
            "expert_count": config["num_local_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["intermediate_size"],
        },
        "rope": {
            "rope_parameters": {**rope.parameters, "rope_theta": rope.theta, "truncate": True},
            "rope_scaling": None,
        },
        "notes": (
            "llama.cpp rounds the ends of YaRN's ramp, which the model does not: angles of the features between "
            "differ, as in every GGUF file of gpt-oss.",
        )
        if rounded
        else (),
    }
