"""Inputs of scans and of the causal convolution: packed runs with and without states, and single steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from surogate_core.service.kernels import convolutions, scans
from surogate_testing.kernel_inputs import Inputs, normal

RUNS = (20, 1, 0, 69, 6)
"""Lengths of runs: shorter and longer than a chunk, one row, none."""


def _scan_leaves(order: str, rows: int) -> dict[str, Tensor]:
    """Queries, keys and values by their names in an op, logarithms of decays, rates between 0 and 1."""
    keys, heads, features, width = 2, 4, 64, 32
    q, k = (normal(rows, keys, features, seed=s) / features**0.5 for s in (0, 1))
    tensors = {"q": q, "k": k, "v": normal(rows, heads, width, seed=2)}
    leaves = {name: tensors[name] for name in order}
    return leaves | {"decay": -normal(rows, heads, seed=3).exp(), "beta": normal(rows, heads, seed=4).sigmoid()}


def _wide(state: Tensor) -> Tensor:
    return state.to(torch.promote_types(state.dtype, torch.float32))


def _borders(device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(RUNS)], dtype=torch.int32, device=device)


def _first(found: Any) -> Any:
    return found[0] if isinstance(found, tuple | list) else found


def _packed(leaves: Mapping[str, Tensor], state: tuple[int, ...]) -> Iterator[Inputs]:
    def from_zeros(function: Callable[..., Any], t: list[Tensor]) -> Any:
        return _first(function(*t, _borders(t[0].device)))

    def from_states(function: Callable[..., Any], t: list[Tensor]) -> Any:
        *rows, initial = t
        return function(*rows, _borders(t[0].device), initial=_wide(initial), finals=True)

    yield Inputs(leaves=leaves, call=from_zeros)
    yield Inputs(leaves=leaves, call=from_zeros, what="gaps between rows", apart=True)
    states = {"states": normal(len(RUNS), *state, seed=5)}
    yield Inputs(leaves={**leaves, **states}, call=from_states, what="states before and behind the runs")


def _step(leaves: Mapping[str, Tensor], state: tuple[int, ...]) -> Iterator[Inputs]:
    def call(function: Callable[..., Any], t: list[Tensor]) -> Any:
        *rows, before = t
        return function(*rows, _wide(before))

    yield Inputs(leaves={**leaves, "states": normal(16, *state, seed=5)}, call=call)


def _convolution_leaves(rows: int) -> dict[str, Tensor]:
    return {"x": normal(rows, 64, seed=0), "weight": normal(64, 4, seed=1), "bias": normal(64, seed=2)}


_CASES: Mapping[Callable[..., Any], Callable[[], Iterable[Inputs]]] = {
    scans.gated_delta: lambda: _packed(_scan_leaves("qkv", sum(RUNS)), (4, 64, 32)),
    scans.ssd: lambda: _packed(_scan_leaves("vkq", sum(RUNS)), (4, 64, 32)),
    convolutions.causal_convolution: lambda: _packed(_convolution_leaves(sum(RUNS)), (3, 64)),
    scans.gated_delta_step: lambda: _step(_scan_leaves("qkv", 16), (4, 64, 32)),
    scans.ssd_step: lambda: _step(_scan_leaves("vkq", 16), (4, 64, 32)),
    convolutions.causal_convolution_step: lambda: _step(_convolution_leaves(16), (3, 64)),
}
SCAN_CASES = {op.__name__: cases for op, cases in _CASES.items()}
"""Op → its inputs; the first ones are ordinary."""
