"""Surogate plugin: the Gemma 4 model family (text)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import UserError, bundles, hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import dsl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the options `model=gemma4…` are."""
    return "pkg://surogate_model_gemma4.conf"


@hookimpl
def surogate_model_family() -> bundles.ModelFamily:
    """Gemma 4, its text models."""
    from surogate_model_gemma4.presets import PRESETS

    return bundles.ModelFamily(
        name="gemma4", hf_model_types=("gemma4_text",), build=_build, presets=PRESETS, exports={"gguf": _gguf}
    )


def _build(config: Mapping[str, Any]) -> dsl.Model:
    # torch is imported when a model is built, not when a configuration is checked.
    from surogate_model_gemma4.model import build

    return build(config)


def _gguf(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a GGUF file needs to know. Raises `UserError` for what llama.cpp does not compute, and for what is not
    written.
    """
    from surogate_model_gemma4.model import build

    model = build(config)
    _check_gguf(model)
    config, types = model.config, model.layer_types
    ropes = model.ropes()
    full = ropes.get("_full_attention") or ropes[""]
    sliding = ropes.get("_sliding_attention") or full
    fits = {
        "rope_parameters": full.kind in ("default", "proportional")
        and sliding.kind == "default"
        and float(full.parameters.get("factor") or 1) == 1
        and sliding.partial == 1
        and (full.kind == "proportional" or full.partial == 1)
    }
    bundles.check_export("gguf", "llama.cpp's gemma4", fits)
    turning = int(full.partial * full.head_dim // 2)
    keys = {kind: int(model.type_config(kind)["num_key_value_heads"]) for kind in set(types)}
    figures: dict[str, Any] = {
        "attention.head_count_kv": [keys[kind] for kind in types],
        "attention.key_length_swa": sliding.head_dim,
        "attention.value_length_swa": sliding.head_dim,
        "attention.shared_kv_layers": 0,
        "attention.sliding_window": model.window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in types],
        "embedding_length_per_layer_input": 0,
        "rope.dimension_count_swa": sliding.rotary,
        "rope.freq_base_swa": float(sliding.theta),
    }
    if cap := config.get("final_logit_softcapping"):
        figures["final_logit_softcapping"] = float(cap)
    if config.get("enable_moe_block"):
        figures |= {
            "expert_count": config["num_experts"],
            "expert_used_count": config["top_k_experts"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    return {
        "arch": "gemma4",
        "tensors": {
            "model.layers.{}.layer_scalar": "blk.{}.layer_output_scale.weight",
            "model.layers.{}.router.scale": "blk.{}.ffn_gate_inp.scale",
            "model.layers.{}.router.per_expert_scale": "blk.{}.ffn_down_exps.scale",
        },
        # Frequencies that do not turn are divided by a number that no position reaches.
        "vectors": {"rope_freqs.weight": [1.0] * turning + [1e30] * (full.head_dim // 2 - turning)},
        "figures": figures,
        "rope": {
            "head_dim": full.head_dim,
            "rope_parameters": {"rope_type": "default", "rope_theta": full.theta},
            "rope_scaling": None,
        },
    }


def _check_gguf(model: dsl.Model) -> None:
    """Raise `UserError` for what is not written."""
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if model.config.get(key):
            raise UserError(
                f"--format gguf: config.json: `{key}` is {model.config[key]}, and inputs of layers and shared layers "
                f"are not written as GGUF. Fix: serve the model with transformers or vLLM."
            )
