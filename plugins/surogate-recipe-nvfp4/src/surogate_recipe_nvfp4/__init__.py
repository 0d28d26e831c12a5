"""Surogate plugin: the nvfp4 precision recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    import torch

    from surogate_recipe_nvfp4.gemm import NVFP4

SUROGATE_API = ">=2,<3"


@dataclass(frozen=True, slots=True, kw_only=True)
class NVFP4Options:
    """Options of `recipe=nvfp4`."""

    emulate: Literal["auto", "never", "always"] = "auto"
    """auto emulates if the hardware lacks NVFP4; never refuses to emulate; always emulates everywhere."""
    backend: Annotated[Literal["cutlass", "cudnn"], bundles.Flat("fp4_backend")] = "cutlass"
    """Library of the native products: cutlass is torch's choice, cuBLASLt; cudnn is refused."""
    nearest_gradients: Annotated[bool, bundles.Flat("no_fp4_stochastic_rounding")] = False
    """Round gradients to the nearest value instead of stochastically."""
    four_over_six: bool = True
    """Scale a block's largest value to 4 instead of 6 if that makes its squared error smaller."""
    frozen_blocks: Literal["16x16", "1x16"] = "16x16"
    """Blocks of frozen weights. 16x16 rounds a weight and its transpose alike. 1x16 rounds each along the inner
    dimension of its product, with smaller errors."""
    search_scales: bool = False
    """Choose the scale of each block of a frozen weight by its squared error among eleven E4M3 numbers."""


def unavailable(device: torch.device) -> str | None:
    """Why the device has no NVFP4 products, or None."""
    from surogate_core.plugin import compute

    if device.type != "cuda":
        return f"{device.type} has no NVFP4 products, GPUs of SM100 and newer have; recipe nvfp4 is emulated there"
    major, minor = compute.capability(device)
    if major >= 10:
        return None
    return f"SM{major}{minor} has no NVFP4 products, SM100 and newer have; recipe nvfp4 is emulated there"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `recipe=nvfp4` is."""
    return "pkg://surogate_recipe_nvfp4.conf"


@hookimpl
def surogate_recipe() -> bundles.RecipeSpec:
    """The recipe."""
    return bundles.RecipeSpec(
        name="nvfp4",
        build=build,
        options=NVFP4Options,
        packs=True,
        products="fp4",
        unavailable=unavailable,
    )


def build(options: NVFP4Options, context: bundles.RecipeContext) -> NVFP4:
    """The recipe on a device, native or emulated; `MachineError` if it is neither."""
    # torch is imported when the recipe is used, not when it is listed.
    from surogate_recipe_nvfp4.gemm import NVFP4

    return NVFP4.of(options, context.device, unavailable(context.device))
