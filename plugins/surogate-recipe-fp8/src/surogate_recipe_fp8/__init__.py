"""Surogate plugin: the fp8-hybrid precision recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from surogate_core import bundles, hookimpl

if TYPE_CHECKING:
    import torch


SUROGATE_API = ">=1,<2"


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8Options:
    """Options of `recipe=fp8-hybrid`."""

    emulate: Literal["auto", "never", "always"] = "auto"
    """auto emulates where the hardware lacks FP8; never refuses to; always emulates everywhere."""
    margin: int = 0
    """Scales are divided by 2^margin, which leaves room for values to grow between steps."""


def unavailable(device: torch.device) -> str | None:
    """Why the device has no FP8 products, or None."""
    from surogate_core.kernels.native import capability

    if device.type != "cuda":
        return f"{device.type} has no FP8 products, GPUs of SM89 and newer have; recipe fp8-hybrid is emulated there"
    major, minor = capability(device)
    if (major, minor) >= (8, 9):
        return None
    return f"SM{major}{minor} has no FP8 products, SM89 and newer have; recipe fp8-hybrid is emulated there"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `recipe=fp8-hybrid` is."""
    return "pkg://surogate_recipe_fp8.conf"


@hookimpl
def surogate_recipe() -> bundles.Recipe:
    """The recipe."""

    # torch is imported when the recipe is used, not when it is listed.
    def linear(*arguments: Any) -> Any:
        from surogate_recipe_fp8.gemm import linear

        return linear(*arguments)

    def prepare(options: FP8Options, settings: bundles.RecipeSettings, device: torch.device) -> Any:
        from surogate_recipe_fp8.gemm import Prepared

        return Prepared.of(options, settings, device, unavailable(device))

    def state(slots: int, device: torch.device, prepared: Any) -> bundles.RecipeState:
        from surogate_recipe_fp8.scaling import DelayedScaling

        return DelayedScaling(slots, history=prepared.history, margin=prepared.margin, device=device)

    def pack(*arguments: Any) -> Any:
        from surogate_recipe_fp8.gemm import pack

        return pack(*arguments)

    def rounded(*arguments: Any) -> Any:
        from surogate_recipe_fp8.rounding import rounded

        return rounded(*arguments)

    return bundles.Recipe(
        name="fp8-hybrid",
        linear=linear,
        dtypes={"matmul_dtype": "e4m3", "gradient_dtype": "e5m2"},
        options=FP8Options,
        unavailable=unavailable,
        prepare=prepare,
        note=lambda prepared: prepared.note,
        state=state,
        pack=pack,
        scaled_margin=lambda prepared: prepared.margin if prepared.native else None,
        rounded=rounded,
    )
