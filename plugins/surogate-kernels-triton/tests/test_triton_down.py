"""u = x Aᵀ of few rows against float64: on a GPU or, with TRITON_INTERPRET=1, in the interpreter.

`test_in_the_interpreter` runs this file in a process of its own where triton is installed and there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from surogate_core.plugin import compute
from surogate_testing.interpreter import INTERPRETED, devices, run_interpreted, starts_interpreter
from surogate_testing.op_cases import random

# The interpreter multiplies no matrices in bf16.
DTYPE, BOUND = (torch.float16, 2e-3) if INTERPRETED else (torch.bfloat16, 1e-2)
NO_SEED = torch.zeros((), dtype=torch.int32)


@starts_interpreter
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@devices
@pytest.mark.parametrize(("inputs", "slots", "rank"), [(96, 2, 16), (4112, 3, 16), (2048, 1, 64), (560, 4, 16)])
@pytest.mark.parametrize("rows", [1, 16, 37, 130])
def test_few_rows(device: str, inputs: int, slots: int, rank: int, rows: int) -> None:
    """u stands in both places, columns beside it are left alone, and a second call gives the same bits."""
    from surogate_native import adapters

    ranks = slots * rank
    x = random(rows, inputs + ranks + 8, seed=0, dtype=DTYPE).to(device)
    x[:, inputs:] = 7.0
    a = random(ranks, inputs + 8, seed=1, scale=inputs**-0.5, dtype=DTYPE).to(device)[:, :inputs]
    expected = x[:, :inputs].double() @ a.double().t()
    found = []
    for _ in range(2):
        u = torch.full((rows, ranks), float("nan"), dtype=DTYPE, device=device)
        adapters.down(x, a, u, x[:, inputs:], NO_SEED.to(device), slots, 0.0, list(range(slots)))
        assert torch.equal(x[:, inputs : inputs + ranks], u)
        assert (x[:, inputs + ranks :] == 7.0).all()
        found.append(u)
    assert torch.equal(*found)
    assert float((found[0].double() - expected).norm() / expected.norm()) < BOUND
    assert not adapters._counters(x.device).any()


@devices
@pytest.mark.parametrize("extreme", [0.0, 3.0, float("inf"), float("nan")])
@pytest.mark.parametrize(("rows", "inputs", "slots"), [(1, 96, 2), (130, 4112, 3)])
def test_the_largest_values_of_few_rows(device: str, rows: int, inputs: int, slots: int, extreme: float) -> None:
    from surogate_native import adapters

    x = random(rows, inputs, seed=0, scale=0.0 if extreme == 0 else 0.1, dtype=DTYPE)
    x[rows - 1, inputs - 3] = -extreme
    x = x.to(device)
    a = random(slots * 16, inputs, seed=1, dtype=DTYPE).to(device)
    u, plain = (torch.empty(rows, slots * 16, dtype=DTYPE, device=device) for _ in range(2))
    found = adapters.down_few(x, a, u, u, slots, largest=True)
    assert int(found.max()) == int((x.view(torch.int16).int() & 0x7FFF).max())
    assert adapters.down_few(x, a, plain, plain, slots).numel() == 0
    assert torch.equal(u.view(torch.int16), plain.view(torch.int16))


class Names(TorchDispatchMode):
    """The names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@devices
@pytest.mark.parametrize("rows", [1, 37, 200])
def test_few_rows_without_a_backward_have_the_bits_of_others(device: str, rows: int) -> None:
    """The kernel of u copies x: nothing is concatenated."""
    from surogate_kernels_triton.adapters import adapted_linears

    shape = compute.PanelShape(inputs=4112, outputs=(48, 32), rank=16, scale=2.0, dropout=0.0, salts=(0, 1))
    panel = random(112, 4144, seed=3, scale=0.1, dtype=DTYPE).to(device)
    x = random(rows, 4112, seed=4, dtype=DTYPE).to(device)
    expected = adapted_linears(x.clone().requires_grad_(), panel, None, shape)
    spread = torch.empty(rows, 2 * 4112, dtype=DTYPE, device=device)[:, ::2].copy_(x)
    for given in (x, spread):
        with Names() as names:
            found = adapted_linears(given, panel, None, shape)
        assert "cat" not in names.found
        assert "adapted_linears_of_few" in names.found
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


@devices
def test_without_a_trace_x_is_copied_once_and_has_the_bits_of_a_traced_call(device: str) -> None:
    from surogate_kernels_triton.adapters import adapted_linears

    shape = compute.PanelShape(inputs=96, outputs=(48, 32), rank=16, scale=2.0, dropout=0.0, salts=(0, 1))
    panel = random(112, 128, seed=3, scale=0.1, dtype=DTYPE).to(device)
    x = random(520, 96, seed=4, dtype=DTYPE).to(device)

    def run(x: Tensor, panel: Tensor) -> Sequence[Tensor]:
        return [y.clone() for y in adapted_linears(x, panel, None, shape)]

    with torch.no_grad(), Names() as names:
        found = adapted_linears(x, panel, None, shape)
    # The other form, for traced graphs, copies x once more.
    assert names.found.count("cat") == 1
    assert "adapted_linears_" in names.found
    assert "adapted_linears" not in names.found
    traced = graph_of(run, x, panel)
    assert any("adapted_linears.default" in str(node.target) for node in traced.graph.nodes)
    for one, other in zip(found, traced(x, panel), strict=True):
        assert torch.equal(one, other)


def graph_of(function: Callable[..., Sequence[Tensor]], *inputs: Tensor) -> torch.fx.GraphModule:
    """The forward as the engine traces it."""
    from torch._functorch.aot_autograd import aot_export_joint_simple

    with torch.no_grad():
        found: torch.fx.GraphModule = aot_export_joint_simple(function, inputs, trace_joint=False)
    return found
