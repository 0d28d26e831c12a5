"""What the ranks send each other in a step, and when: all of it can be captured in CUDA graphs.

Copies that the last update changed are gathered beside the forward of the first micro-step, in the order of their use.
Gradients are reduced beside the backward of the last one, or in the optimizer step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surogate_core.bundles.fabrics import Fabric
from surogate_core.engine.parameters import Parameters
from surogate_core.engine.ranks.sharding import Sharing
from surogate_core.engine.ranks.side_streams import FIRST, SideStream
from surogate_core.mesh.sums import lanes_of


class Traffic:
    """The communication of one rank. With one rank, nothing."""

    def __init__(self, sharing: Sharing, parameters: Parameters, *, device: torch.device):
        axes = sharing.axes
        micro_batches = axes.micro_batches
        self._sharing, self._group = sharing, parameters.sharded
        kept = zip(parameters.flat.kept_by_all, parameters.flat.kept_over, strict=True)
        self._replicated = [(sharing.over(axis), parts_NK) for parts_NK, axis in kept]
        """(stages of its sum, its gradients [N, K], a part for each rank of its axis) of each replicated group."""
        self._alone = axes.ranks == 1
        self._in_order = lanes_of(micro_batches) % axes.ranks == 0 and axes.exact
        # Where the number of micro-batches varies, a rank may have no micro-step at all.
        beside = not self._alone and not axes.varying
        self.overlaps = beside and axes.zero_level == 1 and sharing.share(micro_batches).simple
        """Whether the last micro-step of an optimizer step reduces gradients."""
        self.renews = not self._alone and self._group is not None
        """Whether an update changes copies of other ranks, which are gathered afterwards."""
        self.gathers = beside and self.renews
        """Whether the first micro-step of an optimizer step gathers them."""
        self.stale = self.renews
        """Whether the next pass must gather copies that the last update changed."""
        self.reducing = False
        """Whether this micro-step reduces gradients."""
        self.counts = False
        """Whether micro-steps exchange the tokens of experts."""
        self._coming: dict[str, torch.cuda.Event | None] = {}
        # Ranks that share rows, or experts, exchange values in the compute stream, or in one that it waits for within
        # the layer. Collectives of two groups on two streams could wait for each other, so all others are in the
        # compute stream then.
        one_stream = axes.exchanges
        self._side = SideStream(torch.device("cpu") if one_stream else device, priority=FIRST)
        self._last: torch.cuda.Event | None = None
        """After the last work of this micro-step on the side stream."""
        self._staging = sharing.mesh.zeros(0 if self._alone else self._staging_size(), torch.float32, device)

    def _staging_size(self) -> int:
        found = max((stages.staging_elements(parts_NK.shape[1]) for stages, parts_NK in self._replicated), default=0)
        if self._group is not None and (self._sharing.axes.zero_level == 1 or self._sharing.replicas_once):
            longest = max(part.longest for part in self._group.parts.values())
            found = max(found, self._sharing.stages.staging_elements(longest))
        return found

    @property
    def _fabric(self) -> Fabric:
        fabric = self._sharing.mesh.fabric
        assert fabric is not None, "the ranks are connected before the first step"
        return fabric

    # ----------------------------------------------------------------------- micro-step

    def within(self, *, first: bool, last: bool) -> bool:
        """Whether a micro-step of training needs other ranks."""
        own = (first and self.gathers) or (last and self.overlaps) or self._sharing.axes.reduces_each_micro_step
        return own or self.counts or self._sharing.axes.exchanges

    def begin(self, *, first: bool, last: bool) -> None:
        """A micro-step of training begins."""
        if first and self.gathers:
            self._gather_copies()
        self.reducing = last and self.overlaps

    def wait_for(self, key: str) -> None:
        """The copies of a piece are needed now."""
        self._side.join(self._coming.pop(key, None))

    def reduce(self, key: str) -> None:
        """The gradients of a piece are complete on this rank for this micro-step."""
        if self.reducing and self._group is not None and key in self._group.parts:
            with self._side.after_compute():
                self._group.reduce(key, self._staging)
            self._last = self._side.done()

    def finish(self) -> None:
        """The micro-step ends: all that was sent beside it is complete."""
        self._coming.clear()
        self._side.join(self._last)
        self._last = None
        if not self._alone and self._sums_of_micro_steps:
            self._reduce_replicated()

    @property
    def _sums_of_micro_steps(self) -> bool:
        """Whether all sums over the ranks are made in each micro-step, so that their order is that of level 2."""
        return self._sharing.axes.reduces_each_micro_step and self._in_order

    def _gather_copies(self) -> None:
        assert self._group is not None
        for key in self._group.whole_pieces:
            with self._side.after_compute():
                self._group.gather(key)
            self._coming[key] = self._last = self._side.done()

    def freshen(self) -> None:
        """Gather the copies that the last update changed, for a forward that is not the first micro-step's."""
        if self.stale:
            self._gather_copies()
            self.finish_gathering()

    def finish_gathering(self) -> None:
        """All copies are here."""
        for key in list(self._coming):
            self.wait_for(key)
        self._last, self.stale = None, False

    # ------------------------------------------------------------------- optimizer step

    def reduce_rest(self) -> None:
        """Reduce the gradients that no micro-step has reduced."""
        if self._alone or self._sums_of_micro_steps:
            return
        self._reduce_replicated()
        if self._group is not None and self._sharing.replicas_once:
            self._sharing.stages.add_replicas(self._group.sums, self._staging)
        if self._group is not None and self._sharing.axes.zero_level == 1 and not self.overlaps:
            for key in self._group.parts:
                self._group.reduce(key, self._staging)

    def _reduce_replicated(self) -> None:
        for stages, parts_NK in self._replicated:
            values, each = parts_NK.view(-1), parts_NK.shape[1]
            stages.reduce(values, each, self._staging)
            stages.gather(values, each)

    def add(self, values: Tensor) -> None:
        """`Fabric.add`."""
        if not self._alone:
            self._fabric.add(values)

    def largest(self, values: Tensor) -> None:
        """The maximum over the ranks in place, of fp32 values; NaN is above all."""
        if not self._alone:
            # NCCL's maximum of floats drops NaN. As integers, the patterns of negative floats are in reverse order.
            ordered = _in_order(values.view(torch.int32)).masked_fill_(values.isnan(), 2**31 - 1)
            self._fabric.maximum(ordered)
            values.view(torch.int32).copy_(_in_order(ordered))

    def total(self, values: Tensor) -> Tensor:
        """The sum over the ranks, in their order."""
        if self._alone:
            return values
        rows = values.new_zeros(self._fabric.world, values.numel())
        rows[self._fabric.rank].copy_(values)
        self._fabric.gather(list(rows.unbind()))
        return rows.sum(0)


def _in_order(bits: Tensor) -> Tensor:
    """Patterns of fp32 values as integers in the order of the values, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
