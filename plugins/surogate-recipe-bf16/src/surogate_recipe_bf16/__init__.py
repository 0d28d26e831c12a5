"""Surogate plugin: the bf16 precision recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from surogate_core import bundles, hookimpl
from surogate_core.bundles import Flat

SUROGATE_API = ">=1,<2"


@dataclass(frozen=True, slots=True, kw_only=True)
class BF16Options:
    """Options of `recipe=bf16`."""

    matmul_dtype: Annotated[Literal["fp32", "bf16", "e4m3"] | None, Flat("matmul_dtype")] = None
    """Dtype to which both operands of a projection are rounded; null is the model's."""
    gradient_dtype: Annotated[Literal["fp32", "bf16", "e5m2"] | None, Flat("gradient_dtype")] = None
    """Dtype of the gradient in the backward products; null is `matmul_dtype`, or bf16 if that is e4m3."""


@hookimpl
def surogate_config_path() -> str:
    """Where the option `recipe=bf16` is."""
    return "pkg://surogate_recipe_bf16.conf"


@hookimpl
def surogate_recipe() -> bundles.RecipeSpec:
    """The recipe."""
    return bundles.RecipeSpec(name="bf16", build=build, options=BF16Options)


def build(options: BF16Options, context: bundles.RecipeContext) -> bundles.Recipe:
    """The plain product, or a product of operands that are rounded to other dtypes than the model's."""
    # torch is imported when the recipe is used, not when it is listed.
    from surogate_recipe_bf16.gemm import BF16, RoundedOperands

    return RoundedOperands.of(options, context.dtype) or BF16()
