"""Surogate plugin: frozen base weights in NF4 (QLoRA, arXiv 2305.14314)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    from surogate_quant_nf4.nf4 import NF4

SUROGATE_API = ">=2,<3"


@dataclass(frozen=True, slots=True, kw_only=True)
class NF4Options:
    """Options of the weight format nf4."""

    block_size: Annotated[Literal[64, 128, 256, 512], bundles.Flat("qlora_bnb_block_size", essential=True)] = 64
    """Values that share an absmax."""
    double_quant: Annotated[bool, bundles.Flat("qlora_bnb_double_quant", essential=True)] = True
    """Keep the absmax in 8 bits, in groups of 256."""


@hookimpl
def surogate_weight_format() -> bundles.WeightFormatSpec:
    """The format."""
    return bundles.WeightFormatSpec(name="nf4", flag="qlora_bnb", build=build, options=NF4Options)


def build(options: NF4Options) -> NF4:
    """The format with its options."""
    # torch is imported when the format is used, not when it is listed.
    from surogate_quant_nf4.nf4 import NF4

    return NF4(options)
