"""Checks of families with experts: right ones pass, and a fault is found."""

from __future__ import annotations

from collections.abc import Mapping

import mixture
import pytest
from torch import Tensor

from surogate_core.bundles import ModelFamily
from surogate_core.dsl import Dim, Routes, Stack, project, project_combined
from surogate_core.dsl.sides import router_figures
from surogate_core.kernels import ops
from surogate_testing.check import NotApplicable
from surogate_testing.experts import evens_out_loads, shares_out_its_experts


def family(block: type = mixture.Sparse, experts: int = 6) -> ModelFamily:
    model = type("M", (mixture.Mixture,), {"layers": Stack(block, Dim("num_hidden_layers"), "layers.{i}.")})
    presets = {"tiny": {**mixture.CONFIG, "num_experts": experts}}
    return ModelFamily(name="toy", hf_model_types=("toy",), build=model, presets=presets)


class Centred(mixture.Sparse):
    """Subtracts the mean of all rows, whose experts may be other ranks'."""

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        h = ops.rms_norm(x, self.norm, self.eps)
        logits = h @ self.router.t()
        routes = Routes.of(logits, self.choices, renormalise=True)
        gate, up = project(h, routes, self.gate, self.up)
        rows = ops.swiglu(gate, up)
        y = project_combined(rows - rows.mean(0), routes, self.down)
        return x + y, router_figures(logits, routes, tables)


class Combined(mixture.Sparse):
    """Adds the rows of a token apart from their product."""

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        h = ops.rms_norm(x, self.norm, self.eps)
        logits = h @ self.router.t()
        routes = Routes.of(logits, self.choices, renormalise=True)
        gate, up = project(h, routes, self.gate, self.up)
        (rows,) = project(ops.swiglu(gate, up), routes, self.down, gathered=True)
        return x + routes.combine(rows), router_figures(logits, routes, tables)


def test_rows_may_be_combined_apart() -> None:
    shares_out_its_experts(family(Combined))


def test_two_ranks_share_out_experts() -> None:
    shares_out_its_experts(family())


def test_rows_of_experts_must_not_meet() -> None:
    with pytest.raises(AssertionError, match="logits of two ranks that share out experts: relative error"):
        shares_out_its_experts(family(Centred))


@pytest.mark.slow
def test_two_ranks_even_out_their_loads() -> None:
    evens_out_loads(family())
    with pytest.raises(AssertionError, match="logits of two ranks that even out their loads: relative error"):
        evens_out_loads(family(Centred))


def test_an_odd_number_of_experts_does_not_apply() -> None:
    with pytest.raises(NotApplicable, match="two GPUs cannot share out 5 experts"):
        shares_out_its_experts(family(experts=5))
