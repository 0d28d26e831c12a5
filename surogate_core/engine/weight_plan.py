"""How a run's weights are kept and multiplied: planned before any of them is allocated.

The engine and the prediction of what it will hold ask the same questions here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from surogate_core.bundles import FLAT_ALIGNMENT, Offloader, Recipe, WeightFormat, WeightSettings
from surogate_core.dsl.declare import TensorSpec
from surogate_core.dsl.slots import Join, LinearSlot, Panel
from surogate_core.dsl.trace import Compiler, Signature
from surogate_core.engine.parameters import Packed, Piece
from surogate_core.engine.weight_formats import plan_format
from surogate_core.formats import fp8 as scaled
from surogate_core.kernels import registry


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """What `Parameters` is told of a run, each by key of a piece or HF name of a weight."""

    panels: Mapping[str, tuple[Panel, ...]]
    joins: Mapping[str, tuple[Join, ...]]
    packed: Mapping[str, Packed]

    @classmethod
    def of(
        cls,
        found: Sequence[Piece],
        *,
        recipe: Recipe,
        recipe_options: Any,
        plain: frozenset[str],
        offloader: Offloader,
        kernels: registry.KernelTable,
        compiler: Compiler,
        dtype: torch.dtype,
        tokens: int,
        width: int,
        tables: Mapping[str, Signature],
        weight_format: WeightFormat | None,
        weight_settings: WeightSettings | None,
        skips: Callable[[str], bool],
    ) -> WeightPlan:
        """The plan of a run's pieces."""
        panels = plan_panels(
            found,
            recipe=recipe,
            recipe_options=recipe_options,
            plain=plain,
            formatted=weight_format is not None,
            kernels=kernels,
            dtype=dtype,
            tokens=tokens,
            width=width,
            tables=tables,
        )
        joins = plan_joins(
            found,
            recipe=recipe,
            compiler=compiler,
            dtype=dtype,
            tokens=tokens,
            width=width,
            tables=tables,
        )
        packed = plan_format(found, weight_format, weight_settings, skips) or plan_packing(
            found, recipe=recipe, recipe_options=recipe_options, plain=plain, panels=panels, dtype=dtype
        )
        if offloader.moves("weights"):
            packed = {**_into_panels(found, panels, dtype), **packed}
        return cls(panels=panels, joins=joins, packed=packed)


def _into_panels(
    found: Sequence[Piece], panels: Mapping[str, Sequence[Panel]], dtype: torch.dtype
) -> dict[str, Packed]:
    """Weights of panels that come from elsewhere: as they are, copied into one panel that the layers share."""
    packed: dict[str, Packed] = {}
    for piece in found:
        frozen = {s.name: s for s in piece.specs if not s.trainable}
        slots = [slot for panel in panels.get(piece.key, ()) if panel.shape.frozen for slot in panel.slots]
        for spec in (frozen[f"{slot.name}.weight"] for slot in slots):
            packed[spec.hf_name] = Packed(pack=_kept, shape=spec.shape, dtype=dtype, unpack=_copied, rounded=False)
    return packed


def _kept(weight_OI: Tensor) -> Tensor:
    return weight_OI


def _copied(kept_OI: Tensor, room_OI: Tensor) -> None:
    room_OI.copy_(kept_OI)


def plan_panels(
    found: Sequence[Piece],
    *,
    recipe: Recipe,
    recipe_options: Any,
    plain: frozenset[str],
    formatted: bool = False,
    kernels: registry.KernelTable,
    dtype: torch.dtype,
    tokens: int,
    width: int,
    tables: Mapping[str, Signature],
) -> dict[str, tuple[Panel, ...]]:
    """The panels of each piece, by key: where a kernel multiplies with panels.

    `formatted`: whether frozen weights rest in a weight format; a recipe then keeps them in none of its own.
    """
    margin = None if formatted else recipe.scaled_margin(recipe_options)
    planned: dict[Any, tuple[Panel, ...]] = {}
    panels: dict[str, tuple[Panel, ...]] = {}
    for piece in found:
        if piece.block is None or not any(slot.adapter for slot in piece.slots):
            continue
        wide = recipe.plain or piece.key in plain
        if (not wide and margin is None) or not kernels.offers("adapted_linears" if wide else "scaled_linears", dtype):
            continue
        kind = type(piece.block), piece.slots, wide
        if kind not in planned:
            groups = _shared_inputs(piece, dtype=dtype, tokens=tokens, width=width, tables=tables)
            made = [Panel.of(group, margin=None if wide else margin) for group in groups]
            planned[kind] = tuple(p for p in made if p and (wide or scaled.fits(p.shape, tokens)))
        panels[piece.key] = planned[kind]
    return panels


def _shared_inputs(
    piece: Piece, *, dtype: torch.dtype, tokens: int, width: int, tables: Mapping[str, Signature]
) -> list[list[LinearSlot]]:
    """A piece's slots in groups that read one input."""
    assert piece.block is not None
    with FakeTensorMode(), torch.no_grad():
        tensors = {s.name: torch.empty(s.shape, dtype=dtype) for s in piece.specs}
        values = {n: torch.empty(s.shape, dtype=s.dtype) for n, s in tables.items()}
        x = torch.empty(tokens, width, dtype=dtype)
        return piece.block.shared_inputs(piece.slots, tensors, x, values)


def plan_joins(
    found: Sequence[Piece],
    *,
    recipe: Recipe,
    compiler: Compiler,
    dtype: torch.dtype,
    tokens: int,
    width: int,
    tables: Mapping[str, Signature],
) -> dict[str, tuple[Join, ...]]:
    """The joins of each piece, by key: trained weights that stand in a row in their flat group and read one input.

    None where products are not plain, or programs are not compiled: a CPU's kernels would copy the parts.
    """
    if not recipe.plain:
        return {}
    planned: dict[Any, tuple[Join, ...]] = {}
    for piece in found if compiler == "inductor" else ():
        if piece.block is None or any(slot.adapter for slot in piece.slots):
            continue
        kind = type(piece.block), piece.slots
        if kind not in planned:
            groups = _shared_inputs(piece, dtype=dtype, tokens=tokens, width=width, tables=tables)
            row = [s for s in piece.specs if s.trainable and s.decayed]
            planned[kind] = tuple(Join(slots=tuple(g)) for g in groups if len(g) > 1 and _in_a_row(g, row))
    return {p.key: planned[type(p.block), p.slots] for p in found if (type(p.block), p.slots) in planned}


def _in_a_row(group: Sequence[LinearSlot], row: Sequence[TensorSpec]) -> bool:
    """Whether the weights of the slots follow each other without a gap in the order of `row`."""
    names = [f"{slot.name}.weight" for slot in group]
    at = next((i for i, spec in enumerate(row) if spec.name == names[0]), None)
    if at is None or [spec.name for spec in row[at : at + len(names)]] != names:
        return False
    return all(math.prod(spec.shape) % FLAT_ALIGNMENT == 0 for spec in row[at : at + len(names) - 1])


def plain_layers(found: Sequence[Piece], *, first: int, last: int) -> frozenset[str]:
    """The keys of the layers that the recipe leaves alone: so many from the first and from the last."""
    keys = [piece.key for piece in found if piece.block is not None]
    return frozenset(keys[:first] + keys[max(len(keys) - last, 0) :])


def _scaled(margin: int, weight_OI: Tensor) -> Tensor:
    return scaled.pack(weight_OI, margin)


def _packed(
    pack: Callable[[Tensor, LinearSlot, Any], Tensor], slot: LinearSlot, options: Any, weight_OI: Tensor
) -> Tensor:
    return pack(weight_OI, slot, options)


def plan_packing(
    found: Sequence[Piece],
    *,
    recipe: Recipe,
    recipe_options: Any,
    plain: frozenset[str],
    panels: Mapping[str, Sequence[Panel]],
    dtype: torch.dtype,
) -> dict[str, Packed]:
    """How each frozen weight of a slot is kept, by HF name: as the recipe packs it, or as its panel wants it."""
    pack = recipe.pack
    if pack is None:
        return {}
    planned: dict[LinearSlot, tuple[tuple[int, ...], torch.dtype]] = {}
    packed: dict[str, Packed] = {}
    for piece in found:
        frozen = {s.name: s.hf_name for s in piece.specs if not s.trainable}
        scaled_by = {s: p.margin for p in panels.get(piece.key, ()) if not p.shape.frozen for s in p.slots}
        for slot in piece.slots:
            name = frozen.get(f"{slot.name}.weight")
            if name is None or piece.key in plain:
                continue
            if slot in scaled_by:
                size = scaled.HEADER + 2 * slot.outputs * slot.inputs
                packed[name] = Packed(pack=partial(_scaled, scaled_by[slot]), shape=(size,), dtype=torch.uint8)
                continue
            if slot not in planned:
                with FakeTensorMode(), torch.no_grad():
                    value = pack(torch.empty(slot.outputs, slot.inputs, dtype=dtype), slot, recipe_options)
                planned[slot] = tuple(value.shape), value.dtype
            shape, kept = planned[slot]
            packed[name] = Packed(pack=partial(_packed, pack, slot, recipe_options), shape=shape, dtype=kept)
    return packed
