"""Surogate plugin: frozen base weights in NVFP4."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_quant_nvfp4.nvfp4 import NVFP4Format

SUROGATE_API = ">=2,<3"


@dataclass(frozen=True, slots=True, kw_only=True)
class NVFP4FormatOptions:
    """Options of the weight format nvfp4."""

    four_over_six: Annotated[bool, bundles.Flat("qlora_four_over_six", essential=True)] = True
    """Scale a block to 4 instead of 6 where that makes the squared error smaller."""
    search_scales: Annotated[bool, bundles.Flat("qlora_search_scales", essential=True)] = False
    """Choose each block's scale by its squared error among eleven E4M3 numbers, instead of one or two."""


@hookimpl
def surogate_weight_format() -> bundles.WeightFormatSpec:
    """The format."""
    return bundles.WeightFormatSpec(
        name="nvfp4",
        flag="qlora_fp4",
        build=build,
        options=NVFP4FormatOptions,
        adopts=("ModelOpt NVFP4", "compressed-tensors NVFP4"),
    )


def build(options: NVFP4FormatOptions) -> NVFP4Format:
    """The format with its options."""
    # torch is imported when the format is used, not when it is listed.
    from surogate_quant_nvfp4.nvfp4 import NVFP4Format

    return NVFP4Format(options)
