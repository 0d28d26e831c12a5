"""The tensors of a model: frozen ones in the weights store, trainable ones in flat groups."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surogate_core.bundles import Store
from surogate_core.dsl.declare import TensorSpec
from surogate_core.dsl.experts import split
from surogate_core.dsl.slots import Join, Panel
from surogate_core.engine.flat_groups import FlatGroups
from surogate_core.engine.panels import Panels
from surogate_core.engine.placement import Placement
from surogate_core.engine.planning.pieces import (
    ExpertsOfRank,
    InFile,
    Kept,
    OneByOne,
    PackedWeight,
    Piece,
    Source,
    distinct,
    of_all,
)
from surogate_core.engine.ranks.sharded_weights import ShardedWeights
from surogate_core.engine.ranks.sharding import Sharing
from surogate_core.files.tensorfile import Deferred

if TYPE_CHECKING:
    from surogate_core.engine.planning.weight_plan import WeightPlan


def _as_one(weights: Sequence[Tensor]) -> Tensor:
    """The matrices stacked: a view if they are contiguous, as in their flat group; otherwise a copy."""
    first = weights[0]
    for above, below in pairwise(weights):
        one = above.untyped_storage().data_ptr() == below.untyped_storage().data_ptr()
        if not one or above.storage_offset() + above.numel() != below.storage_offset():
            return torch.cat(list(weights))
    return first.as_strided((sum(weight.shape[0] for weight in weights), first.shape[1]), first.stride())


def _nothing(key: str) -> None:
    """Do nothing: no other rank waits for the key."""


class Parameters:
    """Allocates, fills and provides a model's tensors on one device."""

    def __init__(
        self,
        found: tuple[Piece, ...],
        *,
        weights: Store,
        shared_weights: ShardedWeights | None = None,
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
        self.deferred: Mapping[str, Deferred] = {}
        """HF name → whole master, of the tensors of that group."""
        self.before_fetch: Callable[[str], None] = _nothing
        """Called with the key of a piece before an export fetches it, for stores that all ranks serve."""
        self.panels: Mapping[str, Sequence[Panel]] = plan.panels if plan else {}
        """Key of a piece → the panels that its programs multiply with."""
        self.joins: Mapping[str, Sequence[Join]] = plan.joins if plan else {}
        """Key of a piece → the slots whose weights its programs read as one matrix."""
        self.packed: Mapping[str, PackedWeight] = plan.packed if plan else {}
        """HF name of a frozen weight → how the recipe or the weight format keeps it."""
        self.source: Source | None = None
        """What `fill` read, and reads again for weights that are rounded."""
        self.weights, self._shared_weights = weights, shared_weights
        self.master_dtype = master_dtype
        assert seed is not None or master_dtype == torch.float32, "narrow masters are rounded with a seed"
        self.device, self.dtype, self.adapter_dtype = device, dtype, adapter_dtype
        self.placement = placement or Placement.on(device)
        self.specs = {spec.hf_name: spec for spec in distinct(found)}
        self.flat = FlatGroups(
            tuple(self.specs.values()),
            found,
            compute_dtype=self.compute_dtype,
            master_dtype=master_dtype,
            weight_decay=weight_decay,
            seed=seed,
            placement=self.placement,
            sharing=sharing,
        )
        self.groups, self.host_groups = self.flat.groups, self.flat.host_groups
        self.copies, self.sharded = self.flat.copies, self.flat.sharded
        self._frozen: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        """What no run trains beside weights that are trained and sharded: every rank keeps it."""
        self._panels = Panels(found, plan, self.flat.master, dtype=dtype, device=device)
        self.shared = self._panels.shared

    def compute_dtype(self, spec: TensorSpec) -> torch.dtype:
        """Dtype in which a piece receives the tensor."""
        packed = self.packed.get(spec.hf_name)
        if packed is not None and packed.unpack is None:
            return packed.dtype
        return self.adapter_dtype if spec.role == "adapter" else spec.dtype_in(self.dtype)

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
        self.source = source
        total = len(self.specs)
        in_panel = {
            spec.hf_name: place
            for piece in self.pieces
            for name, place in self._panels.frozen_weights(piece).items()
            if (spec := piece.spec(name)).hf_name not in self.packed
        }
        last = {spec.hf_name: piece.key for piece in self.pieces for spec in piece.specs}
        missing, waiting = set(self.specs), list(self.pieces)
        for done, spec in enumerate(self.specs.values(), start=1):
            value = source(spec)
            how = self.packed.get(spec.hf_name)
            if isinstance(value, InFile):
                self._read_master(spec, value)
            elif isinstance(value, Kept):
                assert how is not None
                assert how.unpack is not None
                assert tuple(value.tensor.shape) == how.shape, f"{spec.hf_name}: {value.tensor.shape}"
                self._frozen[spec.hf_name] = value.tensor.to(self.device)
            elif isinstance(value, OneByOne):
                self._frozen[spec.hf_name] = self._kept_experts(spec, self.packed[spec.hf_name], value.read)
            elif tuple(value.shape) != spec.shape:
                raise AssertionError(f"{spec.hf_name}: source gave {tuple(value.shape)}, not {spec.shape}")
            elif spec.trainable:
                self._set_master(spec.hf_name, value)
            else:
                place = in_panel.get(spec.hf_name)
                if how is not None and how.expert is not None:
                    place = self._kept_experts(spec, how, value.__getitem__)
                elif place is None:
                    place = value.to(self.device, spec.dtype_in(self.dtype)).contiguous()
                    place = place if how is None else how.pack(place)
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

    def _kept_experts(self, spec: TensorSpec, packed: PackedWeight, read: Callable[[int], Tensor | Kept]) -> Tensor:
        """A frozen weight of experts as it is kept, from the weight of each; only one is in full precision at a
        time.
        """
        assert packed.expert is not None, f"{spec.hf_name}: the experts are kept together"
        whole = torch.zeros(packed.shape, dtype=packed.dtype, device=self.device)

        def keep(value: Tensor | Kept, row: Tensor) -> None:
            if isinstance(value, Kept):
                kept = value.tensor
            else:
                kept = packed.pack(value.to(self.device, self.dtype).contiguous())
            assert kept.shape == (packed.expert,), f"{spec.hf_name}: an expert has {kept.shape}, not {packed.expert}"
            row[: len(kept)].copy_(kept)

        for number, row in enumerate(whole):
            keep(read(number), row)
        return whole

    def _set_master(self, name: str, value: Tensor) -> None:
        if self.sharded is not None and name in self.sharded.shapes:
            self.sharded.set(name, value)
        else:
            self.flat.master[name].copy_(value)

    def _read_master(self, spec: TensorSpec, file: InFile) -> None:
        if self.sharded is not None and spec.hf_name in self.sharded.shapes:
            self.sharded.read_from(spec.hf_name, file.read)
        else:
            file.read(0, self.flat.master[spec.hf_name].view(-1))

    def _hand_over(self, piece: Piece, last: Mapping[str, str]) -> None:
        """Put a piece's tensors into the weights store, which owns them from then on."""
        stored = [s.hf_name for s in piece.specs if s.hf_name not in self.flat.compute]
        group = self.sharded
        if group is not None and self._shared_weights is not None and stored:
            self._buffers |= {name: self._frozen.pop(name) for name in stored if name not in group.shapes}
            if trained := [name for name in stored if name in group.shapes]:
                self._shared_weights.put_trained(piece.key, group.owned_copies(piece.key), group.places(trained))
            else:
                self.weights.put(piece.key, [])
            return
        tensors = [self.flat.streamed[n] if n in self.flat.streamed else self._frozen[n] for n in stored]
        self.weights.put(piece.key, tensors)
        for name in stored:
            if last[name] == piece.key:
                self._frozen.pop(name, None)

    def refresh(self, *, on_host: bool = False) -> None:
        """Refresh the compute copies from the masters (on the CPU if both are in host memory)."""
        self.flat.refresh(on_host=on_host)
        self._panels.refresh()

    def _wide(self, spec: TensorSpec, kept: Tensor) -> Tensor:
        """The frozen tensor as programs receive it. Unpacks a weight that is in a weight format."""
        room = self._panels.rooms.get(spec.hf_name)
        if room is None:
            return kept
        unpack = self.packed[spec.hf_name].unpack
        assert unpack is not None
        unpack(kept, room)
        return room

    def panel_tensors(self, piece: Piece) -> list[tuple[Panel, Tensor]]:
        """The panels of a piece with their tensors, which stay on the device."""
        return self._panels.of(piece)

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
        for edge, value in self._panels.edges.get(piece.key, ()):
            edge.copy_(value)
        kept = ChainMap(self.flat.compute, self._buffers)
        return [kept[s.hf_name] if s.hf_name in kept else self._wide(s, next(stored)) for s in piece.specs]

    def edge_bytes(self) -> int:
        """Bytes of the A's and B's that are stored outside of shared panels."""
        return self._panels.edge_bytes()

    def masters(self) -> Mapping[str, Tensor]:
        """The live masters by HF name, but for those of which a rank has a part."""
        return {name: master for name, master in self.flat.master.items() if name not in self.deferred}

    def gradients_by_name(self) -> Mapping[str, Tensor]:
        """The live fp32 gradients by HF name."""
        return self.flat.grad

    def base_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor except adapters as (HF name, value in the dtype of exports), one at a time; experts one by one.

        A weight in a weight format has its rounded value, on which the adapters were trained.
        """
        self.weights.begin_pass()
        seen: set[str] = set()
        for piece in self.pieces:
            self.before_fetch(piece.key)
            for spec, computed in zip(piece.specs, self.inputs(piece), strict=True):
                if spec.hf_name in seen:
                    continue
                value = self._whole_master(spec.hf_name) if spec.trainable else computed
                if spec.parts > 1 and not spec.trainable:
                    value = self._of_all_experts(spec)
                elif spec.hf_name in self._panels.rooms:
                    value = value.clone()
                elif spec.hf_name in self.packed:
                    # The recipe's kept form is rounded, so the weight itself is read or drawn again.
                    assert self.source is not None
                    again = self.source(spec)
                    assert isinstance(again, Tensor)
                    value = again
                if spec.role != "adapter" and spec.hf_name not in seen:
                    seen.add(spec.hf_name)
                    yield from split(spec.hf_name, value.to(spec.dtype_in(self.dtype)).contiguous())
            self.weights.release(piece.key)

    def _of_all_experts(self, spec: TensorSpec) -> Tensor:
        """A frozen weight of all experts, of which this rank has a part: read or drawn again, and in a weight format
        rounded again.
        """
        assert isinstance(self.source, ExpertsOfRank)
        value, packed = self.source.source(of_all(spec)), self.packed.get(spec.hf_name)
        if packed is None or packed.unpack is None:
            assert isinstance(value, Tensor)
            return value
        assert isinstance(value, Tensor | OneByOne)
        read = value.read if isinstance(value, OneByOne) else value.__getitem__
        room = torch.empty(of_all(spec).shape, dtype=self.dtype, device=self.device)
        kept = replace(packed, shape=(len(room), *packed.shape[1:]))
        packed.unpack(self._kept_experts(spec, kept, read), room)
        return room

    def _whole_master(self, name: str) -> Tensor:
        return self.deferred[name].load() if name in self.deferred else self.flat.master[name]

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every trained tensor of a run with adapters as (PEFT name without prefix, its master in fp32).

        Those are A and B of each adapter, and routers that are trained.
        """
        if any(spec.role == "adapter" for spec in self.specs.values()):
            for name in self.flat.master:
                yield from split(name, self._whole_master(name).float())

    def counts(self) -> tuple[int, int]:
        """(all parameters, trainable parameters)."""
        sizes = [(math.prod(s.shape) * s.parts, s.trainable) for s in self.specs.values()]
        return sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)
