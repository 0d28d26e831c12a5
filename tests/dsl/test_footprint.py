"""Memory counted from graphs, against sums done by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.dsl.footprint import footprint, joint_bytes
from surogate_core.dsl.trace import Recompute, Signature
from surogate_core.kernels.registry import workspace, workspaces

CPU = torch.device("cpu")
N, D, F = 64, 32, 128
ROW = N * 4
"""Bytes of a column of N values in fp32."""


def block(x_ND: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
    h_NF = x_ND @ up_FD.t()
    return x_ND + (h_NF * torch.sigmoid(h_NF)) @ down_DF.t()


def inputs(*, trained: bool) -> list[Signature]:
    return [
        Signature((N, D), torch.float32, CPU, True),
        Signature((F, D), torch.float32, CPU, trained),
        Signature((D, F), torch.float32, CPU, trained),
    ]


def test_of_a_forward_as_it_is_run() -> None:
    """At its largest: h, sigmoid(h) and their product."""
    found = footprint(block, inputs(trained=False), recompute=Recompute(block=True), compiler="fx")
    assert found.kept == ()
    assert found.forward_bytes == 3 * F * ROW
    assert found.working_bytes == max(found.forward_bytes, found.backward_bytes)


def test_fused_code_takes_no_memory() -> None:
    """Of the forward only h and its gated product are in memory; h is read while the product is written."""
    found = footprint(block, inputs(trained=False), recompute=Recompute(block=True), compiler="inductor")
    assert found.forward_bytes == 2 * F * ROW


@pytest.mark.parametrize("compiler", ["fx", "inductor"])
def test_what_is_kept_is_not_counted_twice(compiler: Any) -> None:
    found = footprint(block, inputs(trained=False), recompute=Recompute(block=False), compiler=compiler)
    kept = sum(s.nbytes for s in found.kept)
    assert kept >= F * ROW
    assert found.working_bytes == max(found.forward_bytes - kept, found.backward_bytes)


def test_gradients_of_weights_that_are_multiplied_into_sums_take_none() -> None:
    def joint(x_ND: Tensor, weight_VD: Tensor) -> Tensor:
        return (x_ND @ weight_VD.t()).square().sum()

    few = 4
    signatures = [Signature((few, D), torch.float32, CPU), Signature((F, D), torch.float32, CPU, True)]
    assert joint_bytes(joint, signatures, compiler="inductor") >= F * D * 4
    assert joint_bytes(joint, signatures, compiler="inductor", summed=2) <= 4 * few * F * 4


def test_a_view_takes_no_memory() -> None:
    signatures = [Signature((N, D), torch.float32, CPU, True)]
    plain = joint_bytes(lambda x: (x * 2).square().sum(), signatures, compiler="fx")
    viewed = joint_bytes(lambda x: (x * 2).view(D, N).t().square().sum(), signatures, compiler="fx")
    assert viewed == plain >= 2 * D * ROW


def test_what_an_op_has_within_is_counted_while_it_runs() -> None:
    @torch.library.custom_op("surogate_test::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    @doubled.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    signatures = [Signature((N, D), torch.float32, CPU), Signature((N, D), torch.float32, CPU, True)]

    def twice(x: Tensor, y: Tensor) -> Tensor:
        return (doubled(doubled(x)) * y).sum()

    assert joint_bytes(twice, signatures, compiler="inductor") < 3 * D * ROW
    workspace(torch.ops.surogate_test.doubled)(lambda x: 3 * x.numel())
    try:
        # Its argument and its result are there at the same time.
        assert joint_bytes(twice, signatures, compiler="inductor") == 2 * D * ROW + 3 * N * D
    finally:
        del workspaces[torch.ops.surogate_test.doubled]
