"""Surogate plugin: the nvfp4 precision recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from surogate_core import bundles, hookimpl

if TYPE_CHECKING:
    import torch


SUROGATE_API = ">=1,<2"


@dataclass(frozen=True, slots=True, kw_only=True)
class NVFP4Options:
    """Options of `recipe=nvfp4`."""

    emulate: Literal["auto", "never", "always"] = "auto"
    """auto emulates where the hardware lacks NVFP4; never refuses to; always emulates everywhere."""
    four_over_six: bool = True
    """Scale a block's largest value to 4 instead of 6 where that makes the squared error smaller."""


def unavailable(device: torch.device) -> str | None:
    """Why the device has no NVFP4 products, or None."""
    from surogate_core.kernels.native import capability

    if device.type != "cuda":
        return f"{device.type} has no NVFP4 products, GPUs of SM100 and newer have; recipe nvfp4 is emulated there"
    major, minor = capability(device)
    if major >= 10:
        return None
    return f"SM{major}{minor} has no NVFP4 products, SM100 and newer have; recipe nvfp4 is emulated there"


@hookimpl
def surogate_config_path() -> str:
    """Where the option `recipe=nvfp4` is."""
    return "pkg://surogate_recipe_nvfp4.conf"


@hookimpl
def surogate_recipe() -> bundles.Recipe:
    """The recipe."""

    # torch is imported when the recipe is used, not when it is listed.
    def linear(*arguments: Any) -> Any:
        from surogate_recipe_nvfp4.gemm import linear

        return linear(*arguments)

    def prepare(options: NVFP4Options, settings: bundles.RecipeSettings, device: torch.device) -> Any:
        from surogate_recipe_nvfp4.gemm import Prepared

        return Prepared.of(options, settings, device, unavailable(device))

    def pack(*arguments: Any) -> Any:
        from surogate_recipe_nvfp4.gemm import pack

        return pack(*arguments)

    def rounded(*arguments: Any) -> Any:
        from surogate_recipe_nvfp4.rounding import rounded

        return rounded(*arguments)

    return bundles.Recipe(
        name="nvfp4",
        linear=linear,
        dtypes={"matmul_dtype": "e2m1", "gradient_dtype": "e2m1"},
        options=NVFP4Options,
        unavailable=unavailable,
        prepare=prepare,
        note=lambda prepared: prepared.note,
        pack=pack,
        rounded=rounded,
    )
