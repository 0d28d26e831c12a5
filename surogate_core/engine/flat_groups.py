"""The flat groups: masters (fp32, or bf16) and fp32 gradients of many parameters in one tensor each.

With them clipping, the optimizer and the refresh of compute copies are a few launches for any model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from surogate_core.bundles import FLAT_ALIGNMENT, GradientStore, ParamGroup
from surogate_core.dsl.declare import TensorSpec
from surogate_core.engine.placement import Placement
from surogate_core.engine.planning.pieces import Piece
from surogate_core.engine.ranks.sharded_gradients import ShardedGradients
from surogate_core.engine.ranks.sharding import ShardedGroup, Sharing, longest_part
from surogate_core.mesh.axes import AxisName

WIDE = "_fp32"
"""End of the names of groups of parameters that are always in fp32. Every rank keeps them, because they are small."""


OF_EXPERTS = " over expert_replicate"
"""Part of the names of groups of experts that ranks share out."""


def padded(elements: int) -> int:
    """Elements that a tensor takes in a flat group."""
    return -(-elements // FLAT_ALIGNMENT) * FLAT_ALIGNMENT


def _is_hidden(spec: TensorSpec) -> bool:
    """Whether it is a matrix within a block, or one for each expert; the filters of a convolution, [channels, 1,
    width], are not.
    """
    return spec.role in ("weight", "router") and len(spec.shape) > 1 and min(spec.shape[-2:]) > 1


def _gaps(group: ParamGroup, names: Collection[str]) -> list[Tensor]:
    """The ranges of a group's gradients around those of some tensors."""
    own = (place for name, place in group.shapes.items() if name in names)
    taken = sorted((offset, offset + padded(math.prod(shape))) for offset, shape in own)
    gaps = zip([0, *(stop for _, stop in taken)], [*(start for start, _ in taken), group.grad.numel()], strict=True)
    return [group.grad[start:stop] for start, stop in gaps if start < stop]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatMember:
    """A trained tensor of a flat group of one rank, on a rank that may have only a part of all experts."""

    name: str
    group: str
    """Name of the group in which this rank has it."""
    shape: tuple[int, ...]
    """The shape of this rank's part."""
    whole: int
    """Elements of all experts together."""
    of_experts: bool
    """Whether ranks share it out by experts."""
    hidden: bool
    """As of `ParamGroup.hidden`."""


class FlatGroups:
    """Allocates the flat groups of a model's trained parameters, with the compute copies of their masters."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        pieces: Sequence[Piece],
        *,
        compute_dtype: Callable[[TensorSpec], torch.dtype],
        master_dtype: torch.dtype,
        weight_decay: float,
        seed: Tensor | None,
        placement: Placement,
        sharing: Sharing | None,
    ):
        """`specs`: all tensors of the pieces. `compute_dtype`: of a tensor → dtype in which a piece receives it."""
        self._pieces, self._compute_dtype, self._seed = pieces, compute_dtype, seed
        self._master_dtype, self._placement, self._sharing = master_dtype, placement, sharing
        self.sharded: ShardedGroup | None = None
        """The group that several ranks share out."""
        self.groups: list[ParamGroup] = []
        self.host_groups: list[ParamGroup] = []
        """The same groups for the CPU, if masters and gradients are in its memory."""
        self._numbers: dict[str, int] = {}
        """Name of a group → its number."""
        self.master: dict[str, Tensor] = {}
        """HF name → live master, but for those that are sharded."""
        self.kept_by_all: list[Tensor] = []
        """For each group that every rank keeps, [N, K]: its gradients in equal parts of the N ranks of its axis, so
        that one all-gather fills them in place. Zeros follow the last gradient.
        """
        self.kept_over: list[AxisName] = []
        """The axis of each of these groups, over which its gradients are summed."""
        self.of_experts: list[ParamGroup] = []
        """The groups of experts that ranks share out."""
        self.grad: dict[str, Tensor] = {}
        """HF name → live fp32 gradient."""
        self.host_grad: dict[str, Tensor] = {}
        """The same for the CPU, if gradients are in its memory."""
        self.compute: dict[str, Tensor] = {}
        """HF name → what pieces compute with, where the store does not have it."""
        self.streamed: dict[str, Tensor] = {}
        """The CPU's live tensors of trained weights that use the store."""
        self.copies: list[tuple[Tensor, Tensor]] = []
        """(compute copy, the range of masters from which it is cast)."""
        self.host_copies: list[tuple[Tensor, Tensor]] = []
        """The same for the CPU, if both are in its memory."""
        trainable = self._trained = [spec for spec in specs if spec.trainable]
        # Parameters that are always in fp32 have groups of their own, so the layout of the others does not depend on
        # the dtype of masters.
        for wide, axis in product((False, True), dict.fromkeys(["ranks", *(s.summed for s in trainable)])):
            found = [s for s in trainable if s.summed == axis and (s.dtype == "fp32") == wide]
            kind = ("" if axis == "ranks" else f" over {axis}") + (WIDE if wide else "")
            self._add_group(f"decayed{kind}", [s for s in found if s.decayed], weight_decay, axis)
            self._add_group(f"undecayed{kind}", [s for s in found if not s.decayed], 0.0, axis)

    def name_on_one_rank(self, name: str) -> str:
        """The name that a group's tensors have on a rank that has all experts."""
        return name.replace(OF_EXPERTS, "")

    def order_on_one_rank(self, name: str) -> list[FlatMember]:
        """The tensors of a group of one rank, in its order."""
        groups: list[ParamGroup | ShardedGroup] = [] if self.sharded is None else [self.sharded]
        groups += [group for group in self.groups if "@" not in group.name]
        own = {member: g for g in groups if self.name_on_one_rank(g.name) == name for member in g.shapes}
        members = sorted((s for s in self._trained if s.hf_name in own), key=lambda s: str(self._compute_dtype(s)))
        return [
            FlatMember(
                name=spec.hf_name,
                group=own[spec.hf_name].name,
                shape=spec.shape,
                whole=math.prod(spec.shape) * spec.parts,
                of_experts=any(own[spec.hf_name] is group for group in self.of_experts),
                hidden=_is_hidden(spec),
            )
            for spec in members
        ]

    def _layout(
        self, members: list[TensorSpec]
    ) -> tuple[list[TensorSpec], dict[str, tuple[int, tuple[int, ...]]], dict[torch.dtype, tuple[int, int]], int]:
        """(members in their order, name → offset and shape, compute dtype → range, elements) of a group.

        Adapters and base weights may be computed in different dtypes, and a compute copy is one cast of a contiguous
        range: members are ordered by dtype.
        """
        members = sorted(members, key=lambda s: str(self._compute_dtype(s)))
        shapes: dict[str, tuple[int, tuple[int, ...]]] = {}
        ranges: dict[torch.dtype, tuple[int, int]] = {}
        size = 0
        for spec in members:
            dtype = self._compute_dtype(spec)
            start = ranges.get(dtype, (size, size))[0]
            shapes[spec.hf_name] = (size, spec.shape)
            size += padded(math.prod(spec.shape))
            ranges[dtype] = (start, size)
        return members, shapes, ranges, size

    def _add_group(self, name: str, members: list[TensorSpec], weight_decay: float, axis: AxisName) -> None:
        if not members:
            return
        self._numbers[name] = len(self._numbers)
        members, shapes, ranges, size = self._layout(members)
        if name == "decayed" and self._sharing is not None and self._sharing.axes.shards:
            self._add_sharded(name, members, shapes, size, weight_decay)
            return
        master_dtype = members[0].dtype_in(self._master_dtype)
        # The other groups are small, but for those of experts. They stay on the device, unless the CPU updates them.
        small = axis != "expert_replicate"
        here = small and self.sharded is not None and not self._placement.updates_on_cpu
        placement = Placement.on(self._placement.device) if here else self._placement
        master, host_master = placement.zeros("master", size, master_dtype)
        ranks = 1 if self._sharing is None else self._sharing.axes.along(axis).size
        parts, host_parts = placement.zeros("gradients", longest_part(size, ranks) * ranks, torch.float32)
        self.kept_by_all.append(parts.view(ranks, -1))
        self.kept_over.append(axis)
        grad, host_grad = parts[:size], host_parts[:size]
        group = ParamGroup(
            name=name,
            master=master,
            grad=grad,
            shapes=shapes,
            weight_decay=weight_decay,
            hidden=frozenset(s.hf_name for s in members if _is_hidden(s)),
            seed=self._seed if master_dtype != torch.float32 else None,
            number=self._numbers[name],
            sizes={s.hf_name: math.prod(s.shape) * s.parts for s in members if s.parts > 1},
        )
        self.groups.append(group)
        self.host_groups.append(replace(group, master=host_master, grad=host_grad))
        if axis == "expert_replicate":
            self.of_experts.append(group)
        # A store of shares has no live whole tensors: what blocks compute with is on the device.
        apart = self._sharing is not None and self._sharing.axes.shards_weights
        copied = Placement.on(self._placement.device) if apart else placement
        for dtype, (start, stop) in ranges.items():
            compute, resting = master, host_master
            if dtype != master_dtype or (apart and placement.moves("master")):
                compute, resting = copied.trained_weights(stop - start, dtype)
                self.copies.append((compute, master[start:stop]))
                self.host_copies.append((resting, host_master[start:stop]))
            streamed = copied.streams_trained(masters=compute is master)
            for spec in members:
                if self._compute_dtype(spec) == dtype:
                    offset, shape = shapes[spec.hf_name]
                    count = math.prod(shape)
                    self.master[spec.hf_name] = master[offset : offset + count].view(shape)
                    self.grad[spec.hf_name] = grad[offset : offset + count].view(shape)
                    self.host_grad[spec.hf_name] = host_grad[offset : offset + count].view(shape)
                    at = offset if compute is master else offset - start
                    into, whole = (self.streamed, resting) if streamed else (self.compute, compute)
                    into[spec.hf_name] = whole[at : at + count].view(shape)

    def _add_sharded(
        self,
        name: str,
        members: list[TensorSpec],
        shapes: Mapping[str, tuple[int, tuple[int, ...]]],
        size: int,
        weight_decay: float,
    ) -> None:
        (dtype,) = {self._compute_dtype(spec) for spec in members}
        assert self._sharing is not None
        nothing = torch.empty(size, dtype=self._master_dtype, device="meta")
        whole = ParamGroup(
            name=name,
            master=nothing,
            grad=nothing,
            shapes=shapes,
            weight_decay=weight_decay,
            seed=self._seed if self._master_dtype != torch.float32 else None,
            number=self._numbers[name],
        )
        group = self.sharded = ShardedGroup(
            whole, self._pieces, self._sharing, self._placement, dtype=dtype, master_dtype=self._master_dtype
        )
        self.groups += group.groups
        self.host_groups += group.host_groups
        for key in group.whole_pieces:
            self.compute |= group.copies_by_name(key)
        self.grad |= group.sums_by_name()
        self.host_grad |= group.sums_by_name()

    def refresh(self, *, on_host: bool = False) -> None:
        """Cast the masters to the compute copies (on the CPU if both are in host memory)."""
        if self.sharded is not None:
            self.sharded.refresh(on_host=on_host)
        for copy, master in self.host_copies if on_host else self.copies:
            copy.copy_(master)

    def rest_gradients(self, store: GradientStore) -> None:
        """Put the gradient sums of each piece's trainable tensors into their store."""
        for piece in self._pieces:
            store.put(piece.key, [self.host_grad[s.hf_name] for s in piece.specs if s.trainable])

    def share_gradients(self, store: ShardedGradients) -> None:
        """The same for the store of what ranks share out."""
        group = self.sharded
        assert group is not None
        for key in group.parts:
            store.put_owned(key, group.owned_sums(key))
        for piece in self._pieces:
            names = [s.hf_name for s in piece.specs if s.trainable]
            store.put(piece.key, [group.places([n])[0] if n in group.shapes else self.grad[n] for n in names])

    def sums_to_clear(self, *, streams: bool, written: Collection[str] = ()) -> list[Tensor]:
        """The ranges of flat gradient sums that no store clears. `streams`: whether the sums are in a store of their
        own; `written`: the pieces whose sums the first micro-step writes.
        """
        if streams:
            return [] if self.sharded is None else self.sums()[1:]
        if not written:
            return self.sums()
        names = {spec.hf_name for piece in self._pieces if piece.key in written for spec in piece.specs}
        return [grad for group in self.host_groups for grad in _gaps(group, names)]

    def sums(self) -> list[Tensor]:
        """The flat gradient sums of this rank."""
        if self.sharded is None:
            return [group.grad for group in self.host_groups]
        parts = {id(group) for group in self.sharded.groups}
        return [self.sharded.sums, *(group.grad for group in self.groups if id(group) not in parts)]
