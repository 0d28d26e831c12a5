"""Surogate plugin: kernels in CUDA C++ for NVIDIA GPUs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    import torch

SUROGATE_API = ">=2,<3"


def unavailable(device: torch.device) -> str | None:
    """Why the device cannot use the pack, or None."""
    from surogate_core.plugin import compute

    reason = compute.missing_gpu(device) or compute.missing_cupy()
    if reason is not None:
        return reason
    major, minor = compute.capability(device)
    if major < 8:
        return f"it needs sm_80 or newer; the GPU is sm_{major}{minor}"
    return None


def kernels() -> Iterable[bundles.Kernel]:
    """The kernels of the pack; nothing is compiled before one is launched."""
    from surogate_kernels_cuda import adamw_8bit, coded_products, cross_entropy, nvfp4, quantise_both

    modules = adamw_8bit, coded_products, cross_entropy, quantise_both
    return (*(module.kernel() for module in modules), *nvfp4.kernels())


def rewrites() -> Iterable[Callable[[torch.fx.Graph], None]]:
    """What the pack changes in a block's joint graph; the sums behind its kernel are Triton's."""
    if importlib.util.find_spec("triton") is None:
        return ()
    from surogate_kernels_cuda import gated

    return (gated.rewrite,)


@hookimpl
def surogate_kernel_pack() -> bundles.KernelPack:
    """The pack."""
    return bundles.KernelPack(name="cuda", kernels=kernels, unavailable=unavailable, rewrites=rewrites)
