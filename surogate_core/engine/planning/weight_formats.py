"""Plans which frozen weights a weight format stores, and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from surogate_core.bundles import WeightFormat
from surogate_core.dsl.experts import expanded
from surogate_core.engine.planning.pieces import PackedWeight, Piece

ROW_ALIGNMENT = 16
"""Alignment in bytes of each expert's packed weight."""


def plan_format(
    found: Sequence[Piece],
    weight_format: WeightFormat | None,
    skips: Callable[[str], bool] = lambda name: False,
) -> dict[str, PackedWeight]:
    """How the format stores each frozen weight of a slot, by HF name; empty without a format.

    `skips`: whether the format skips the weight of an HF name.
    """
    if weight_format is None:
        return {}
    made: dict[tuple[int, ...], PackedWeight] = {}
    packed: dict[str, PackedWeight] = {}
    for piece in found:
        slots = {f"{slot.name}.weight" for slot in piece.slots} | {f"{e.name}.weight" for e in piece.experts}
        for spec in piece.specs:
            if spec.name not in slots or spec.trainable:
                continue
            # Experts share one form: all of them stay unchanged if the format skips one.
            if not any(map(skips, expanded(spec.hf_name, spec.shape))):
                if spec.shape not in made:
                    made[spec.shape] = _packed(weight_format, spec.shape)
                packed[spec.hf_name] = made[spec.shape]
    return packed


def _packed(weight_format: WeightFormat, shape: tuple[int, ...]) -> PackedWeight:
    *experts, outputs, inputs = shape
    nbytes = weight_format.nbytes(outputs, inputs)
    if not experts:
        return PackedWeight(pack=weight_format.pack, unpack=weight_format.unpack, shape=(nbytes,), dtype=torch.uint8)
    row = -(-nbytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
    return PackedWeight(
        pack=weight_format.pack,
        unpack=weight_format.unpack_experts,
        shape=(*experts, row),
        dtype=torch.uint8,
        expert=nbytes,
    )
