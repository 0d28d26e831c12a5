"""Surogate plugin: attention and FP8 products for NVIDIA Hopper GPUs."""

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
    if (major, minor) != (9, 0):
        return f"it needs a Hopper (sm_90); the GPU is sm_{major}{minor}"
    return None


def kernels() -> Iterable[bundles.Kernel]:
    """The kernels of the pack; nothing is compiled before one is launched."""
    from surogate_kernels_hopper import attention

    if importlib.util.find_spec("triton") is None:
        return (attention.kernel(),)
    from surogate_kernels_hopper import scaled

    return attention.kernel(), scaled.kernel()


def rewrites() -> Iterable[Callable[[torch.fx.Graph], None]]:
    """What the pack changes in a block's joint graph; the sums behind its kernels are Triton's."""
    if importlib.util.find_spec("triton") is None:
        return ()
    from surogate_kernels_hopper import scaled_gated

    return (scaled_gated.rewrite,)


@hookimpl
def surogate_kernel_pack() -> bundles.KernelPack:
    """The pack."""
    return bundles.KernelPack(name="hopper", kernels=kernels, unavailable=unavailable, rewrites=rewrites)
