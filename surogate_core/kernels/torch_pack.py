"""The core's own pack: the kernels that torch brings."""

from __future__ import annotations

from surogate_core.bundles import Kernel, KernelPack
from surogate_core.kernels import attention, cpu, grouped


def _kernels() -> tuple[Kernel, ...]:
    return (*cpu.kernels(), *attention.kernels(), grouped.kernel())


TORCH_PACK = KernelPack(name="torch", kernels=_kernels)
"""Kernels that torch brings; offered by the core."""
