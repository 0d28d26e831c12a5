"""Surogate plugin: the Llama 3 model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import dsl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the options `model=llama…` are."""
    return "pkg://surogate_model_llama.conf"


@hookimpl
def surogate_model_family() -> bundles.ModelFamily:
    """Llama 3, 3.1, 3.2, 3.3."""
    from surogate_model_llama.presets import PRESETS

    return bundles.ModelFamily(
        name="llama", hf_model_types=("llama",), build=_build, presets=PRESETS, exports={"gguf": _gguf}
    )


def _build(config: Mapping[str, Any]) -> dsl.Model:
    # torch is imported when a model is built, not when a configuration is checked.
    from surogate_model_llama.model import build

    return build(config)


def _gguf(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a GGUF file needs to know."""
    biases = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    return {"arch": "llama", "biases": biases, "interleaved": True, "has_frequency_factors": True}
