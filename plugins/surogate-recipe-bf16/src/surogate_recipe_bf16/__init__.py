"""Surogate plugin: the bf16 precision recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from surogate_core import bundles, hookimpl

if TYPE_CHECKING:
    from torch import Tensor

    from surogate_core.dsl.slots import LinearSlot

SUROGATE_API = ">=1,<2"


def linear(x_NI: Tensor, weight_OI: Tensor, slot: LinearSlot, options: Any) -> Tensor:
    """y = x Wᵀ in the dtype of x and W; fp32 accumulation is the GEMM's own."""
    return x_NI @ weight_OI.t()


@hookimpl
def surogate_config_path() -> str:
    """Where the option `recipe=bf16` is."""
    return "pkg://surogate_recipe_bf16.conf"


@hookimpl
def surogate_recipe() -> bundles.Recipe:
    """The recipe."""
    return bundles.Recipe(name="bf16", linear=linear, plain=True)
