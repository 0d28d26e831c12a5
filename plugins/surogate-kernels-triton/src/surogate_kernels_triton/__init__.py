"""Surogate plugin: kernels in Triton for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    import torch

SUROGATE_API = ">=2,<3"


def unavailable(device: torch.device) -> str | None:
    """Why the device cannot use the pack, or None."""
    import importlib.util

    from surogate_core.plugin import compute

    reason = compute.missing_gpu(device)
    if reason is not None:
        return reason
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; torch's CUDA builds bring it"
    major, minor = compute.capability(device)
    if major < 8:
        return f"it needs sm_80 or newer; the GPU is sm_{major}{minor}"
    return None


def kernels() -> Iterable[bundles.Kernel]:
    """The kernels of the pack; imports Triton."""
    from surogate_kernels_triton import (
        adapters,
        attention,
        convolutions,
        cross_entropy,
        decoding,
        experts,
        norm,
        norm_rope,
        sampling,
        scans,
        steps,
        swiglu,
        updates,
    )

    modules = (attention, adapters, convolutions, cross_entropy, norm, norm_rope, swiglu)
    several = (decoding, experts, sampling, scans, steps, updates)
    return (*(module.kernel() for module in modules), *(kernel for module in several for kernel in module.kernels()))


def rewrites() -> Iterable[Callable[[torch.fx.Graph], None]]:
    """The pack's rewrites of a block's joint graph."""
    from surogate_kernels_triton import experts_combined, norm

    return norm.rewrite, experts_combined.rewrite


@hookimpl
def surogate_kernel_pack() -> bundles.KernelPack:
    """The pack."""
    return bundles.KernelPack(name="triton", kernels=kernels, unavailable=unavailable, rewrites=rewrites)
