"""The figures of an objective, summed over the micro-steps of an optimizer step or the micro-batches of an evaluation.

Shape suffixes: N tokens, F figures, M micro-batches of a step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from surogate_core.batch import IGNORE_LABEL
from surogate_core.bundles import Objective
from surogate_core.engine.ranks.traffic import Traffic


def of_chunk(objective: Objective, logits_NV: Tensor, labels_N: Tensor, columns: Mapping[str, Tensor]) -> list[Tensor]:
    """[F] fp32 in a list: the token figures over the label tokens of a chunk; empty if there are none. Traced."""
    if objective.token_figures is None:
        return []
    trained_N = labels_N != IGNORE_LABEL
    with torch.no_grad():
        found = objective.token_figures(logits_NV.detach(), labels_N, columns)
        names = objective.figures[: objective.of_tokens]
        values = [
            torch.where(trained_N, value_N.float(), float("-inf")).amax()
            if name in objective.largest
            else torch.where(trained_N, value_N.float(), 0.0).sum()
            for name, value_N in zip(names, found, strict=True)
        ]
        return [torch.stack(values)]


def of_sequences(objective: Objective, loss_N: Tensor, positions_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
    """[F] fp32: the sequence figures of a micro-batch. Traced."""
    assert objective.sequence_figures is not None
    found = objective.sequence_figures(loss_N, positions_N, columns)
    names = objective.figures[objective.of_tokens :]
    return torch.stack([value.float() for _, value in zip(names, found, strict=True)])


class FigureSums:
    """Sums, and maxima, on the device."""

    def __init__(self, objective: Objective, device: torch.device, *, numbers: int = 0):
        """`numbers`: M, if the sums of each micro-batch are kept by its number, so that several ranks have one sum."""
        self.names = objective.figures
        self._tokens, self._largest = objective.of_tokens, frozenset(objective.largest)
        self._objective = objective
        size = len(self.names)
        self._sums_F = torch.zeros(size, dtype=torch.float64, device=device)
        self._maxima_F = torch.full((size,), float("-inf"), dtype=torch.float32, device=device)
        largest = [name in self._largest for name in self.names]
        self._is_largest_F = torch.tensor(largest, dtype=torch.bool, device=device)
        self._by_number_MF = (
            torch.zeros(numbers, size, dtype=torch.float64, device=device) if numbers and size else None
        )

    def add_tokens(self, values_F: Tensor) -> None:
        """Add the token figures of a chunk."""
        self._add(slice(0, self._tokens), values_F)

    def add_sequences(self, values_F: Tensor) -> None:
        """Add the sequence figures of a micro-batch."""
        self._add(slice(self._tokens, None), values_F)

    def _add(self, place: slice, values_F: Tensor) -> None:
        self._sums_F[place].add_(torch.where(self._is_largest_F[place], 0.0, values_F))
        maxima_F = self._maxima_F[place]
        torch.maximum(maxima_F, values_F, out=maxima_F)

    def keep(self, place: int) -> None:
        """The values since the last call are those of a micro-batch; `place`: `Sharing.place`."""
        if self._by_number_MF is not None:
            self._by_number_MF[place].add_(self._sums_F)
            self._sums_F.zero_()

    def take(self, traffic: Traffic) -> Tensor:
        """[F] fp32: the figures over all micro-batches of all ranks, in the order of their numbers; begins anew."""
        sums_F = self._sums_F.clone()
        if self._by_number_MF is not None:
            traffic.add(self._by_number_MF)
            sums_F += self._by_number_MF.sum(0)
        maxima_F = self._maxima_F.clone()
        if self._largest:
            traffic.largest(maxima_F)
        self.clear()
        return torch.where(self._is_largest_F, maxima_F, sums_F.float())

    def take_sums(self) -> Tensor:
        """[F] float64: the sums of this rank alone, which begin anew; the maxima go on."""
        sums_F = self._sums_F.clone()
        self._sums_F.zero_()
        return sums_F

    def put_sums(self, sums_F: Tensor) -> None:
        """Set the sums."""
        self._sums_F.copy_(sums_F)

    def clear(self) -> None:
        """Begin anew."""
        self._sums_F.zero_()
        self._maxima_F.fill_(float("-inf"))
        if self._by_number_MF is not None:
            self._by_number_MF.zero_()

    def named(self, values: Sequence[float], *, label_tokens: int) -> dict[str, float]:
        """Name → figure, from what `take` gave; empty if nothing carries loss."""
        return self._objective.means(values, label_tokens=label_tokens)
