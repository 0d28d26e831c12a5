"""Fabrics: collectives among the ranks of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Fabric(Protocol):
    """The collectives of one rank, on tensors of its compute device.

    All ranks call the same ones in the same order, with equal shapes and dtypes. Each runs in the order of the current
    stream, and a CUDA graph can capture it once it has run outside of a graph with the same sizes.
    """

    @property
    def rank(self) -> int:
        """Number of this rank."""

    @property
    def world(self) -> int:
        """Number of ranks, N."""

    def exchange(self, parts: Sequence[Tensor], received_NK: Tensor) -> None:
        """Send `parts[r]`, [K] each, to every rank r; `received_NK[r]` becomes what rank r sent here.

        What is in this rank's own row is undefined.
        """

    def gather(self, parts: Sequence[Tensor]) -> None:
        """Fill `parts[r]` with the values that rank r has there, for all r. Lengths may differ, and may be 0."""

    def add(self, values: Tensor) -> None:
        """Add the ranks' values in place.

        At most one rank's value of an element is not zero, so the sum has no order.
        """

    def maximum(self, values: Tensor) -> None:
        """Take the maximum over the ranks in place. int32."""

    def largest(self, values: Sequence[float]) -> list[float]:
        """The maximum of each number over the ranks, on the host."""

    def close(self) -> None:
        """End the communication. All graphs that captured it are gone by now."""
