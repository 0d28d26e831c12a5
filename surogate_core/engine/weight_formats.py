"""Plans which frozen weights a weight format stores, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from surogate_core.bundles import WeightFormat
from surogate_core.engine.pieces import Packed, Piece


def plan_format(
    found: Sequence[Piece],
    weight_format: WeightFormat | None,
    skips: Callable[[str], bool] = lambda name: False,
) -> dict[str, Packed]:
    """How the format stores each frozen weight of a slot, by HF name; empty without a format.

    `skips`: whether the format skips the weight of an HF name.
    """
    if weight_format is None:
        return {}
    made: dict[tuple[int, ...], Packed] = {}
    packed: dict[str, Packed] = {}
    for piece in found:
        slots = {f"{slot.name}.weight" for slot in piece.slots}
        for spec in piece.specs:
            if spec.name in slots and not spec.trainable and not skips(spec.hf_name):
                if spec.shape not in made:
                    made[spec.shape] = _packed(weight_format, spec.shape)
                packed[spec.hf_name] = made[spec.shape]
    return packed


def _packed(weight_format: WeightFormat, shape: tuple[int, ...]) -> Packed:
    nbytes = weight_format.nbytes(shape[0], shape[1])
    return Packed(pack=weight_format.pack, unpack=weight_format.unpack, shape=(nbytes,), dtype=torch.uint8)
