"""Surogate plugin: the bf16 precision recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from surogate_core.plugin import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@dataclass(frozen=True, slots=True, kw_only=True)
class BF16Options:
    """Options of `recipe=bf16`."""

    matmul_dtype: Annotated[Literal["fp32", "bf16", "e4m3"] | None, bundles.Flat("matmul_dtype")] = None
    """Dtype to which both operands of a projection are rounded; null is the model's."""
    gradient_dtype: Annotated[Literal["fp32", "bf16", "e5m2"] | None, bundles.Flat("gradient_dtype")] = None
    """Dtype of the gradient in the backward products; null is `matmul_dtype`, or bf16 if that is e4m3."""


@hookimpl
def surogate_config_path() -> str:
    """Where the option `recipe=bf16` is."""
    return "pkg://surogate_recipe_bf16.conf"


@hookimpl
def surogate_recipe() -> bundles.RecipeSpec:
    """The recipe."""
    return bundles.RecipeSpec(name="bf16", build=build, options=BF16Options, mistakes=mistakes)


def mistakes(options: BF16Options, dtype: Callable[[], str]) -> Iterator[tuple[str, str, str]]:
    """The dtypes that no product has with results in the model's dtype."""
    fp32 = "is fp32 in a bf16 model: there is no product fp32 × fp32 → bf16."
    if options.matmul_dtype == "fp32" and dtype() == "bf16":
        yield "matmul_dtype", fp32, "model_dtype: fp32, or matmul_dtype: bf16 or e4m3"
    if options.gradient_dtype == "fp32" and dtype() == "bf16":
        yield "gradient_dtype", fp32, "model_dtype: fp32, or gradient_dtype: bf16 or e5m2"
    if options.gradient_dtype == "e5m2" and dtype() == "fp32":
        e5m2 = "is e5m2 in an fp32 model: there is no product e4m3 × e5m2 → fp32."
        yield "gradient_dtype", e5m2, "model_dtype: bf16, or gradient_dtype: fp32 or bf16"


def build(options: BF16Options, context: bundles.RecipeContext) -> bundles.Recipe:
    """The plain product, or a product of operands that are rounded to other dtypes than the model's."""
    # torch is imported when the recipe is used, not when it is listed.
    from surogate_recipe_bf16.gemm import BF16, RoundedOperands

    return RoundedOperands.of(options, context.dtype) or BF16()
