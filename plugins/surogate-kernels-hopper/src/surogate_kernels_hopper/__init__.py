"""Surogate plugin: attention for NVIDIA Hopper GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from surogate_core import bundles, hookimpl

if TYPE_CHECKING:
    import torch

SUROGATE_API = ">=1,<2"


def unavailable(device: torch.device) -> str | None:
    """Why the device cannot use the pack, or None."""
    from surogate_core.kernels.native import capability, missing_cupy, missing_gpu

    reason = missing_gpu(device) or missing_cupy()
    if reason is not None:
        return reason
    major, minor = capability(device)
    if (major, minor) != (9, 0):
        return f"it needs a Hopper (sm_90); the GPU is sm_{major}{minor}"
    return None


def kernels() -> Iterable[bundles.Kernel]:
    """The kernels of the pack; nothing is compiled before one is launched."""
    from surogate_kernels_hopper import attention

    return (attention.kernel(),)


@hookimpl
def surogate_kernel_pack() -> bundles.KernelPack:
    """The pack."""
    return bundles.KernelPack(name="hopper", kernels=kernels, unavailable=unavailable)
