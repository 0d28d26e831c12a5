"""Surogate plugin: frozen base weights in NF4 (QLoRA, arXiv 2305.14314)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surogate_core import bundles, hookimpl

if TYPE_CHECKING:
    import torch

SUROGATE_API = ">=1,<2"


def note(device: torch.device, settings: bundles.WeightSettings) -> str | None:
    """What slows the format down on the device, or None."""
    if device.type != "cuda":
        return None
    from surogate_core.kernels.native import missing_cupy

    reason = missing_cupy()
    return None if reason is None else f"weights are unpacked from NF4 by plain torch, which is slow. {reason}"


@hookimpl
def surogate_weight_format() -> bundles.WeightFormat:
    """The format."""

    def nbytes(*arguments: Any) -> int:
        from surogate_quant_nf4.nf4 import nbytes

        return nbytes(*arguments)

    # torch is imported when the format is used, not when it is listed.
    def pack(*arguments: Any) -> Any:
        from surogate_quant_nf4.nf4 import pack

        return pack(*arguments)

    def unpack(*arguments: Any) -> None:
        from surogate_quant_nf4.nf4 import unpack

        unpack(*arguments)

    return bundles.WeightFormat(
        name="nf4",
        nbytes=nbytes,
        pack=pack,
        unpack=unpack,
        keys=("qlora_bnb_block_size", "qlora_bnb_double_quant"),
        note=note,
    )
