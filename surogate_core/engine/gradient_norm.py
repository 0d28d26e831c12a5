"""The norm of all gradients of a step, for clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from surogate_core.bundles import ParamGroup
from surogate_core.bundles.fabrics import Fabric
from surogate_core.engine.planning.pieces import Piece
from surogate_core.kernels.optimizing.norms import long_norm


class FlatNorm:
    """The norm of flat groups, computed on the device of the optimizer step."""

    def __init__(self, groups: Sequence[ParamGroup]):
        self._groups = groups

    def measure(self, key: str, sums: Sequence[Tensor]) -> None:
        """Take the sums of a piece after its backward, while they are on the device."""

    def read(self) -> Tensor:
        """0-d fp32: the norm."""
        return torch.linalg.vector_norm(torch.stack([long_norm(group.grad) for group in self._groups]))

    def spoil(self) -> None:
        """Make the next norm NaN; the caller spoils the groups."""


class ExpertNorm(FlatNorm):
    """The norm where ranks share out experts: the squares of each rank's experts are added in the order of ranks."""

    def __init__(self, others: FlatNorm | None, experts: Sequence[ParamGroup], ranks: Fabric):
        """`others`: the norm of all other gradients, if there are any. `ranks`: those that share out the experts."""
        super().__init__(experts)
        self._others, self._ranks = others, ranks
        self._squares_C = torch.zeros(ranks.world, dtype=torch.float64, device=experts[0].grad.device)

    def measure(self, key: str, sums: Sequence[Tensor]) -> None:
        """As `FlatNorm.measure`."""
        if self._others is not None:
            self._others.measure(key, sums)

    def read(self) -> Tensor:
        """0-d fp32: the norm. All ranks take part."""
        self._squares_C.zero_()
        self._squares_C[self._ranks.rank] = super().read().double().square()
        self._ranks.add(self._squares_C)
        total = self._squares_C.sum()
        if self._others is not None:
            total = total + self._others.read().double().square().to(total.device)
        return total.sqrt().float()


class SegmentNorm(FlatNorm):
    """The norm of gradients that several ranks share out: the same bits for 1, 2, 4 and 8 ranks.

    Each piece is cut into the parts that 8 ranks would own, and their squares are added in order, in float64.
    """

    def __init__(
        self,
        segments: Sequence[tuple[int, Tensor]],
        count: int,
        whole: Sequence[ParamGroup],
        add: Callable[[Tensor], None],
    ):
        """`segments`: (number, gradients) of the segments of this rank, of `count` in all. `whole`: the groups of which
        every rank has all. `add`: sums over the ranks.
        """
        super().__init__(whole)
        self._segments = [tensor for _, tensor in segments]
        self._whole, self._add = whole, add
        device = next(iter([*self._segments, *(g.grad for g in whole)])).device
        self._numbers = torch.tensor([number for number, _ in segments], dtype=torch.int64, device=device)
        self._squares = torch.zeros(count, dtype=torch.float64, device=device)

    def read(self) -> Tensor:
        """0-d fp32: the norm. All ranks take part."""
        self._squares.zero_()
        if self._segments:
            here = torch.stack(self._norms()).double().square()
            self._squares.index_copy_(0, self._numbers, here)
        self._add(self._squares)
        total = self._squares.sum()
        for group in self._whole:
            total = total + long_norm(group.grad).double().square()
        return total.sqrt().float()

    def _norms(self) -> list[Tensor]:
        if self._segments[0].device.type == "cpu":
            return [long_norm(segment) for segment in self._segments]
        return list(torch._foreach_norm(self._segments))


class StreamedNorm(FlatNorm):
    """The norm of sums that are on a GPU only while their piece's backward runs; reading them on a CPU would be slower.

    The norm of each tensor in the last micro-step counts. `torch._foreach_norm` sums blocks of 65536 values by trees.
    """

    def __init__(self, pieces: Sequence[Piece], names: Sequence[str], device: torch.device):
        """`names`: names of the trained tensors."""
        super().__init__(())
        places = {name: place for place, name in enumerate(names)}
        self._norms = torch.zeros(len(places), dtype=torch.float32, device=device)
        self._places = {
            p.key: torch.tensor([places[s.hf_name] for s in p.specs if s.trainable], device=device) for p in pieces
        }

    def measure(self, key: str, sums: Sequence[Tensor]) -> None:
        """Record the norms of a piece's sums."""
        if sums:
            self._norms.index_copy_(0, self._places[key], torch.stack(torch._foreach_norm(list(sums))))

    def read(self) -> Tensor:
        """0-d fp32 on the host."""
        return torch.linalg.vector_norm(self._norms).cpu()

    def spoil(self) -> None:
        """Make the next norm NaN."""
        self._norms.fill_(float("nan"))
