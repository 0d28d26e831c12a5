"""Inputs of scans and of the causal convolution: packed runs with and without states, and single steps in slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from surogate_core.plugin import bundles, compute
from surogate_core.service.kernels import convolutions, scans
from surogate_testing.check import ensure
from surogate_testing.kernel_inputs import Inputs, normal

STATE_BOUND = 5e-6
"""Largest error of states over their largest value: they are fp32, whatever the rows are."""

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


def _convolution_leaves(rows: int) -> dict[str, Tensor]:
    return {"x": normal(rows, 64, seed=0), "weight": normal(64, 4, seed=1), "bias": normal(64, seed=2)}


_CASES: Mapping[Callable[..., Any], Callable[[], Iterable[Inputs]]] = {
    scans.gated_delta: lambda: _packed(_scan_leaves("qkv", sum(RUNS)), (4, 64, 32)),
    scans.ssd: lambda: _packed(_scan_leaves("vkq", sum(RUNS)), (4, 64, 32)),
    convolutions.causal_convolution: lambda: _packed(_convolution_leaves(sum(RUNS)), (3, 64)),
}
SCAN_CASES = {op.__name__: cases for op, cases in _CASES.items()}
"""Op → its inputs; the first ones are ordinary."""

_SLOTS = (3, 0, 5, 2, 5)
"""The slots of a step's rows. The last of six is zeros and takes the rows that do not count."""
_STEPS: Mapping[Callable[..., Any], tuple[Callable[[], Mapping[str, Tensor]], tuple[int, ...]]] = {
    scans.gated_delta_step: (lambda: _scan_leaves("qkv", len(_SLOTS)), (4, 64, 32)),
    scans.ssd_step: (lambda: _scan_leaves("vkq", len(_SLOTS)), (4, 64, 32)),
    convolutions.causal_convolution_step: (lambda: _convolution_leaves(len(_SLOTS)), (3, 64)),
}
STEPS = {op.__name__: case for op, case in _STEPS.items()}
"""Op that moves states in slots on → its tensors by name, and the shape of a state."""


def ensure_states_move_on(kernel: bundles.Kernel, device: torch.device, dtype: torch.dtype, bound: float) -> None:
    """Raise `AssertionError` unless a kernel of a step gives what the reference does, changes the states as it does,
    and no other slot. States are fp32.
    """
    leaves, shape = STEPS[kernel.op]
    first, *rest = leaves().values()
    rows, weights = ([first], rest) if kernel.op == "causal_convolution_step" else ([first, *rest], [])
    states = normal(max(_SLOTS) + 1, *shape, seed=5).float().to(device)
    states[-1] = 0
    mine, exact, slots = states.clone(), states.double(), torch.tensor(_SLOTS, device=device)
    rows, weights = ([t.to(device, dtype) for t in tensors] for tensors in (rows, weights))
    if not kernel.takes(*rows, mine, slots, *weights):
        return
    y = kernel.function(*rows, mine, slots, *weights).double()
    wide = [[t.double() for t in tensors] for tensors in (rows, weights)]
    wanted = compute.references[kernel.op].function(*wide[0], exact, slots, *wide[1])
    ensure(y.shape == wanted.shape, f"shape {tuple(y.shape)}, not {tuple(wanted.shape)}")
    error = float((y - wanted).abs().max() / wanted.abs().max())
    ensure(error <= bound, f"error {error:.1e}, more than {bound:.0e}")
    error = float((mine.double() - exact)[:-1].abs().max() / exact.abs().max())
    ensure(error <= STATE_BOUND, f"error of the states {error:.1e}, more than {STATE_BOUND:.0e}")
    others = [slot for slot in range(len(states) - 1) if slot not in _SLOTS]
    ensure(torch.equal(mine[others], states[others]), "it changes slots that no row has")
    ensure(not bool(mine[-1].any()), "the last slot, of rows that do not count, does not remain zeros")
