"""Rows for tests of scans: linear recurrences over the runs of packed rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from surogate_testing.op_cases import random

LENGTHS = (1, 17, 0, 32, 3, 17, 0)
GROUPS, HEADS, KEYS, VALUES = 2, 4, 5, 7


def borders_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def make(name: str, rows: int, dtype: torch.dtype = torch.float64, *, heads: tuple[int, int] = (GROUPS, HEADS)) -> list:
    """Rows of a scan: keys of length 1, decays from none to all within few rows, rates between 0 and 1."""
    q, k = (random(rows, heads[0], KEYS, seed=seed) for seed in (0, 1))
    v = random(rows, heads[1], VALUES, seed=2)
    k = torch.nn.functional.normalize(k, dim=-1)
    decay = (
        -random(rows, heads[1], seed=3).abs() * torch.tensor([0.01, 1.0, 20.0, 0.1], dtype=torch.float64)[: heads[1]]
    )
    beta = random(rows, heads[1], seed=4).sigmoid()
    found = (q, k, v, decay, beta) if name == "gated_delta" else (v, k, q, decay, beta)
    return [t.to(dtype) for t in found]


def states(runs: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return random(runs, HEADS, KEYS, VALUES, seed=5, dtype=dtype)


def with_gradients(function: Callable[..., Any], rows: list[Tensor], initial: Tensor) -> list[Tensor]:
    """Results of function(rows, initial) and the gradients of all arguments."""
    leaves = [t.detach().requires_grad_() for t in (*rows, initial)]
    found = function(leaves[:-1], leaves[-1])
    dys = [random(*t.shape, seed=70 + n).to(t.dtype) for n, t in enumerate(found)]
    return [*(t.detach() for t in found), *torch.autograd.grad(found, leaves, dys)]
