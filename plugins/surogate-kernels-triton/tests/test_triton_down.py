"""u = x Aᵀ of few rows against float64: on a GPU or, with TRITON_INTERPRET=1, in the interpreter.

`test_in_the_interpreter` runs this file in a process of its own where triton is installed and there is no GPU.
"""

from __future__ import annotations

import pytest
import torch

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
@pytest.mark.parametrize("rows", [1, 16, 37])
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
