"""How ranks reduce and gather what they share out: in one stage, or inside each machine and then between machines.

Stage i connects the ranks whose numbers differ in digit i alone. The digits are those of a number system with the sizes
of the stages, the lowest first: with 2 ranks on each of 4 machines, the first stage connects neighbours, and the second
one the ranks of the same number on all machines. If all sizes are powers of two, the sums have the order of one binary
tree over all ranks, and so its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

from torch import Tensor

from surogate_core.bundles.fabrics import Fabric
from surogate_core.engine.ranks.reduce import reduce_parts, staging_elements
from surogate_core.errors import MachineError
from surogate_core.kernels.sums import tree_sum
from surogate_core.mesh.mesh import Mesh

T = TypeVar("T")

VECTOR = 4
"""fp32 elements in 16 bytes: equal parts of a sum over replicas begin at multiples of it."""


def sizes_of(ranks: int, *, node: int = 0, shard: int = 0) -> tuple[int, ...]:
    """Ranks of each stage. `node`: ranks of each machine, `shard`: neighbouring ranks that share out tensors; 0: all.

    Machines make no stage of their own if neither number divides the other one.
    """
    borders = {border for border in (shard, node) if 1 < border < ranks}
    if len(borders) == 2 and max(borders) % min(borders):
        borders = {shard}
    return tuple(b // a for a, b in pairwise([1, *sorted(borders), ranks])) if ranks > 1 else ()


def cut(values: Tensor, each: int, count: int) -> list[Tensor]:
    """`count` views of a 1-D tensor, of `each` elements; the last ones may be shorter, or empty."""
    borders = [min(number * each, len(values)) for number in range(count + 1)]
    return [values[a:b] for a, b in pairwise(borders)]


class Stages:
    """Who owns which part of what ranks share out, and the collectives that bring sums and values there.

    A tensor has `parts` parts, equal but for the last ones. If they are fewer than ranks, each group of `parts`
    neighbours is a replica that has all of them, and sums are over all replicas.
    """

    def __init__(self, mesh: Mesh, *, shard: int = 0):
        """`shard`: neighbouring ranks that share out tensors; it divides those of the mesh. 0: all ranks."""
        self._mesh = mesh
        self.parts = shard or mesh.world
        """P, the number of parts of a tensor."""
        self._sizes = sizes_of(mesh.world, node=mesh.node, shard=self.parts)
        self._strides = list(accumulate(self._sizes, int.__mul__, initial=1))
        self._parted = self._strides.index(self.parts)
        """How many of the first stages part a tensor; the others are among replicas."""
        self._fabrics: list[Fabric] = []
        """One for each stage, if there are several and they are open."""
        self._group: Fabric | None = None
        """All ranks of this replica, if that is not one stage."""
        self.own = self.part_of(mesh.rank)
        """The part of this rank."""
        self.replica = mesh.rank // self.parts
        """The replica of this rank."""

    @classmethod
    def over(cls, fabric: Fabric) -> Stages:
        """One stage over a connected fabric."""
        return cls(Mesh(rank=fabric.rank, world=fabric.world, fabric=fabric))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks of each stage."""
        return self._sizes

    def everyone(self) -> Stages:
        """The same stages for tensors that have a part for each rank."""
        if self.parts == self._mesh.world:
            return self
        found = Stages(self._mesh)
        found._sizes, found._strides, found._parted = self._sizes, self._strides, len(self._sizes)
        found._fabrics = self._fabrics
        found.own = found.part_of(self._mesh.rank)
        return found

    def part_of(self, rank: int) -> int:
        """The part of any rank. Ranks of one stage have neighbouring unions of parts, in their order."""
        steps = list(zip(self._strides, self._sizes, strict=False))[: self._parted]
        return sum(rank // stride % size * (self.parts // (stride * size)) for stride, size in steps)

    def connect(self) -> None:
        """Open the groups of the stages. All ranks call it, after `Mesh.connect` and before a CUDA graph is captured.

        A fabric without `across` makes its sums in one stage. Raises `MachineError` if there are replicas.
        """
        if len(self._sizes) < 2 or self._fabrics:
            return
        fabric = self._mesh.fabric
        assert fabric is not None, "the ranks are connected before their groups"
        try:
            for stride, size in zip(self._strides, self._sizes, strict=False):
                near = fabric if stride * size == self._mesh.world else fabric.within(stride * size)
                self._fabrics.append(near if stride == 1 else near.across(stride))
                if stride > 1 and stride * size == self.parts < self._mesh.world:
                    self._group = near
        except NotImplementedError:
            self._fabrics.clear()
            if self.parts < self._mesh.world:
                raise MachineError(
                    "this fabric connects all GPUs alone, and dp_shard_size needs groups of them. Fix: fabric=auto, or "
                    "dp_shard_size=0"
                ) from None

    def _of_stage(self, number: int) -> Fabric:
        if self._fabrics:
            return self._fabrics[number]
        fabric = self._mesh.fabric
        assert fabric is not None, "the ranks are connected before the first collective"
        return fabric

    @property
    def _in_one(self) -> bool:
        """Whether the fabric of all ranks makes sums of several stages in one."""
        return len(self._sizes) > 1 and not self._fabrics

    # ------------------------------------------------------------------------- collectives

    def staging_elements(self, longest: int) -> int:
        """Elements of the `staging` of `reduce` for parts of `longest` elements."""
        rest = max((size * min(VECTOR * size, longest) for size in self._sizes[self._parted :]), default=0)
        return max(staging_elements(longest, self.parts), rest)

    def reduce(
        self,
        values: Tensor,
        each: int,
        staging: Tensor,
        *,
        out: Tensor | None = None,
        onto: bool = False,
        everywhere: bool = True,
    ) -> None:
        """Set this rank's part of `values`, or `out`, to its sum over all ranks, in tree order; over those of its
        replica if not `everywhere`. `onto`: add the sum to `out` instead.

        `values`: 1-D, contiguous, fp32; its parts have `each` elements, the last ones may be shorter, or empty. Other
        elements than this rank's are overwritten too if there are several stages. `staging`: as for `reduce_parts`.
        """
        if self._in_one:
            parts = cut(values, each, self.parts)
            ranks = range(self._mesh.world)
            by_rank = [parts[self.part_of(rank)] for rank in ranks]
            reduce_parts(self._of_stage(0), by_rank, staging, out=out, onto=onto)
            return
        replicas = self._fabrics[self._parted :] if everywhere else []
        for number, (stride, size) in enumerate(zip(self._strides, self._sizes[: self._parted], strict=False)):
            fabric, ends = self._of_stage(number), number + 1 == self._parted and not replicas
            slices = cut(values, each * self.parts // (stride * size), size)
            reduce_parts(fabric, slices, staging, out=out if ends else None, onto=onto and ends)
            values = slices[fabric.rank]
        if replicas:
            _add_everywhere(replicas, values, staging)
        if out is not None and (replicas or not self._parted):
            out.add_(values) if onto else out.copy_(values)

    def add_replicas(self, values: Tensor, staging: Tensor) -> None:
        """Set `values`, 1-D, contiguous, fp32, of this rank's parts, to their sum over the replicas, in tree order."""
        if self._fabrics[self._parted :] and values.numel():
            _add_everywhere(self._fabrics[self._parted :], values, staging)

    def gather(self, values: Tensor, each: int) -> None:
        """Fill all parts of `values` with what their owners have there: 1-D, contiguous, of any dtype."""
        if self._in_one:
            parts = cut(values, each, self.parts)
            self._of_stage(0).gather([parts[self.part_of(rank)] for rank in range(self._mesh.world)])
            return
        levels = []
        for number, (stride, size) in enumerate(zip(self._strides, self._sizes[: self._parted], strict=False)):
            slices = cut(values, each * self.parts // (stride * size), size)
            levels.append((self._of_stage(number), slices))
            values = slices[levels[-1][0].rank]
        for fabric, slices in reversed(levels):
            fabric.gather(slices)

    def gather_apart(self, parts: Sequence[Tensor]) -> None:
        """Fill `parts[p]` with the values that the owner of part p has there, for all p. Lengths may be any."""
        fabric = self._group or self._of_stage(0)
        if self.parts == self._mesh.world and self._mesh.fabric is not None:
            fabric = self._mesh.fabric
        fabric.gather([parts[self.part_of(rank)] for rank in range(self.parts)])

    def by_part(self, by_rank: Sequence[T]) -> list[T]:
        """Values of all ranks → those of the first replica, by part."""
        ranks = {self.part_of(rank): rank for rank in range(self.parts)}
        return [by_rank[ranks[part]] for part in range(self.parts)]


def _add_everywhere(fabrics: Sequence[Fabric], values: Tensor, staging: Tensor) -> None:
    """Set `values`, 1-D, to their sum over the ranks of all fabrics, on all of them, in tree order."""
    fabric, *others = fabrics
    each = len(values) // (VECTOR * fabric.world) * VECTOR
    if each:
        parts = cut(values[: each * fabric.world], each, fabric.world)
        reduce_parts(fabric, parts, staging)
        if others:
            _add_everywhere(others, parts[fabric.rank], staging)
        fabric.gather(parts)
    rest = values[each * fabric.world :]
    if rest.numel():
        for one in fabrics:
            # Too few for a part of each rank: every rank receives and adds all of them.
            rows = list(staging[: one.world * rest.numel()].view(one.world, -1).unbind())
            rows[one.rank].copy_(rest)
            one.gather(rows)
            tree_sum(rows, rest)
