"""Surogate plugin: the GLM-4 model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import dsl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the options `model=glm4…` are."""
    return "pkg://surogate_model_glm4.conf"


@hookimpl
def surogate_model_family() -> bundles.ModelFamily:
    """GLM-4-0414, dense."""
    from surogate_model_glm4.presets import PRESETS

    return bundles.ModelFamily(
        name="glm4", hf_model_types=("glm4",), build=_build, presets=PRESETS, exports={"gguf": _gguf}
    )


def _build(config: Mapping[str, Any]) -> dsl.Model:
    # torch is imported when a model is built, not when a configuration is checked.
    from surogate_model_glm4.model import build

    return build(config)


def _gguf(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a GGUF file needs to know. llama.cpp rotates neighbouring features, as the model does."""
    return {"arch": "glm4", "biases": ("attn_q", "attn_k", "attn_v")}
