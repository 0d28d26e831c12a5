"""Surogate plugin: frozen base weights in FP8 with a scale for each square block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_quant_fp8.fp8 import FP8

SUROGATE_API = ">=2,<3"


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8FormatOptions:
    """Options of the weight format fp8."""

    block_size: Annotated[Literal[32, 64, 128, 256], bundles.Flat("qlora_block_size", essential=True)] = 128
    """Side of a block that shares a scale."""


@hookimpl
def surogate_weight_format() -> bundles.WeightFormatSpec:
    """The format."""
    return bundles.WeightFormatSpec(
        name="fp8", flag="qlora_fp8", build=build, options=FP8FormatOptions, adopts=("fine-grained FP8",)
    )


def build(options: FP8FormatOptions) -> FP8:
    """The format with its options."""
    # torch is imported when the format is used, not when it is listed.
    from surogate_quant_fp8.fp8 import FP8

    return FP8(options)
