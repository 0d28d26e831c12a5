"""A share of the residuals: memory falls with the budget, and the cheapest to compute again goes first."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.utils.flop_counter import flop_registry

from surogate_core.dsl.budget import chosen, seconds
from surogate_core.dsl.footprint import Footprint, footprint
from surogate_core.dsl.trace import Recompute, Signature, _split, differentiate, trace_joint
from surogate_core.dsl.values import flops
from surogate_core.kernels.torch_pack import TORCH_PACK

CPU = torch.device("cpu")
N, D, F = 64, 32, 128


def block(x_ND: Tensor, up_FD: Tensor, down_DF: Tensor) -> Tensor:
    """A norm, a product and a function of it: the backward reads several of their values."""
    h_ND = x_ND * torch.rsqrt(x_ND.square().mean(-1, keepdim=True) + 1e-6)
    g_NF = h_ND @ up_FD.t()
    return x_ND + (torch.tanh(g_NF) * torch.sigmoid(g_NF)) @ down_DF.t()


INPUTS = [Signature(shape, torch.float32, CPU, True) for shape in ((N, D), (F, D), (D, F))]


WIDE = [Signature(shape, torch.float32, CPU, True) for shape in ((4096, 4096), (8192, 4096), (4096, 8192))]
"""So large that a product takes longer than reading it; only traced."""


def told(budget: float, compiler: Any = "fx") -> Footprint:
    return footprint(block, WIDE, recompute=Recompute(block=False, budget=budget), compiler=compiler)


@pytest.mark.parametrize("compiler", ["fx", "inductor"])
def test_less_is_kept_and_more_computed_the_smaller_the_budget(compiler: Any) -> None:
    budgets = [1.0, 0.75, 0.5, 0.25, 0.0]
    found = [told(budget, compiler) for budget in budgets]
    whole = found[0].kept_bytes
    for budget, one in zip(budgets, found, strict=True):
        assert one.kept_bytes <= budget * whole
    assert all(a.kept_bytes >= b.kept_bytes and a.again <= b.again for a, b in pairwise(found))
    assert len({one.kept_bytes for one in found}) > 2
    assert found[0].again == 0
    assert found[-1].kept == told(1.0, compiler).kept[:0]
    assert found[-1].again == 2 * 4096 * 4096 * 8192, "the product; the one behind it is not wanted"


@pytest.mark.parametrize("budget", [0.0, 0.5])
def test_gradients_keep_their_bits(budget: float) -> None:
    torch.manual_seed(0)
    values, dy = [torch.randn(s.shape) for s in INPUTS], torch.randn(N, D)
    results = []
    for share in (1.0, budget):
        program = differentiate(block, INPUTS, recompute=Recompute(block=False, budget=share), compiler="fx")
        y, *kept = program.forward(values)
        results.append([y, *program.backward([*values, *kept, dy])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_costs_nothing_is_not_kept() -> None:
    """With room for half of the bytes the product stays: norm, tanh and sigmoid are computed again."""
    joint = trace_joint(block, WIDE)
    _, backward, kept = _split(joint, Recompute(block=False, budget=0.5), "fx")
    assert any(flops(n) for n in kept), [n.name for n in kept]
    again = {n.name for n in backward.graph.nodes}
    assert {"tanh", "sigmoid", "rsqrt"} & again


def test_the_choice_is_the_best_of_all() -> None:
    """Three chains from one input; two have a product in them, one of half the size."""

    def chains(x_ND: Tensor, a_FD: Tensor, b_DD: Tensor) -> Tensor:
        return torch.tanh(x_ND @ a_FD.t()).sum() + torch.tanh(x_ND @ b_DD.t()).sum() + torch.tanh(x_ND.exp()).sum()

    inputs = [Signature(shape, torch.float32, CPU, True) for shape in ((N, D), (F, D), (D, D))]
    joint = trace_joint(chains, inputs)
    _, _, kept = _split(joint, Recompute(block=False), "fx")
    costs = {}

    def again(keep: frozenset[fx.Node]) -> set[fx.Node]:
        lost = set(kept) - keep
        todo, found = list(lost), set()
        while todo:
            node = todo.pop()
            if node.op == "call_function" and node not in keep and node not in found:
                found.add(node)
                todo += node.all_input_nodes
        costs[keep] = seconds(found)
        return found

    picked = frozenset(chosen(kept, [], 0.7, again))
    assert picked in costs
    assert costs[picked] == min(costs.values())
    assert len(costs) > 1


def test_packs_say_the_arithmetic_of_their_ops() -> None:
    assert TORCH_PACK.kernels()
    assert torch.ops.surogate.cpu_attention in flop_registry
    q = torch.empty(256, 4, 8)
    formula = flop_registry[torch.ops.surogate.cpu_attention]
    assert formula(q, q, q, torch.empty(2), 1.0, out_val=None) == 4 * 256 * 4 * 8 * 128
