"""Surogate plugin: frozen base weights in FP8 with a scale for each square block."""

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
    return None if reason is None else f"weights are unpacked from FP8 by plain torch, which is slow. {reason}"


@hookimpl
def surogate_weight_format() -> bundles.WeightFormat:
    """The format."""

    # torch is imported when the format is used, not when it is listed.
    def nbytes(*arguments: Any) -> int:
        from surogate_quant_fp8.fp8 import nbytes

        return nbytes(*arguments)

    def pack(*arguments: Any) -> Any:
        from surogate_quant_fp8.fp8 import pack

        return pack(*arguments)

    def unpack(*arguments: Any) -> None:
        from surogate_quant_fp8.fp8 import unpack

        unpack(*arguments)

    def adopt(*arguments: Any) -> Any:
        from surogate_quant_fp8.fp8 import adopt

        return adopt(*arguments)

    return bundles.WeightFormat(
        name="fp8", nbytes=nbytes, pack=pack, unpack=unpack, adopt=adopt, keys=("qlora_block_size",), note=note
    )
