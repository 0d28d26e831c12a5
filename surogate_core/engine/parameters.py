"""The tensors of a model: frozen ones in the weights store, trainable ones in flat groups.

A flat group holds masters (fp32, or bf16) and fp32 gradients of many parameters in one tensor each, so that clipping,
the optimizer and the refresh of compute copies are a few launches for any model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surogate_core.bundles import FLAT_ALIGNMENT, GradientStore, ParamGroup, Store
from surogate_core.dsl.declare import Block, LoRA, Model, TensorSpec
from surogate_core.dsl.experts import ExpertSlot, split
from surogate_core.dsl.sides import SideSpec
from surogate_core.dsl.slots import Join, LinearSlot, Panel
from surogate_core.engine.placement import Placement
from surogate_core.engine.schedule import EMBED, HEAD, layer_key
from surogate_core.engine.sharded_gradients import ShardedGradients
from surogate_core.engine.sharded_weights import ShardedWeights, begin_pass
from surogate_core.engine.sharding import ShardedGroup, Sharing
from surogate_core.files.tensorfile import Deferred

if TYPE_CHECKING:
    from surogate_core.engine.weight_plan import WeightPlan


@dataclass(frozen=True, slots=True)
class Kept:
    """A frozen weight in the form of its weight format."""

    tensor: Tensor


Source = Callable[[TensorSpec], Tensor | Kept]
"""Returns the initial value of a tensor with its shape, in any float dtype, on any device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """How a recipe or a weight format keeps a frozen weight."""

    pack: Callable[[Tensor], Tensor]
    """The weight in the model's dtype → its kept form."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    unpack: Callable[[Tensor, Tensor], None] | None = None
    """(kept form, workspace [O, I] in the model's dtype): writes the weight into the workspace. Programs receive the
    workspace, or the kept form if this is None.
    """
    rounded: bool = True
    """Whether the kept form differs from the weight in value."""

    @property
    def nbytes(self) -> int:
        """Bytes of the kept form."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of the model that is compiled as one program: the embedding, a layer, or the head."""

    key: str
    specs: tuple[TensorSpec, ...]
    block: Block | None = None
    slots: tuple[LinearSlot, ...] = ()
    sides: tuple[SideSpec, ...] = ()
    experts: tuple[ExpertSlot, ...] = ()


def pieces(model: Model, *, lora: LoRA | None, max_seqlen: int) -> tuple[Piece, ...]:
    """All pieces in order. With LoRA the base is frozen; without LoRA everything is trained."""
    train_base = lora is None
    found = [Piece(key=EMBED, specs=model.embed_specs(train_base=train_base))]
    for index, (prefix, block) in enumerate(model.blocks(max_seqlen)):
        slots, experts = block.linear_slots(lora), block.expert_slots(lora)
        specs = block.tensor_specs(prefix, slots, train_base=train_base, experts=experts)
        found.append(
            Piece(
                key=layer_key(index), specs=specs, block=block, slots=slots, sides=block.side_specs(), experts=experts
            )
        )
    found.append(Piece(key=HEAD, specs=model.head_specs(train_base=train_base)))
    return tuple(found)


def distinct(found: tuple[Piece, ...]) -> Iterator[TensorSpec]:
    """Every tensor once; a tied head shares the embedding's."""
    seen: set[str] = set()
    for piece in found:
        for spec in piece.specs:
            if spec.hf_name not in seen:
                seen.add(spec.hf_name)
                yield spec


class RandomSource:
    """Random initial values of each tensor from (seed, its name), so they do not depend on the order.

    Matrices are normal with standard deviation `std`; LoRA A is uniform in ±1/√inputs, as in PEFT.
    """

    def __init__(self, *, seed: int, std: float, device: torch.device):
        self.seed, self.std, self.device = seed, std, device

    def __call__(self, spec: TensorSpec) -> Tensor:
        # Generators differ between devices. Adapters are small enough to be drawn on the CPU, so a run on a trained
        # base starts from the same values on every device.
        device = torch.device("cpu") if spec.role == "adapter" else self.device
        value = torch.empty(spec.shape, dtype=torch.float32, device=device)
        if spec.init == "ones":
            return value.fill_(1)
        if spec.init == "zeros":
            return value.zero_()
        digest = hashlib.sha256(f"{self.seed}:{spec.hf_name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))
        if spec.init == "lora_a":
            bound = 1 / math.sqrt(spec.shape[-1])
            return value.uniform_(-bound, bound, generator=generator)
        return value.normal_(0, self.std, generator=generator)


def _stacked(targets_LXY: Tensor, masters: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Pairs to copy: one pair if the masters are at equal distances in one tensor, otherwise one per layer."""
    first = masters[0]
    steps = {b.storage_offset() - a.storage_offset() for a, b in pairwise(masters)}
    if len(steps) != 1 or any(m.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() for m in masters):
        return list(zip(targets_LXY, masters, strict=True))
    strides = (steps.pop(), *first.stride())
    return [(targets_LXY, first.as_strided(targets_LXY.shape, strides, first.storage_offset()))]


def _as_one(weights: Sequence[Tensor]) -> Tensor:
    """The matrices stacked: a view if they are contiguous, as in their flat group; otherwise a copy."""
    first = weights[0]
    for above, below in pairwise(weights):
        one = above.untyped_storage().data_ptr() == below.untyped_storage().data_ptr()
        if not one or above.storage_offset() + above.numel() != below.storage_offset():
            return torch.cat(list(weights))
    return first.as_strided((sum(weight.shape[0] for weight in weights), first.shape[1]), first.stride())


def _nothing(key: str) -> None:
    """No other rank is to be told."""


class Parameters:
    """Allocates, fills and provides a model's tensors on one device."""

    def __init__(
        self,
        found: tuple[Piece, ...],
        *,
        weights: Store,
        device: torch.device,
        dtype: torch.dtype,
        adapter_dtype: torch.dtype,
        weight_decay: float,
        master_dtype: torch.dtype = torch.float32,
        seed: Tensor | None = None,
        plan: WeightPlan | None = None,
        placement: Placement | None = None,
        sharing: Sharing | None = None,
    ):
        self.pieces = found
        self._sharing = sharing
        self.sharded: ShardedGroup | None = None
        """The group that several ranks share out."""
        self.deferred: Mapping[str, Deferred] = {}
        """HF name → whole master, of the tensors of that group."""
        self.before_fetch: Callable[[str], None] = _nothing
        """Called with the key of a piece before an export fetches it, for stores that all ranks serve."""
        self.panels: Mapping[str, Sequence[Panel]] = plan.panels if plan else {}
        """Key of a piece → the panels that its programs multiply with."""
        self.joins: Mapping[str, Sequence[Join]] = plan.joins if plan else {}
        """Key of a piece → the slots whose weights its programs read as one matrix."""
        self.packed: Mapping[str, Packed] = plan.packed if plan else {}
        """HF name of a frozen weight → how the recipe or the weight format keeps it."""
        self._source: Source | None = None
        self.weights = weights
        self.master_dtype = master_dtype
        self._seed = seed if master_dtype != torch.float32 else None
        assert self._seed is not None or master_dtype == torch.float32, "narrow masters are rounded with a seed"
        self.device, self.dtype, self.adapter_dtype = device, dtype, adapter_dtype
        self.placement = placement or Placement.on(device)
        self.specs = {spec.hf_name: spec for spec in distinct(found)}
        self._allocate_groups([s for s in self.specs.values() if s.trainable], weight_decay)
        self._frozen: dict[str, Tensor] = {}
        self.shared: list[Tensor] = []
        """The workspaces, panels or matrices, into which weights in a weight format are unpacked, one layer at a
        time.
        """
        self._edges: dict[str, list[tuple[Tensor, Tensor]]] = {}
        """Key of a piece → for each of its panels (edge of a shared panel, the piece's A's and B's that are copied
        there).
        """
        self._panels, self._loads = self._allocate_panels()
        self._rooms = self._allocate_rooms()

    def _allocate_groups(self, trainable: Sequence[TensorSpec], weight_decay: float) -> None:
        """The flat groups of trained parameters."""
        self.groups: list[ParamGroup] = []
        self.host_groups: list[ParamGroup] = []
        """The same groups for the CPU, if masters and gradients are in its memory."""
        self._numbers: dict[str, int] = {}
        """Name of a group → its number."""
        self._master: dict[str, Tensor] = {}
        self._grad: dict[str, Tensor] = {}
        self._host_grad: dict[str, Tensor] = {}
        """The same for the CPU, if gradients are in its memory."""
        self._compute: dict[str, Tensor] = {}
        self._streamed: dict[str, Tensor] = {}
        """The CPU's live tensors of trained weights that use the store."""
        self.copies: list[tuple[Tensor, Tensor]] = []
        """(compute copy, the range of masters from which it is cast)."""
        self.host_copies: list[tuple[Tensor, Tensor]] = []
        """The same for the CPU, if both are in its memory."""
        self._add_group("decayed", [s for s in trainable if s.decayed], weight_decay)
        self._add_group("undecayed", [s for s in trainable if not s.decayed], 0.0)

    def _add_group(self, name: str, members: list[TensorSpec], weight_decay: float) -> None:
        if not members:
            return
        self._numbers[name] = len(self._numbers)
        # Adapters and base weights may be computed in different dtypes, and a compute copy is
        # one cast of a contiguous range: members are ordered by dtype.
        members = sorted(members, key=lambda s: str(self.compute_dtype(s)))
        shapes: dict[str, tuple[int, tuple[int, ...]]] = {}
        ranges: dict[torch.dtype, tuple[int, int]] = {}
        size = 0
        for spec in members:
            dtype = self.compute_dtype(spec)
            start = ranges.get(dtype, (size, size))[0]
            shapes[spec.hf_name] = (size, spec.shape)
            size += -(-math.prod(spec.shape) // FLAT_ALIGNMENT) * FLAT_ALIGNMENT
            ranges[dtype] = (start, size)
        if name == "decayed" and self._sharing is not None and self._sharing.shards:
            self._add_sharded(name, members, shapes, size, weight_decay)
            return
        # Beside a group that ranks share out the others are small, and stay on the device.
        placement = self.placement if self.sharded is None else Placement.on(self.device)
        master, host_master = placement.zeros("master", size, self.master_dtype)
        grad, host_grad = placement.zeros("gradients", size, torch.float32)
        group = ParamGroup(
            name=name,
            master=master,
            grad=grad,
            shapes=shapes,
            weight_decay=weight_decay,
            hidden=frozenset(s.hf_name for s in members if s.role == "weight"),
            seed=self._seed,
            number=self._numbers[name],
        )
        self.groups.append(group)
        self.host_groups.append(replace(group, master=host_master, grad=host_grad))
        # A store of shares has no live whole tensors: what blocks compute with is on the device.
        apart = self._sharing is not None and self._sharing.shards_weights
        copied = Placement.on(self.device) if apart else placement
        for dtype, (start, stop) in ranges.items():
            compute, resting = master, host_master
            if dtype != self.master_dtype or (apart and placement.moves("master")):
                compute, resting = copied.trained_weights(stop - start, dtype)
                self.copies.append((compute, master[start:stop]))
                self.host_copies.append((resting, host_master[start:stop]))
            streamed = copied.streams_trained(masters=compute is master)
            for spec in members:
                if self.compute_dtype(spec) == dtype:
                    offset, shape = shapes[spec.hf_name]
                    count = math.prod(shape)
                    self._master[spec.hf_name] = master[offset : offset + count].view(shape)
                    self._grad[spec.hf_name] = grad[offset : offset + count].view(shape)
                    self._host_grad[spec.hf_name] = host_grad[offset : offset + count].view(shape)
                    at = offset if compute is master else offset - start
                    into, whole = (self._streamed, resting) if streamed else (self._compute, compute)
                    into[spec.hf_name] = whole[at : at + count].view(shape)

    def _add_sharded(
        self,
        name: str,
        members: list[TensorSpec],
        shapes: Mapping[str, tuple[int, tuple[int, ...]]],
        size: int,
        weight_decay: float,
    ) -> None:
        (dtype,) = {self.compute_dtype(spec) for spec in members}
        assert self._sharing is not None
        nothing = torch.empty(size, dtype=self.master_dtype, device="meta")
        whole = ParamGroup(
            name=name,
            master=nothing,
            grad=nothing,
            shapes=shapes,
            weight_decay=weight_decay,
            seed=self._seed,
            number=self._numbers[name],
        )
        group = self.sharded = ShardedGroup(
            whole, self.pieces, self._sharing, self.placement, dtype=dtype, master_dtype=self.master_dtype
        )
        self.groups += group.groups
        self.host_groups += group.groups
        for key in group.whole_pieces:
            self._compute |= group.copies_by_name(key)
        self._grad |= group.sums_by_name()
        self._host_grad |= group.sums_by_name()

    def compute_dtype(self, spec: TensorSpec) -> torch.dtype:
        """Dtype in which a piece receives the tensor."""
        packed = self.packed.get(spec.hf_name)
        if packed is not None and packed.unpack is None:
            return packed.dtype
        return self.adapter_dtype if spec.role == "adapter" else self.dtype

    def compute_shape(self, spec: TensorSpec) -> tuple[int, ...]:
        """Shape in which a piece receives the tensor."""
        packed = self.packed.get(spec.hf_name)
        return packed.shape if packed is not None and packed.unpack is None else spec.shape

    def kept_bytes(self, spec: TensorSpec) -> int:
        """Bytes in which a frozen tensor is stored."""
        packed = self.packed.get(spec.hf_name)
        return packed.nbytes if packed is not None else math.prod(spec.shape) * self.compute_dtype(spec).itemsize

    def fill(self, source: Source, *, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Set every tensor from the source and put the frozen ones into the weights store."""
        self._source = source
        total = len(self.specs)
        in_panel = {
            self._spec(piece, f"{slot.name}.weight").hf_name: panel.shape.weight(tensor, number)
            for piece in self.pieces
            for panel, tensor in self.panel_tensors(piece)
            if panel.shape.frozen
            for number, slot in enumerate(panel.slots)
            if self._spec(piece, f"{slot.name}.weight").hf_name not in self.packed
        }
        last = {spec.hf_name: piece.key for piece in self.pieces for spec in piece.specs}
        missing, waiting = set(self.specs), list(self.pieces)
        for done, spec in enumerate(self.specs.values(), start=1):
            value = source(spec)
            if isinstance(value, Kept):
                packed = self.packed[spec.hf_name]
                assert packed.unpack is not None
                assert tuple(value.tensor.shape) == packed.shape, f"{spec.hf_name}: {value.tensor.shape}"
                self._frozen[spec.hf_name] = value.tensor.to(self.device)
            elif tuple(value.shape) != spec.shape:
                raise AssertionError(f"{spec.hf_name}: source gave {tuple(value.shape)}, not {spec.shape}")
            elif spec.trainable:
                self._set_master(spec.hf_name, value)
            else:
                place = in_panel.get(spec.hf_name)
                if place is None:
                    place = value.to(self.device, self.dtype).contiguous()
                    if spec.hf_name in self.packed:
                        place = self.packed[spec.hf_name].pack(place)
                else:
                    place.copy_(value)
                self._frozen[spec.hf_name] = place
            missing.discard(spec.hf_name)
            progress(done, total)
            # A piece is put as soon as it is complete, so that the device does not hold tensors that are kept
            # elsewhere.
            while waiting and not any(s.hf_name in missing for s in waiting[0].specs):
                self._hand_over(waiting.pop(0), last)
        self.refresh()

    def _set_master(self, name: str, value: Tensor) -> None:
        if self.sharded is not None and name in self.sharded.shapes:
            self.sharded.set(name, value)
        else:
            self._master[name].copy_(value)

    def _hand_over(self, piece: Piece, last: Mapping[str, str]) -> None:
        """Put a piece's tensors into the weights store, which owns them from then on."""
        stored = [s.hf_name for s in piece.specs if s.hf_name not in self._compute]
        group = self.sharded
        if group is not None and isinstance(self.weights, ShardedWeights) and stored:
            self.weights.put_trained(piece.key, group.owned_copies(piece.key), group.places(stored))
            return
        self.weights.put(piece.key, [self._streamed[n] if n in self._streamed else self._frozen[n] for n in stored])
        for name in stored:
            if last[name] == piece.key:
                self._frozen.pop(name, None)

    def refresh(self, *, on_host: bool = False) -> None:
        """Refresh the compute copies from the masters (on the CPU if both are in host memory)."""
        if self.sharded is not None:
            self.sharded.refresh()
        for copy, master in self.host_copies if on_host else self.copies:
            copy.copy_(master)
        for copy, master, scale in self._loads:
            copy.copy_(master if scale == 1 else master.float() * scale)

    def _allocate_panels(self) -> tuple[dict[str, tuple[Tensor, ...]], list[tuple[Tensor, Tensor, float]]]:
        """Allocate the panels: (each piece's panels, the copies of A's and B's as (range of panels, range of masters,
        factor)).

        Equal panels of consecutive layers are one tensor. If their masters are at equal distances, they are read as one
        tensor too, so a refresh is a few launches for any number of layers.
        """
        tensors: dict[str, tuple[Tensor, ...]] = {}
        loads: list[tuple[Tensor, Tensor, float]] = []
        shared: dict[Panel, Tensor] = {}
        for (panels, _), run in groupby(self.pieces, key=self._panel_kinds):
            members = list(run)
            found: list[Sequence[Tensor]] = []
            for panel in panels:
                layers, places = self._allocate_panel(panel, members, shared)
                found.append(layers)
                for number, slot in enumerate(panel.slots):
                    for which, view, scale in places(number):
                        specs = [self._spec(piece, f"{slot.name}.lora_{which}") for piece in members]
                        masters = [self._master[spec.hf_name] for spec in specs]
                        loads += [(*load, scale) for load in _stacked(view, masters)]
            tensors |= {piece.key: tuple(stack[i] for stack in found) for i, piece in enumerate(members)}
        self.shared += shared.values()
        return tensors, loads

    def _is_packed(self, panel: Panel, piece: Piece) -> bool:
        """Whether a panel has frozen weights, all of them in a weight format."""
        return panel.shape.frozen and all(
            self._spec(piece, f"{slot.name}.weight").hf_name in self.packed for slot in panel.slots
        )

    def _panel_kinds(self, piece: Piece) -> tuple[tuple[Panel, ...], tuple[bool, ...]]:
        """Equal for layers whose panels are allocated together."""
        panels = tuple(self.panels.get(piece.key, ()))
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
            stack = shape.allocate(self.device, self.dtype, len(members))
            return stack.unbind(0), partial(shape.places, stack)
        if panel not in shared:
            shared[panel] = shape.allocate(self.device, self.dtype)
        edges = shape.edges(shared[panel])
        below, beside = (edge.new_zeros(len(members), *edge.shape) for edge in edges)
        for number, piece in enumerate(members):
            self._edges.setdefault(piece.key, []).extend(zip(edges, (below[number], beside[number]), strict=True))

        def places(number: int) -> list[tuple[str, Tensor, float]]:
            a, b = shape.of_edges(below, beside, number)
            return [("A", a, 1.0), ("B", b, shape.scale)]

        return [shared[panel]] * len(members), places

    def _allocate_rooms(self) -> dict[str, Tensor]:
        """HF name of a weight in a weight format → its workspace."""
        rooms: dict[str, Tensor] = {}
        matrices: dict[tuple[str, tuple[int, ...]], Tensor] = {}
        for piece in self.pieces:
            in_panel = {
                f"{slot.name}.weight": panel.shape.weight(tensor, number)
                for panel, tensor in self.panel_tensors(piece)
                if panel.shape.frozen
                for number, slot in enumerate(panel.slots)
            }
            for spec in piece.specs:
                packed = self.packed.get(spec.hf_name)
                if packed is None or packed.unpack is None:
                    continue
                room, key = in_panel.get(spec.name), (spec.name, spec.shape)
                if room is None:
                    if key not in matrices:
                        matrices[key] = torch.empty(spec.shape, dtype=self.dtype, device=self.device)
                    room = matrices[key]
                rooms[spec.hf_name] = room
        self.shared += matrices.values()
        return rooms

    def _wide(self, spec: TensorSpec, kept: Tensor) -> Tensor:
        """The frozen tensor as programs receive it. Unpacks a weight that is in a weight format."""
        room = self._rooms.get(spec.hf_name)
        if room is None:
            return kept
        unpack = self.packed[spec.hf_name].unpack
        assert unpack is not None
        unpack(kept, room)
        return room

    @staticmethod
    def _spec(piece: Piece, name: str) -> TensorSpec:
        return next(spec for spec in piece.specs if spec.name == name)

    def panel_tensors(self, piece: Piece) -> list[tuple[Panel, Tensor]]:
        """The panels of a piece with their tensors, which stay on the device."""
        return list(zip(self.panels.get(piece.key, ()), self._panels[piece.key], strict=True))

    def join_shapes(self, piece: Piece) -> list[tuple[int, int]]:
        """(Q, I) of the joins of a piece."""
        joins = self.joins.get(piece.key, ())
        return [(sum(slot.outputs for slot in join.slots), join.slots[0].inputs) for join in joins]

    def join_tensors(self, piece: Piece, tensors: Sequence[Tensor]) -> list[tuple[Join, Tensor]]:
        """The joins of a piece, each with its weights as one matrix [Q, I]. `tensors`: the result of `inputs`."""
        named = {spec.name: tensor for spec, tensor in zip(piece.specs, tensors, strict=True)}
        joins = self.joins.get(piece.key, ())
        return [(join, _as_one([named[f"{slot.name}.weight"] for slot in join.slots])) for join in joins]

    def inputs(self, piece: Piece) -> list[Tensor]:
        """The tensors of a piece in the order of its specs; those that the store has are fetched.

        With a weight format, the weights and the panels of the piece are valid until another piece's are requested.
        """
        stored = iter(self.weights.fetch(piece.key))
        for edge, value in self._edges.get(piece.key, ()):
            edge.copy_(value)
        return [
            self._compute[s.hf_name] if s.hf_name in self._compute else self._wide(s, next(stored)) for s in piece.specs
        ]

    def edge_bytes(self) -> int:
        """Bytes of the A's and B's that are stored outside of shared panels."""
        return sum(value.nbytes for edges in self._edges.values() for _, value in edges)

    def rest_gradients(self, store: GradientStore) -> None:
        """Put the gradient sums of each piece's trainable tensors into their store."""
        group = self.sharded
        sharded = store if isinstance(store, ShardedGradients) else None
        if sharded is not None and group is not None:
            for key in group.parts:
                sharded.put_owned(key, group.owned_sums(key))
        for piece in self.pieces:
            names = [s.hf_name for s in piece.specs if s.trainable]
            if sharded is None or group is None:
                store.put(piece.key, [self._host_grad[name] for name in names])
            else:
                sharded.put(piece.key, [group.places([n])[0] if n in group.shapes else self._grad[n] for n in names])

    def sums_to_clear(self, *, streams: bool) -> list[Tensor]:
        """The flat gradient sums that no store clears. `streams`: whether the sums are in a store of their own."""
        if not streams:
            return self.sums()
        return [] if self.sharded is None else self.sums()[1:]

    def sums(self) -> list[Tensor]:
        """The flat gradient sums of this rank."""
        if self.sharded is None:
            return [group.grad for group in self.host_groups]
        parts = {id(group) for group in self.sharded.groups}
        return [self.sharded.sums, *(group.grad for group in self.groups if id(group) not in parts)]

    def masters(self) -> Mapping[str, Tensor]:
        """The live masters by HF name, but for those that are sharded."""
        return self._master

    def gradients_by_name(self) -> Mapping[str, Tensor]:
        """The live fp32 gradients by HF name."""
        return self._grad

    def base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor except adapters as (HF name, value in the model's dtype), one at a time; experts one by one.

        A weight in a weight format has its rounded value, on which the adapters were trained.
        """
        begin_pass(self.weights)
        seen: set[str] = set()
        for piece in self.pieces:
            self.before_fetch(piece.key)
            for spec, computed in zip(piece.specs, self.inputs(piece), strict=True):
                if spec.hf_name in seen:
                    continue
                value = self._whole_master(spec.hf_name) if spec.trainable else computed
                if spec.hf_name in self._rooms:
                    value = value.clone()
                elif spec.hf_name in self.packed:
                    # The recipe's kept form is rounded, so the weight itself is read or drawn again.
                    assert self._source is not None
                    again = self._source(spec)
                    assert isinstance(again, Tensor)
                    value = again
                if spec.role != "adapter" and spec.hf_name not in seen:
                    seen.add(spec.hf_name)
                    yield from split(spec.hf_name, value.to(self.dtype).contiguous())
            self.weights.release(piece.key)

    def _whole_master(self, name: str) -> Tensor:
        return self.deferred[name].load() if name in self.deferred else self._master[name]

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every adapter tensor as (PEFT name without prefix, its master in fp32)."""
        for name, master in self._master.items():
            if self.specs[name].role == "adapter":
                yield from split(name, master.float())

    def counts(self) -> tuple[int, int]:
        """(all parameters, trainable parameters)."""
        sizes = [(math.prod(s.shape), s.trainable) for s in self.specs.values()]
        return sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)
