"""Surogate plugin: the Gemma 4 model family (text)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import dsl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the options `model=gemma4…` are."""
    return "pkg://surogate_model_gemma4.conf"


@hookimpl
def surogate_model_family() -> bundles.ModelFamily:
    """Gemma 4, its text models without inputs of their own for each layer."""
    from surogate_model_gemma4.presets import PRESETS

    return bundles.ModelFamily(name="gemma4", hf_model_types=("gemma4_text",), build=_build, presets=PRESETS)


def _build(config: Mapping[str, Any]) -> dsl.Model:
    # torch is imported when a model is built, not when a configuration is checked.
    from surogate_model_gemma4.model import build

    return build(config)
