"""Surogate plugin: the bf16 precision recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surogate_core import bundles, hookimpl

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from surogate_core.dsl.slots import TracedSlot
    from surogate_recipe_bf16.gemm import Prepared

SUROGATE_API = ">=1,<2"


def linear(x_NI: Tensor, weight_OI: Tensor, slot: TracedSlot, options: Prepared | None) -> Tensor:
    """y = x Wᵀ in the dtype of x and W, summed in fp32 by the GEMM. `options`: other dtypes of the operands."""
    if options is None:
        return x_NI @ weight_OI.t()
    from surogate_recipe_bf16.gemm import linear

    return linear(x_NI, weight_OI, slot, options)


def prepare(options: Any, settings: bundles.RecipeSettings, device: torch.device) -> Prepared | None:
    """The dtypes of the run's products, or None where they are the model's."""
    if settings.matmul_dtype is None and settings.gradient_dtype is None:
        return None
    # torch is imported when the recipe is used, not when it is listed.
    from surogate_recipe_bf16.gemm import Prepared

    return Prepared.of(settings)


@hookimpl
def surogate_config_path() -> str:
    """Where the option `recipe=bf16` is."""
    return "pkg://surogate_recipe_bf16.conf"


@hookimpl
def surogate_recipe() -> bundles.Recipe:
    """The recipe."""
    return bundles.Recipe(
        name="bf16",
        linear=linear,
        plain=True,
        plain_with=lambda prepared: prepared is None,
        dtypes=None,
        prepare=prepare,
        note=lambda prepared: None if prepared is None else prepared.note,
    )
