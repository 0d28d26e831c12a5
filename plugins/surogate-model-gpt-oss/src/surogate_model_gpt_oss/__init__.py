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

    return bundles.ModelFamily(name="gpt-oss", hf_model_types=("gpt_oss",), build=_build, presets=PRESETS)


def _build(config: Mapping[str, Any]) -> dsl.Model:
    # torch is imported when a model is built, not when a configuration is checked.
    from surogate_model_gpt_oss.model import build

    return build(config)
