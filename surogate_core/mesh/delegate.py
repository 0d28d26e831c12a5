"""A fabric whose work another one does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from surogate_core.bundles.fabrics import Fabric

if TYPE_CHECKING:
    from torch import Tensor


class Delegate(Fabric):
    """Passes every collective on to the fabric of `_now`."""

    def _now(self) -> Fabric:
        raise NotImplementedError

    def exchange(self, parts: Sequence[Tensor], received_NK: Tensor) -> None:
        """As `Fabric.exchange`."""
        self._now().exchange(parts, received_NK)

    def exchange_unequal(self, parts: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """As `Fabric.exchange_unequal`."""
        self._now().exchange_unequal(parts, received)

    def gather(self, parts: Sequence[Tensor]) -> None:
        """As `Fabric.gather`."""
        self._now().gather(parts)

    def add(self, values: Tensor) -> None:
        """As `Fabric.add`."""
        self._now().add(values)

    def maximum(self, values: Tensor) -> None:
        """As `Fabric.maximum`."""
        self._now().maximum(values)

    def largest(self, values: Sequence[float]) -> list[float]:
        """As `Fabric.largest`."""
        return self._now().largest(values)

    def within(self, size: int) -> Fabric:
        """As `Fabric.within`."""
        return self._now().within(size)

    def across(self, size: int) -> Fabric:
        """As `Fabric.across`."""
        return self._now().across(size)

    def close(self) -> None:
        """As `Fabric.close`."""
        self._now().close()
