"""Surogate plugin: the Qwen2.5 dense model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import UserError, bundles, hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import dsl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the options `model=qwen2…` are."""
    return "pkg://surogate_model_qwen2.conf"


@hookimpl
def surogate_model_family() -> bundles.ModelFamily:
    """Qwen2 and Qwen2.5, dense."""
    from surogate_model_qwen2.presets import PRESETS

    return bundles.ModelFamily(
        name="qwen2", hf_model_types=("qwen2",), build=_build, presets=PRESETS, exports={"gguf": _gguf}
    )


def _build(config: Mapping[str, Any]) -> dsl.Model:
    # torch is imported when a model is built, not when a configuration is checked.
    from surogate_model_qwen2.model import build

    return build(config)


def _gguf(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a GGUF file needs to know. Raises `UserError` for what llama.cpp does not compute."""
    head_dim = config.get("head_dim")
    if head_dim and config["num_attention_heads"] * head_dim != config["hidden_size"]:
        raise UserError(
            "--format gguf: config.json: `head_dim` is another width of attention than hidden_size, which qwen2 lacks. "
            "Fix: serve the model with transformers or vLLM."
        )
    return {"arch": "qwen2", "biases": ("attn_q", "attn_k", "attn_v")}
