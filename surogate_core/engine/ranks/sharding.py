"""How several ranks share out the weights of a full training: who owns which elements of a flat group.

The layout of a flat group does not depend on the number of ranks. Each piece (the embedding, a layer, the head) has a
range of it, and each rank owns a part of each range, so that a piece is reduced and gathered as soon as it is ready.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surogate_core.bundles import FLAT_ALIGNMENT, ParamGroup
from surogate_core.engine.ranks.lanes import Share
from surogate_core.engine.ranks.owned import Owned, Within
from surogate_core.engine.ranks.stages import Stages
from surogate_core.engine.schedule import EMBED, HEAD
from surogate_core.files.tensorfile import Deferred, read_elements
from surogate_core.kernels.optimizing.rounding import PERIOD
from surogate_core.mesh.axes import AXES, Axes, AxisName
from surogate_core.mesh.mesh import Along, Mesh
from surogate_core.mesh.sums import LANES

if TYPE_CHECKING:
    from surogate_core.engine.placement import Placement
    from surogate_core.engine.planning.pieces import Piece
    from surogate_core.engine.ranks.orders import Orders

Range = tuple[int, int]
"""(first element, one past the last)."""


def owners(whole: Range, ranks: int) -> list[Range]:
    """Each rank's part of a range whose ends are multiples of `FLAT_ALIGNMENT`, in blocks of which it is divided.

    The parts of a power of two up to 8 ranks are unions of eighths, so that half of the ranks own twice the part.
    Parts at the end may be short, or empty.
    """
    start, stop = whole
    units = (stop - start) // FLAT_ALIGNMENT
    each = -(-units // LANES) * (LANES // ranks) if LANES % ranks == 0 else -(-units // ranks)
    borders = [min(start + rank * each * FLAT_ALIGNMENT, stop) for rank in range(ranks + 1)]
    return list(pairwise(borders))


def longest_part(elements: int, ranks: int) -> int:
    """Elements of the part of the first rank, whose part is the longest."""
    start, stop = owners((0, elements), ranks)[0]
    return stop - start


def piece_ranges(pieces: Sequence[Piece], shapes: Mapping[str, tuple[int, tuple[int, ...]]]) -> dict[str, Range]:
    """Key of a piece → the range that its members have in a flat group; a tied tensor is the embedding's."""
    ranges: dict[str, Range] = {}
    seen: set[str] = set()
    for piece in pieces:
        spans = [
            (offset, offset + -(-math.prod(shape) // FLAT_ALIGNMENT) * FLAT_ALIGNMENT)
            for name in (s.hf_name for s in piece.specs if s.hf_name in shapes and s.hf_name not in seen)
            for offset, shape in [shapes[name]]
        ]
        seen.update(s.hf_name for s in piece.specs)
        if spans:
            ranges[piece.key] = (min(spans)[0], max(spans)[1])
            assert sum(b - a for a, b in spans) == ranges[piece.key][1] - ranges[piece.key][0]
    return ranges


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The plan of the ranks on one of them, and what it communicates with."""

    mesh: Mesh
    stages: Stages
    """Who owns which part, and the collectives."""
    axes: Axes
    """What they divide, and how."""
    along: Mapping[AxisName, Along] = field(default_factory=dict)
    """The fabric of this rank's group along each axis."""
    replicas_once: bool = False
    """`Assembly.adds_replicas_once`."""

    @classmethod
    def of(cls, mesh: Mesh, axes: Axes, *, replicas_once: bool = False) -> Sharing:
        """The plan on one rank of a mesh, which need not be connected yet."""
        assert mesh.world == axes.ranks, f"{mesh.world} ranks, planned for {axes.ranks}"
        along = {name: Along(mesh, axes.along(name)) for name in AXES}
        stages = Stages(mesh, shard=axes.shard)
        return cls(mesh=mesh, stages=stages, axes=axes, along=along, replicas_once=replicas_once)

    def connect(self, names: Collection[AxisName]) -> None:
        """Open the groups of the stages, and of these axes. All ranks call it, after `Mesh.connect` and before a CUDA
        graph is captured.
        """
        self.stages.connect()
        for name in AXES:
            if name in names and name != "ranks" and self.axes.along(name).size > 1:
                self.along[name].connect()

    def over(self, axis: AxisName) -> Stages:
        """The stages of sums over the ranks of an axis."""
        return self.stages.everyone() if axis == "ranks" else Stages.over(self.along[axis])

    def place(self, axis: AxisName) -> int:
        """The number of this rank in its group along an axis."""
        return self.axes.along(axis).place(self.mesh.rank)

    def share(self, micro_batches: int) -> Share:
        """This rank's micro-batches of a step."""
        share, rows = Share.of_any if self.axes.varying else Share.of, self.axes.along("rows")
        return share(
            micro_batches,
            rank=rows.place(self.mesh.rank),
            ranks=rows.size,
            exact=self.axes.exact,
            strided=self.axes.reduces_each_micro_step,
        )

    def place_of_figures(self, number: int, micro_batches: int) -> int:
        """The place where the figures of a step's micro-batch are added up: there are M for each rank of a group that
        shares rows.

        Those of a place are of one rank, and of one lane if sums are exact. A step that has M micro-batches has one in
        each.
        """
        places = self.axes.micro_batches
        place = number % places if self.axes.reduces_each_micro_step else number * places // micro_batches
        return self.axes.context * place + self.place("context")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """A rank's part of a piece."""

    key: str
    owners: tuple[Range, ...]
    """The elements of every part in the flat group."""
    own: Range
    """This rank's elements in the flat group."""
    at: int
    """Where they begin in the rank's own flat tensors."""

    @property
    def count(self) -> int:
        """Elements of this rank."""
        return self.own[1] - self.own[0]

    @property
    def longest(self) -> int:
        """Elements of the first part, which is the longest."""
        return self.owners[0][1] - self.owners[0][0]

    @property
    def local(self) -> slice:
        """Their place in the rank's own flat tensors."""
        return slice(self.at, self.at + self.count)


CHUNK = 2**24
"""Elements that are gathered at a time for a file: 64 MiB of fp32."""


def chunks(start: int, stop: int) -> list[Range]:
    """A range in pieces of at most `CHUNK`."""
    cuts = [*range(start, stop, CHUNK), stop]
    return list(pairwise(cuts))


def gathered_range(stages: Stages, own: Tensor, owners: Sequence[Range], wanted: Range, *, like: Tensor) -> Tensor:
    """The elements `wanted` of a flat tensor whose parts have the elements that `owners` says; all ranks take part.

    `own`: this rank's, flat. `like`: gives the dtype and the device of the result.
    """
    start, stop = wanted
    found = like.new_empty(stop - start)
    cut = [(max(a, start), max(min(b, stop), max(a, start))) for a, b in owners]
    low, high = cut[stages.own]
    if low < high:
        found[low - start : high - start].copy_(own[low - owners[stages.own][0] : high - owners[stages.own][0]])
    stages.gather_apart([found[min(a, stop) - start : min(b, stop) - start] for a, b in cut])
    return found


class ShardedGroup:
    """A flat group as one of several ranks holds it: its part of masters and optimizer state.

    `sums` are the gradients of the whole group at level 1, else of this rank's part. What blocks compute with, the
    copies, are whole; if weights are shared out, they are this rank's part of a layer.

    `groups` are the parts for the optimizer, `host_groups` the same ones for the CPU, if they are in its memory.
    """

    def __init__(
        self,
        whole: ParamGroup,
        pieces: Sequence[Piece],
        sharing: Sharing,
        placement: Placement,
        *,
        dtype: torch.dtype,
        master_dtype: torch.dtype,
    ):
        """`whole`: the group of one rank, on the meta device. `dtype`: that of the copies."""
        stages = self._stages = sharing.stages
        self.name, self.shapes, self.elements = whole.name, whole.shapes, whole.master.numel()
        self._mesh, self.device = sharing.mesh, placement.device
        parts, at = [], 0
        for key, span in piece_ranges(pieces, whole.shapes).items():
            by_part = owners(span, stages.parts)
            part = RankPart(key=key, owners=tuple(by_part), own=by_part[stages.own], at=at)
            parts.append(part)
            at += part.count
        self.parts = {part.key: part for part in parts}
        self.master, self._host_master = placement.zeros("master", at, master_dtype)
        sums = self.elements if sharing.axes.zero_level == 1 else at
        self.sums, self._host_sums = placement.zeros("gradients", sums, torch.float32)
        self._whole_sums = sharing.axes.zero_level == 1
        self.whole_pieces = tuple(key for key in self.parts if not sharing.axes.shards_weights or key in (EMBED, HEAD))
        """Keys of the pieces whose copies are whole on every rank."""
        self._copies: dict[str, Tensor] = {}
        self._resting: dict[str, Tensor] = {}
        """The copies of this rank's parts as their store keeps them; in host memory they are the CPU's tensors."""
        self._allocate_copies(placement, dtype)
        self.groups: list[ParamGroup] = []
        self.host_groups: list[ParamGroup] = []
        for part in parts:
            self._add_groups(part, whole)

    def _allocate_copies(self, placement: Placement, dtype: torch.dtype) -> None:
        """Whole pieces stay on the device, parts are in the offloader's place."""
        for key in self.whole_pieces:
            # All parts have the length of the longest one, so that one all-gather fills them in place. Broadcasts would
            # gather unequal parts, one from every rank.
            elements = self.parts[key].longest * self._stages.parts
            self._copies[key] = self._mesh.zeros(elements, dtype, placement.device)
        cut = {key: part.count for key, part in self.parts.items() if key not in self.whole_pieces}
        if cut:
            copies, resting = placement.trained_weights(sum(cut.values()), dtype)
            self._copies |= zip(cut, copies.split([*cut.values()]), strict=True)
            self._resting |= zip(cut, resting.split([*cut.values()]), strict=True)

    def _add_groups(self, part: RankPart, whole: ParamGroup) -> None:
        """Add a part as groups of the optimizer, cut where rounding begins to draw other numbers."""
        start, stop = part.own
        cuts = [start, *range((start // PERIOD + 1) * PERIOD, stop, PERIOD), stop]
        for low, high in pairwise(cuts):
            if low == high:
                continue
            local = slice(part.at + low - start, part.at + high - start)
            shapes, sizes = {}, {}
            for name, (offset, shape) in self.shapes.items():
                count = math.prod(shape)
                a, b = max(offset, low), min(offset + count, high)
                if a < b:
                    shapes[name] = (a - low, (b - a,))
                    sizes[name] = count
            of_sums = slice(low, high) if self._whole_sums else local
            group = ParamGroup(
                name=f"{self.name}@{part.key}.{low // PERIOD}",
                master=self.master[local],
                grad=self.sums[of_sums],
                shapes=shapes,
                weight_decay=whole.weight_decay,
                seed=whole.seed,
                number=whole.number,
                first=low,
                sizes=sizes,
            )
            self.groups.append(group)
            on_host = replace(group, master=self._host_master[local], grad=self._host_sums[of_sums])
            self.host_groups.append(on_host)

    # ------------------------------------------------------------------------ by piece

    def owned_sums(self, key: str) -> Owned:
        """A piece's range of sums as a store takes it."""
        return self._owned(key, self.own_sums(key))

    def owned_copies(self, key: str) -> Owned:
        """A piece's range of compute copies as a store takes it."""
        return self._owned(key, self._resting[key])

    def _owned(self, key: str, shard: Tensor) -> Owned:
        part = self.parts[key]
        start = part.owners[0][0]
        return Owned(owners=[(a - start, b - start) for a, b in part.owners], shard=shard)

    def places(self, names: Sequence[str]) -> list[Within]:
        """The places of tensors in the ranges of their pieces."""
        found = []
        for name in names:
            offset, shape = self.shapes[name]
            part = next(p for p in self.parts.values() if p.owners[0][0] <= offset < p.owners[-1][1])
            found.append(Within(part.key, offset - part.owners[0][0], shape))
        return found

    def own_sums(self, key: str) -> Tensor:
        """The gradients of this rank's part of a piece."""
        part = self.parts[key]
        return self.sums[slice(*part.own)] if self._whole_sums else self.sums[part.local]

    def own_copies(self, key: str) -> Tensor:
        """The compute copies of this rank's part of a piece."""
        part = self.parts[key]
        if key not in self.whole_pieces:
            return self._copies[key]
        start = part.owners[0][0]
        return self._copies[key][part.own[0] - start : part.own[1] - start]

    def reduce(self, key: str, staging: Tensor) -> None:
        """At level 1: add the gradients of a piece over the ranks, into those of this rank's part."""
        part = self.parts[key]
        self._stages.reduce(self.sums[part.owners[0][0] : part.owners[-1][1]], part.longest, staging)

    def gather(self, key: str) -> None:
        """Gather the compute copies of a whole piece: parts of equal lengths, with zeros after the last element."""
        self._stages.gather(self._copies[key], self.parts[key].longest)

    def sums_by_name(self) -> dict[str, Tensor]:
        """At level 1: name → the gradient of each tensor; else nothing."""
        if not self._whole_sums:
            return {}
        return {name: self.sums[at : at + math.prod(shape)].view(shape) for name, (at, shape) in self.shapes.items()}

    def copies_by_name(self, key: str) -> dict[str, Tensor]:
        """Name → compute copy of each tensor of a whole piece."""
        return {
            name: self._copies[key][at : at + math.prod(shape)].view(shape) for name, (at, shape) in self.layout(key)
        }

    def layout(self, key: str) -> list[tuple[str, tuple[int, tuple[int, ...]]]]:
        """(name, (offset in the piece, shape)) of the tensors of a piece."""
        start, stop = self.parts[key].owners[0][0], self.parts[key].owners[-1][1]
        return [(n, (offset - start, shape)) for n, (offset, shape) in self.shapes.items() if start <= offset < stop]

    def refresh(self, *, on_host: bool = False) -> None:
        """Cast this rank's masters to its compute copies. `on_host`: the CPU casts those that are in its memory."""
        for key, part in self.parts.items():
            if on_host and key in self._resting:
                self._resting[key].copy_(self._host_master[part.local])
            else:
                self.own_copies(key).copy_(self.master[part.local])

    # ------------------------------------------------------------------------- by name

    def _overlaps(self, name: str) -> list[tuple[RankPart, Range]]:
        """(part, elements) of this rank's parts that have some of a tensor."""
        offset, shape = self.shapes[name]
        stop = offset + math.prod(shape)
        found = []
        for part in self.parts.values():
            a, b = max(offset, part.own[0]), min(stop, part.own[1])
            if a < b:
                found.append((part, (a, b)))
        return found

    def set(self, name: str, value: Tensor) -> None:
        """Copy this rank's part of a whole tensor into its masters."""
        flat, offset = value.reshape(-1), self.shapes[name][0]
        for part, (a, b) in self._overlaps(name):
            at = part.at + a - part.own[0]
            self.master[at : at + b - a].copy_(flat[a - offset : b - offset])

    def read(self, name: str, file: Mapping[str, Tensor]) -> None:
        """Read this rank's part of a master from a checkpoint."""
        self.read_from(name, partial(read_elements, file, name))

    def read_from(self, name: str, read: Callable[[int, Tensor], None]) -> None:
        """Read this rank's part of a master. `read`: (first element of the tensor, where to)."""
        offset = self.shapes[name][0]
        for part, (a, b) in self._overlaps(name):
            at = part.at + a - part.own[0]
            read(a - offset, self.master[at : at + b - a])

    def _range(self, part: RankPart, start: int, stop: int) -> Tensor:
        """Masters of a piece, whoever owns them; all ranks take part."""
        return gathered_range(
            self._stages,
            self.master[part.local],
            part.owners,
            (start, stop),
            like=torch.empty(0, dtype=self.master.dtype, device=self.device),
        )

    def deferred(self, orders: Orders) -> dict[str, Deferred]:
        """Name → its whole master, made when rank 0 reads it."""
        found = {}
        for name, (offset, shape) in self.shapes.items():
            part = next(p for p in self.parts.values() if p.owners[0][0] <= offset < p.owners[-1][1])
            works = [partial(self._range, part, a, b) for a, b in chunks(offset, offset + math.prod(shape))]
            found[name] = orders.deferred(shape, self.master.dtype, works)
        return found
