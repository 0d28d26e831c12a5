"""The kernel packs of a GPU, for tests that need several.

On the path of pytest (`pythonpath` in pyproject.toml): ``from gpu_packs import triton_packs``.
"""

from __future__ import annotations

from dataclasses import replace

import surogate_kernels_cuda
import surogate_kernels_hopper
import surogate_kernels_triton

from surogate_core.bundles import KernelPack
from surogate_core.kernels.torch_pack import TORCH_PACK

BETWEEN = {"quantise_both", "scaled_linears"}
"""Ops of the other packs that work on the same panels as Triton's `adapted_linears`."""


def triton_packs() -> list[KernelPack]:
    """torch's and Triton's kernels, and of the CUDA packs the FP8 products and the rewrites around Triton's kernels."""

    def cut(pack: KernelPack) -> KernelPack:
        return replace(pack, kernels=lambda: [kernel for kernel in pack.kernels() if kernel.op in BETWEEN])

    others = [cut(module.surogate_kernel_pack()) for module in (surogate_kernels_cuda, surogate_kernels_hopper)]
    return [*others, TORCH_PACK, surogate_kernels_triton.surogate_kernel_pack()]
