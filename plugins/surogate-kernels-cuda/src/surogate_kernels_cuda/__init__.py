"""Surogate plugin: kernels in CUDA C++ for NVIDIA GPUs."""

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
    if major < 8:
        return f"it needs sm_80 or newer; the GPU is sm_{major}{minor}"
    return None


def kernels() -> Iterable[bundles.Kernel]:
    """The kernels of the pack; nothing is compiled before one is launched."""
    from surogate_kernels_cuda import adamw_8bit, cross_entropy, nvfp4

    return (adamw_8bit.kernel(), cross_entropy.kernel(), *nvfp4.kernels())


@hookimpl
def surogate_kernel_pack() -> bundles.KernelPack:
    """The pack."""
    return bundles.KernelPack(name="cuda", kernels=kernels, unavailable=unavailable)
