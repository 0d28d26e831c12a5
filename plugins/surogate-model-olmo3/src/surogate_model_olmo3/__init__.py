"""Surogate plugin: the OLMo 2 and 3 model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import dsl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the options `model=olmo3…` are."""
    return "pkg://surogate_model_olmo3.conf"


@hookimpl
def surogate_model_family() -> bundles.ModelFamily:
    """OLMo 2 and 3."""
    from surogate_model_olmo3.presets import PRESETS

    return bundles.ModelFamily(name="olmo3", hf_model_types=("olmo3", "olmo2"), build=_build, presets=PRESETS)


def _build(config: Mapping[str, Any]) -> dsl.Model:
    # torch is imported when a model is built, not when a configuration is checked.
    from surogate_model_olmo3.model import build

    return build(config)
