"""Surogate plugin: the Qwen3 mixture-of-experts model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import UserError, bundles, hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import dsl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the options `model=qwen3-moe…` are."""
    return "pkg://surogate_model_qwen3_moe.conf"


@hookimpl
def surogate_model_family() -> bundles.ModelFamily:
    """Qwen3 with a mixture of experts."""
    from surogate_model_qwen3_moe.presets import PRESETS

    return bundles.ModelFamily(
        name="qwen3-moe", hf_model_types=("qwen3_moe",), build=_build, presets=PRESETS, exports={"gguf": _gguf}
    )


def _build(config: Mapping[str, Any]) -> dsl.Model:
    # torch is imported when a model is built, not when a configuration is checked.
    from surogate_model_qwen3_moe.model import build

    return build(config)


def _gguf(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a GGUF file needs to know. Raises `UserError` for what llama.cpp does not compute."""
    if not config.get("norm_topk_prob"):
        raise UserError(
            "--format gguf: config.json: `norm_topk_prob` is false; qwen3moe always divides the experts' weights by "
            "their sum. Fix: serve the model with transformers or vLLM."
        )
    figures = {
        "expert_count": config.get("num_local_experts") or config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
    }
    return {"arch": "qwen3moe", "figures": figures}
