"""Surogate plugin: frozen base weights in MXFP4."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_quant_mxfp4.mxfp4 import MXFP4Format

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_weight_format() -> bundles.WeightFormatSpec:
    """The format."""
    return bundles.WeightFormatSpec(name="mxfp4", build=build, adopts=("MXFP4",))


def build(options: object) -> MXFP4Format:
    """The format, which has no options."""
    # torch is imported when the format is used, not when it is listed.
    from surogate_quant_mxfp4.mxfp4 import MXFP4Format

    return MXFP4Format()
