"""The norm of all gradients of a step, for clipping."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surogate_core.bundles import ParamGroup
from surogate_core.engine.parameters import Piece
from surogate_core.kernels.norms import long_norm


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
