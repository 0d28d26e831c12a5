"""The kernels of experts."""

from __future__ import annotations

from surogate_core.plugin import bundles
from surogate_kernels_triton import experts_adapters, experts_combined, experts_frozen, experts_plain, experts_routing


def kernels() -> tuple[bundles.Kernel, ...]:
    """All of them."""
    return (
        *experts_routing.kernels(),
        experts_frozen.kernel(),
        experts_adapters.kernel(),
        experts_plain.kernel(),
        experts_combined.kernel(),
    )
