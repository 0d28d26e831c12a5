"""Gradients are summed over the axis that their parameter names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surogate_core.dsl.declare import TensorSpec
from surogate_core.engine.flat_groups import FlatGroups
from surogate_core.engine.placement import Placement
from surogate_core.engine.ranks.sharding import Sharing
from surogate_core.engine.ranks.traffic import Traffic
from surogate_core.mesh.axes import Axes
from surogate_testing.virtual import VirtualFabric, in_threads

CPU = torch.device("cpu")
SPECS = [
    TensorSpec(name=name, hf_name=name, shape=(3, 5), trainable=True, role="weight", init="ones", summed=axis)
    for name, axis in (("everywhere", "ranks"), ("pairs", "context"), ("distant", "rows"))
]


def flat_groups(sharing: Sharing | None) -> FlatGroups:
    return FlatGroups(
        SPECS,
        (),
        compute_dtype=lambda spec: torch.float32,
        master_dtype=torch.float32,
        weight_decay=0.1,
        seed=None,
        placement=Placement.on(CPU),
        sharing=sharing,
    )


@pytest.mark.parametrize("exact", [False, True])
def test_each_gradient_is_summed_over_the_axis_of_its_parameter(exact: bool) -> None:
    def work(fabric: VirtualFabric) -> dict[str, float]:
        sharing = Sharing.of(fabric.mesh(), Axes.of(4, context=2, exact=exact, micro_batches=2))
        flat = flat_groups(sharing)
        parameters: Any = SimpleNamespace(flat=flat, sharded=None)
        traffic = Traffic(sharing, parameters, device=CPU)
        sharing.connect(flat.kept_over)
        for gradient in flat.grad.values():
            gradient.fill_(10.0**fabric.rank)
        traffic.reduce_rest()
        return {name: float(gradient.unique().item()) for name, gradient in flat.grad.items()}

    found = in_threads(4, work)
    assert [sums["everywhere"] for sums in found] == [1111.0] * 4
    assert [sums["pairs"] for sums in found] == [11.0, 11.0, 1100.0, 1100.0]
    assert [sums["distant"] for sums in found] == [101.0, 1010.0, 101.0, 1010.0]


def test_parameters_of_one_axis_are_one_group() -> None:
    flat = flat_groups(None)
    assert [group.name for group in flat.groups] == ["decayed", "decayed over context", "decayed over rows"]
    assert [group.number for group in flat.groups] == [0, 1, 2]
