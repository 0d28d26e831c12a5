"""Plans how a run's weights are stored and multiplied, before any of them is allocated.

The engine and the memory prediction both use it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from surogate_core.bundles import FLAT_ALIGNMENT
from surogate_core.dsl.declare import TensorSpec
from surogate_core.dsl.experts import ExpertSlot
from surogate_core.dsl.slots import Join, LinearSlot, Panel
from surogate_core.dsl.trace import Signature
from surogate_core.engine.planning.assembly import Assembly
from surogate_core.engine.planning.pieces import PackedWeight, Piece
from surogate_core.engine.planning.weight_formats import plan_format

S = TypeVar("S", LinearSlot, ExpertSlot)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """The plan that `Parameters` follows, by key of a piece or HF name of a weight."""

    panels: Mapping[str, tuple[Panel, ...]]
    joins: Mapping[str, tuple[Join, ...]]
    packed: Mapping[str, PackedWeight]

    @classmethod
    def of(
        cls, assembly: Assembly, found: Sequence[Piece], *, plain: frozenset[str], tables: Mapping[str, Signature]
    ) -> WeightPlan:
        """The plan of a run's pieces. `plain`: keys of the layers that multiply plainly under every recipe."""
        panels = plan_panels(assembly, found, plain=plain, tables=tables)
        joins = plan_joins(assembly, found, tables=tables)
        packed = plan_format(found, assembly.weight_format, assembly.keeps_as_it_is)
        if not packed and assembly.packs:
            packed = plan_packing(assembly, found, plain=plain, panels=panels)
        if assembly.streams_frozen:
            packed = {**_into_panels(found, panels, assembly.settings.dtype), **packed}
        return cls(panels=panels, joins=joins, packed=packed)


def _into_panels(
    found: Sequence[Piece], panels: Mapping[str, Sequence[Panel]], dtype: torch.dtype
) -> dict[str, PackedWeight]:
    """Weights of panels that are streamed: stored unchanged, and copied into one panel that the layers share."""
    packed: dict[str, PackedWeight] = {}
    for piece in found:
        frozen = {s.name: s for s in piece.specs if not s.trainable}
        slots = [slot for panel in panels.get(piece.key, ()) if panel.shape.frozen for slot in panel.slots]
        for spec in (frozen[f"{slot.name}.weight"] for slot in slots):
            packed[spec.hf_name] = PackedWeight(
                pack=_kept, shape=spec.shape, dtype=dtype, unpack=_copied, rounded=False
            )
    return packed


def _kept(weight_OI: Tensor) -> Tensor:
    return weight_OI


def _copied(kept_OI: Tensor, room_OI: Tensor) -> None:
    room_OI.copy_(kept_OI)


def plan_panels(
    assembly: Assembly, found: Sequence[Piece], *, plain: frozenset[str], tables: Mapping[str, Signature]
) -> dict[str, tuple[Panel, ...]]:
    """The panels of each piece, by key, if a kernel multiplies with panels."""
    recipe, settings = assembly.recipe, assembly.settings
    # Its panels have weights as the recipe packs them, and it does not pack one that a weight format stores.
    panel_op = recipe.panel_op if assembly.packs and assembly.weight_format is None else None
    planned: dict[Any, tuple[Panel, ...]] = {}
    panels: dict[str, tuple[Panel, ...]] = {}
    for piece in found:
        if piece.block is None or not any(slot.adapter for slot in piece.slots):
            continue
        wide = recipe.plain or piece.key in plain
        op = None if wide else panel_op
        if op is None and not wide:
            continue
        if not assembly.kernels.offers("adapted_linears" if op is None else op.op, settings.dtype):
            continue
        kind = piece.block.identity, piece.slots, wide
        if kind not in planned:
            groups = _shared_inputs(assembly, piece, tables)
            made = [Panel.of(group, op=op) for group in groups]
            planned[kind] = tuple(p for p in made if p and (p.op is None or p.op.fits(p.shape, settings.tokens)))
        panels[piece.key] = planned[kind]
    return panels


def _shared_inputs(assembly: Assembly, piece: Piece, tables: Mapping[str, Signature]) -> list[list[LinearSlot]]:
    """A piece's slots, grouped by the input that they read."""
    assert piece.block is not None
    dtype = assembly.settings.dtype
    with FakeTensorMode(), torch.no_grad():
        tensors = {s.name: torch.empty(s.shape, dtype=s.dtype_in(dtype)) for s in piece.specs}
        values = {n: torch.empty(s.shape, dtype=s.dtype) for n, s in tables.items()}
        x = torch.empty(assembly.settings.tokens, assembly.model.width, dtype=dtype)
        return piece.block.shared_inputs(piece.slots, tensors, x, values)


def plan_joins(
    assembly: Assembly, found: Sequence[Piece], *, tables: Mapping[str, Signature]
) -> dict[str, tuple[Join, ...]]:
    """The joins of each piece, by key: slots that read the same input. Their trained weights are contiguous in their
    flat group; frozen ones that a GPU keeps unchanged are loaded contiguously (`Panels.frozen_weights`).

    There are none if products are not plain, or if programs are not compiled, because a CPU's kernels would copy the
    parts.
    """
    if not assembly.recipe.plain:
        return {}
    frozen = _stays_on_a_gpu(assembly)
    pieces_of = Counter(spec.hf_name for piece in found for spec in piece.specs)
    planned: dict[Any, tuple[Join, ...]] = {}
    joins: dict[str, tuple[Join, ...]] = {}
    for piece in found if assembly.settings.compiler == "inductor" else ():
        if piece.block is None or any(slot.adapter for slot in piece.slots):
            continue
        kept = [s for s in piece.specs if frozen and not s.trainable and pieces_of[s.hf_name] == 1]
        kind = piece.block.identity, piece.slots, tuple(spec.name for spec in kept)
        if kind not in planned:
            groups = _shared_inputs(assembly, piece, tables)
            row = [s for s in piece.specs if s.trainable and s.decayed]
            planned[kind] = tuple(
                Join(slots=tuple(g)) for g in groups if len(g) > 1 and (_in_a_row(g, row) or _alike(g, kept))
            )
        joins[piece.key] = planned[kind]
    return joins


def _alike(group: Sequence[LinearSlot], kept: Sequence[TensorSpec]) -> bool:
    """Whether the weights of the slots are all among these and can be the rows of one matrix."""
    found = [spec for slot in group for spec in kept if spec.name == f"{slot.name}.weight"]
    return len(found) == len(group) and all(
        spec.dtype is None and math.prod(spec.shape) % FLAT_ALIGNMENT == 0 for spec in found
    )


def _stays_on_a_gpu(assembly: Assembly) -> bool:
    """Whether a GPU keeps frozen weights in the model's dtype, so that they can be joined."""
    apart = assembly.weight_format or assembly.streams_frozen or not assembly.joins_frozen
    return assembly.settings.device.type == "cuda" and not apart


def _in_a_row(group: Sequence[LinearSlot], row: Sequence[TensorSpec]) -> bool:
    """Whether the weights of the slots are contiguous in the order of `row`."""
    names = [f"{slot.name}.weight" for slot in group]
    at = next((i for i, spec in enumerate(row) if spec.name == names[0]), None)
    if at is None or [spec.name for spec in row[at : at + len(names)]] != names:
        return False
    return all(math.prod(spec.shape) % FLAT_ALIGNMENT == 0 for spec in row[at : at + len(names) - 1])


def plain_layers(found: Sequence[Piece], *, first: int, last: int) -> frozenset[str]:
    """The keys of the layers that multiply plainly: `first` from the beginning and `last` from the end."""
    keys = [piece.key for piece in found if piece.block is not None]
    return frozenset(keys[:first] + keys[max(len(keys) - last, 0) :])


def plan_packing(
    assembly: Assembly, found: Sequence[Piece], *, plain: frozenset[str], panels: Mapping[str, Sequence[Panel]]
) -> dict[str, PackedWeight]:
    """How each frozen weight of a slot is stored, by HF name: as the recipe packs it, or as its panel needs it."""
    recipe, dtype = assembly.recipe, assembly.settings.dtype
    pack, pack_experts = recipe.pack, recipe.pack_experts
    if pack is None and pack_experts is None and recipe.panel_op is None:
        return {}
    planned: dict[tuple[LinearSlot | ExpertSlot, bool], PackedWeight] = {}
    packed: dict[str, PackedWeight] = {}
    for piece in found:
        frozen = {s.name: s.hf_name for s in piece.specs if not s.trainable}
        ops = {slot: panel.op for panel in panels.get(piece.key, ()) for slot in panel.slots}
        for slot in piece.slots:
            name = frozen.get(f"{slot.name}.weight")
            if name is None or piece.key in plain:
                continue
            op = ops.get(slot)
            how = op.pack if op is not None else _of_slot(pack, slot) if pack is not None else None
            if how is None:
                continue
            kind = slot, op is not None
            if kind not in planned:
                planned[kind] = _packed_by(how, (slot.outputs, slot.inputs), dtype)
            packed[name] = planned[kind]
        for experts in piece.experts if pack_experts is not None and piece.key not in plain else ():
            name = frozen.get(f"{experts.name}.weight")
            if name is None or pack_experts is None:
                continue
            if (experts, False) not in planned:
                shape = experts.count, experts.outputs, experts.inputs
                planned[experts, False] = _packed_by(_of_slot(pack_experts, experts), shape, dtype)
            packed[name] = planned[experts, False]
    return packed


def _of_slot(pack: Callable[[Tensor, S], Tensor], slot: S) -> Callable[[Tensor], Tensor]:
    return lambda weight: pack(weight, slot)


def _packed_by(pack: Callable[[Tensor], Tensor], shape: Sequence[int], dtype: torch.dtype) -> PackedWeight:
    """The result of a function for a weight, traced for its shape and dtype."""
    with FakeTensorMode(), torch.no_grad():
        value = pack(torch.empty(shape, dtype=dtype))
    return PackedWeight(pack=pack, shape=tuple(value.shape), dtype=value.dtype)
