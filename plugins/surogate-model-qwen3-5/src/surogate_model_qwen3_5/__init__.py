"""Surogate plugin: the Qwen3.5 model family (text), with experts and without, and Qwen3-Next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import dsl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the options `model=qwen3-5…` are."""
    return "pkg://surogate_model_qwen3_5.conf"


@hookimpl
def surogate_model_family() -> bundles.ModelFamily:
    """Qwen3.5's language models and Qwen3-Next."""
    from surogate_model_qwen3_5.presets import PRESETS

    types = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
    return bundles.ModelFamily(name="qwen3-5", hf_model_types=types, build=_build, presets=PRESETS)


def _build(config: Mapping[str, Any]) -> dsl.Model:
    # torch is imported when a model is built, not when a configuration is checked.
    from surogate_model_qwen3_5.model import build

    return build(config)
