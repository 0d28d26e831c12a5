"""A kernel pack that multiplies with panels on any device: the reference, reading the panel's A's and B's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from surogate_core.bundles import Kernel, KernelPack
from surogate_core.kernels.panels import PanelShape
from surogate_core.kernels.registry import references


def from_panel(x: Tensor, panel: Tensor, seed: Tensor | None, shape: PanelShape, *adapters: Tensor) -> Sequence[Tensor]:
    """The reference with the A's and B's of the panel; their gradients go to the adapters."""
    again = []
    for number in range(len(shape.outputs)):
        a, scaled_b = shape.adapter(panel, number)
        again += [a + (adapters[2 * number] - a.detach()), scaled_b / shape.scale]
        again[-1] = again[-1] + (adapters[2 * number + 1] - again[-1].detach())
    return list(references["adapted_linears"].function(x, panel, seed, shape, *again))


def kernels() -> Iterable[Kernel]:
    return [Kernel(op="adapted_linears", name="from-panel", function=from_panel, supports=lambda device, dtype: True)]


PACK = KernelPack(name="panels", kernels=kernels)
