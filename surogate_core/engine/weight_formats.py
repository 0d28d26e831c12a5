"""Which frozen weights a weight format keeps, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from surogate_core.bundles import WeightFormat, WeightSettings
from surogate_core.engine.parameters import Packed, Piece


def plan_format(
    found: Sequence[Piece],
    weight_format: WeightFormat | None,
    settings: WeightSettings | None,
    skips: Callable[[str], bool] = lambda name: False,
) -> dict[str, Packed]:
    """How the format keeps each frozen weight of a slot, by HF name; none without a format.

    `skips`: whether the weight of an HF name stays as it is.
    """
    if weight_format is None:
        return {}
    known = settings or WeightSettings()
    made: dict[tuple[int, ...], Packed] = {}
    packed: dict[str, Packed] = {}
    for piece in found:
        slots = {f"{slot.name}.weight" for slot in piece.slots}
        for spec in piece.specs:
            if spec.name in slots and not spec.trainable and not skips(spec.hf_name):
                if spec.shape not in made:
                    made[spec.shape] = _packed(weight_format, known, spec.shape)
                packed[spec.hf_name] = made[spec.shape]
    return packed


def _packed(weight_format: WeightFormat, settings: WeightSettings, shape: tuple[int, ...]) -> Packed:
    def pack(weight_OI: Tensor) -> Tensor:
        return weight_format.pack(weight_OI, settings)

    def unpack(kept: Tensor, room_OI: Tensor) -> None:
        weight_format.unpack(kept, room_OI, settings)

    nbytes = weight_format.nbytes(shape[0], shape[1], settings)
    return Packed(pack=pack, unpack=unpack, shape=(nbytes,), dtype=torch.uint8)
