"""The panels of a model and the workspaces of weights in a weight format: allocated once, on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surogate_core.dsl.slots import Join, Panel
from surogate_core.engine.planning.pieces import PackedWeight, Piece

if TYPE_CHECKING:
    from surogate_core.engine.planning.weight_plan import WeightPlan


class Panels:
    """The tensors of all panels, and the workspaces beside them."""

    def __init__(
        self,
        pieces: Sequence[Piece],
        plan: WeightPlan | None,
        masters: Mapping[str, Tensor],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ):
        """`masters`: HF name → master, from which the panels' copies of adapters are filled."""
        self._pieces, self._masters, self._dtype, self._device = pieces, masters, dtype, device
        self._panels: Mapping[str, Sequence[Panel]] = plan.panels if plan else {}
        self._packed: Mapping[str, PackedWeight] = plan.packed if plan else {}
        self.shared: list[Tensor] = []
        """The workspaces, panels or matrices, into which weights in a weight format are unpacked, one layer at a
        time.
        """
        self.edges: dict[str, list[tuple[Tensor, Tensor]]] = {}
        """Key of a piece → for each of its panels (edge of a shared panel, the piece's A's and B's that are copied
        there).
        """
        self._tensors, self._loads = self._allocate_panels()
        self._joined = self._allocate_joined(plan.joins if plan else {})
        self.rooms = self._allocate_rooms()
        """HF name of a weight in a weight format → its workspace."""

    def of(self, piece: Piece) -> list[tuple[Panel, Tensor]]:
        """The panels of a piece with their tensors."""
        return list(zip(self._panels.get(piece.key, ()), self._tensors[piece.key], strict=True))

    def frozen_weights(self, piece: Piece) -> dict[str, Tensor]:
        """Name of a frozen weight in a panel or a join of the piece → its place there."""
        in_panels = {
            f"{slot.name}.weight": panel.shape.weight(tensor, number)
            for panel, tensor in self.of(piece)
            if panel.shape.frozen
            for number, slot in enumerate(panel.slots)
        }
        return in_panels | self._joined.get(piece.key, {})

    def refresh(self) -> None:
        """Fill the copies of A's and B's from their masters."""
        for copy, master, scale in self._loads:
            copy.copy_(master if scale == 1 else master.float() * scale)

    def edge_bytes(self) -> int:
        """Bytes of the A's and B's that are stored outside of shared panels."""
        return sum(value.nbytes for edges in self.edges.values() for _, value in edges)

    def _allocate_panels(self) -> tuple[dict[str, tuple[Tensor, ...]], list[tuple[Tensor, Tensor, float]]]:
        """Allocate the panels: (each piece's panels, the copies of A's and B's as (range of panels, range of masters,
        factor)).

        Equal panels of consecutive layers are one tensor. If their masters are at equal distances, they are read as one
        tensor too, so a refresh is a few launches for any number of layers.
        """
        tensors: dict[str, tuple[Tensor, ...]] = {}
        loads: list[tuple[Tensor, Tensor, float]] = []
        shared: dict[Panel, Tensor] = {}
        for (panels, _), run in groupby(self._pieces, key=self._panel_kinds):
            members = list(run)
            found: list[Sequence[Tensor]] = []
            for panel in panels:
                layers, places = self._allocate_panel(panel, members, shared)
                found.append(layers)
                for number, slot in enumerate(panel.slots):
                    for which, view, scale in places(number):
                        specs = [piece.spec(f"{slot.name}.lora_{which}") for piece in members]
                        masters = [self._masters[spec.hf_name] for spec in specs]
                        loads += [(*load, scale) for load in _stacked(view, masters)]
            tensors |= {piece.key: tuple(stack[i] for stack in found) for i, piece in enumerate(members)}
        self.shared += shared.values()
        return tensors, loads

    def _is_packed(self, panel: Panel, piece: Piece) -> bool:
        """Whether a panel has frozen weights, all of them in a weight format."""
        return panel.shape.frozen and all(
            piece.spec(f"{slot.name}.weight").hf_name in self._packed for slot in panel.slots
        )

    def _panel_kinds(self, piece: Piece) -> tuple[tuple[Panel, ...], tuple[bool, ...]]:
        """Equal for layers whose panels are allocated together."""
        panels = tuple(self._panels.get(piece.key, ()))
        return panels, tuple(self._is_packed(panel, piece) for panel in panels)

    def _allocate_panel(
        self, panel: Panel, members: list[Piece], shared: dict[Panel, Tensor]
    ) -> tuple[Sequence[Tensor], Callable[[int], list[tuple[str, Tensor, float]]]]:
        """(a panel's tensor in each layer; the places of each projection's adapter in all layers, as
        `PanelShape.places`).

        With weights in a weight format the layers share the tensor, and their A's and B's are stored outside of it.
        """
        shape = panel.shape
        if not self._is_packed(panel, members[0]):
            stack = shape.allocate(self._device, self._dtype, len(members))
            return stack.unbind(0), partial(shape.places, stack)
        if panel not in shared:
            shared[panel] = shape.allocate(self._device, self._dtype)
        edges = shape.edges(shared[panel])
        below, beside = (edge.new_zeros(len(members), *edge.shape) for edge in edges)
        for number, piece in enumerate(members):
            self.edges.setdefault(piece.key, []).extend(zip(edges, (below[number], beside[number]), strict=True))

        def places(number: int) -> list[tuple[str, Tensor, float]]:
            a, b = shape.of_edges(below, beside, number)
            return [("A", a, 1.0), ("B", b, shape.scale)]

        return [shared[panel]] * len(members), places

    def _allocate_joined(self, joins: Mapping[str, Sequence[Join]]) -> dict[str, dict[str, Tensor]]:
        """Key of a piece → name of a frozen weight of its joins → its rows of the matrix of the join."""
        found: dict[str, dict[str, Tensor]] = {}
        for piece in self._pieces:
            for join in joins.get(piece.key, ()):
                if piece.spec(f"{join.slots[0].name}.weight").trainable:
                    continue
                rows = [slot.outputs for slot in join.slots]
                shape = sum(rows), join.slots[0].inputs
                parts = torch.empty(shape, dtype=self._dtype, device=self._device).split(rows)
                names = (f"{slot.name}.weight" for slot in join.slots)
                found.setdefault(piece.key, {}).update(zip(names, parts, strict=True))
        return found

    def _allocate_rooms(self) -> dict[str, Tensor]:
        """HF name of a weight in a weight format → its workspace."""
        rooms: dict[str, Tensor] = {}
        matrices: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        for piece in self._pieces:
            in_panel = self.frozen_weights(piece)
            for spec in piece.specs:
                packed = self._packed.get(spec.hf_name)
                if packed is None or packed.unpack is None:
                    continue
                room, key = in_panel.get(spec.name), (spec.name, spec.shape)
                if room is None:
                    if key not in matrices:
                        matrices[key] = torch.empty(spec.shape, dtype=self._dtype, device=self._device)
                    room = matrices[key]
                rooms[spec.hf_name] = room
        self.shared += matrices.values()
        return rooms


def _stacked(targets_LXY: Tensor, masters: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs to copy: one pair if the masters are at equal distances in one tensor, otherwise one per layer."""
    first = masters[0]
    steps = {b.storage_offset() - a.storage_offset() for a, b in pairwise(masters)}
    if len(steps) != 1 or any(m.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() for m in masters):
        return list(zip(targets_LXY, masters, strict=True))
    strides = (steps.pop(), *first.stride())
    return [(targets_LXY, first.as_strided(targets_LXY.shape, strides, first.storage_offset()))]
