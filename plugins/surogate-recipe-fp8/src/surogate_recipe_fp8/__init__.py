"""Surogate plugin: the fp8-hybrid precision recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Interval

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    import torch

    from surogate_recipe_fp8.gemm import FP8Hybrid

SUROGATE_API = ">=2,<3"


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8Options:
    """Options of `recipe=fp8-hybrid`."""

    emulate: Literal["auto", "never", "always"] = "auto"
    """auto emulates if the hardware lacks FP8; never refuses to emulate; always emulates everywhere."""
    amax_history: Annotated[int, Interval(ge=1, le=2**16), bundles.Flat("fp8_amax_history", essential=True)] = 1024
    """Number of optimizer steps whose largest absolute values determine a scale."""
    margin: int = 0
    """Scales are divided by 2^margin, so that values may grow between steps."""


def unavailable(device: torch.device) -> str | None:
    """Why the device has no FP8 products, or None."""
    from surogate_core.plugin import compute

    if device.type != "cuda":
        return f"{device.type} has no FP8 products, GPUs of SM89 and newer have; recipe fp8-hybrid is emulated there"
    major, minor = compute.capability(device)
    if (major, minor) >= (8, 9):
        return None
    return f"SM{major}{minor} has no FP8 products, SM89 and newer have; recipe fp8-hybrid is emulated there"


def without_experts(device: torch.device) -> str | None:
    """Why the device has no FP8 products of experts, or None. torch has grouped products with a scale for each row on
    SM90 alone.
    """
    from surogate_core.plugin import compute

    if device.type != "cuda":
        return f"{device.type} has none"
    return None if compute.capability(device) == (9, 0) else "only SM90 has them"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `recipe=fp8-hybrid` is."""
    return "pkg://surogate_recipe_fp8.conf"


@hookimpl
def surogate_recipe() -> bundles.RecipeSpec:
    """The recipe."""
    return bundles.RecipeSpec(
        name="fp8-hybrid",
        build=build,
        options=FP8Options,
        packs=True,
        products="fp8",
        unavailable=unavailable,
    )


def build(options: FP8Options, context: bundles.RecipeContext) -> FP8Hybrid:
    """The recipe on a device, native or emulated; `MachineError` if it is neither."""
    # torch is imported when the recipe is used, not when it is listed.
    from surogate_recipe_fp8.gemm import FP8Hybrid

    return FP8Hybrid.of(options, unavailable(context.device), experts=without_experts(context.device))
