"""Surogate plugin: the Nemotron-H model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_core.plugin import dsl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the options `model=nemotron-h…` are."""
    return "pkg://surogate_model_nemotron_h.conf"


@hookimpl
def surogate_model_family() -> bundles.ModelFamily:
    """Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano."""
    from surogate_model_nemotron_h.presets import PRESETS

    return bundles.ModelFamily(name="nemotron-h", hf_model_types=("nemotron_h",), build=_build, presets=PRESETS)


def _build(config: Mapping[str, Any]) -> dsl.Model:
    # torch is imported when a model is built, not when a configuration is checked.
    from surogate_model_nemotron_h.model import build

    return build(config)
