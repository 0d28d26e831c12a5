"""Inputs for the ops of a mixture of experts; see `surogate_testing.kernels`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surogate_core.service.kernels import experts as experts_ops
from surogate_testing.kernel_inputs import Inputs, normal


def _routes(tokens: int, experts: int, choices: int, device: torch.device) -> tuple[Tensor, ...]:
    """(weights, experts, order, slot, ends) of random routing in which the last expert has no row."""
    logits = normal(tokens, experts, seed=5)
    logits[:, -1] = -100.0
    return tuple(t.to(device) for t in experts_ops.route(logits.float(), choices, True))


def _routes_of_some(n: int, choices: int, spare: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order, slot, ends) where only the first four of six experts have rows, and `spare` places have none."""
    _, experts, *_ = _routes(n, 6, choices, torch.device("cpu"))
    order, slot, ends = experts_ops.sort_by_expert(torch.where(experts < 4, experts, 4), 4)
    return order[: int(ends[-1]) + spare].clone(), torch.where(experts < 4, slot, -1), ends


def _taken(x: Tensor, ends: Tensor, other: float) -> Tensor:
    """With another number in the rows of places that have none."""
    return torch.where((torch.arange(len(x), device=x.device) < ends[-1])[:, None], x, other)


def _grouped_linears() -> Iterator[Inputs]:
    def made(n: int, choices: int, what: str = "", *, sorted_rows: bool = False) -> Inputs:
        adapter = experts_ops.ExpertAdapter(rank=16, scale=0.75, dropout=0.0, salt=0)
        leaves = {"x": normal(n * choices if sorted_rows else n, 64, seed=0)}
        leaves |= {"gate": normal(6, 32, 64, seed=1), "up": normal(6, 32, 64, seed=2)}
        leaves |= {"A": normal(6, 16, 64, seed=3), "B": normal(6, 32, 16, seed=4)}

        def call(function: Callable[..., Any], t: list[Tensor]) -> Any:
            x, gate, up, a, b = t
            _, _, order, slot, ends = _routes(n, 6, choices, x.device)
            where = (None, None) if sorted_rows else (order, slot)
            return function(x, *where, ends, None, [None, adapter], None, gate, up, a, b)

        return Inputs(leaves=leaves, call=call, what=what)

    yield made(48, 2)
    yield made(200, 3, what="200 tokens, 3 experts each")
    yield made(48, 1, what="one expert a token")
    yield made(48, 2, what="sorted rows", sorted_rows=True)
    yield _frozen_experts(48, 2)
    yield _frozen_experts(200, 3, sorted_rows=True)
    yield _frozen_experts(48, 2, apart=2)
    for spare in (0, 8):
        yield _some_experts(48, 2, spare)


def _some_experts(n: int, choices: int, spare: int) -> Inputs:
    """A frozen projection with an adapter, of rows that not every choice has."""
    adapter = experts_ops.ExpertAdapter(rank=16, scale=0.75, dropout=0.0, salt=0)
    leaves = {"x": normal(n, 64, seed=0), "A": normal(4, 16, 64, seed=3), "B": normal(4, 32, 16, seed=4)}
    frozen, where = normal(4, 32, 64, seed=1).bfloat16(), _routes_of_some(n, choices, spare)

    def call(function: Callable[..., Any], t: list[Tensor]) -> Any:
        x, a, b = t
        order, slot, ends = (given.to(x.device) for given in where)
        found = function(x, order, slot, ends, None, [adapter], None, frozen.to(x.device, x.dtype), a, b, parts=True)
        return found and [_taken(y, ends, 0.0) for y in found]

    return Inputs(leaves=leaves, call=call, what=f"choices without a row, {spare} spare places")


def _frozen_experts(n: int, choices: int, *, sorted_rows: bool = False, apart: int = 0) -> Inputs:
    """Two projections whose weights are frozen, both with an adapter; those of `apart` experts in tensors of their
    own.
    """
    adapter = experts_ops.ExpertAdapter(rank=16, scale=0.75, dropout=0.0, salt=0)
    leaves = {"x": normal(n * choices if sorted_rows else n, 64, seed=0)}
    for name, seed in (("gate", 3), ("up", 5)):
        leaves |= {f"A of {name}": normal(6, 16, 64, seed=seed), f"B of {name}": normal(6, 32, 16, seed=seed + 1)}
    # Representable in bf16, so that all dtypes compute with the same weights.
    frozen = [normal(6, 32, 64, seed=seed).bfloat16() for seed in (1, 2)]

    def call(function: Callable[..., Any], t: list[Tensor]) -> Any:
        x, *pairs = t
        _, _, order, slot, ends = _routes(n, 6, choices, x.device)
        where = (None, None) if sorted_rows else (order, slot)
        (gate, *gates), (up, *ups) = (_apart(w.to(x.device, x.dtype), apart) for w in frozen)
        named = {"others": [*gates, *ups]} if apart else {}
        return function(x, *where, ends, None, [adapter] * 2, None, gate, *pairs[:2], up, *pairs[2:], **named)

    what = "frozen weights" + (", sorted rows" if sorted_rows else "") + (", some of them apart" if apart else "")
    return Inputs(leaves=leaves, call=call, what=what)


def _apart(weights: Tensor, count: int) -> list[Tensor]:
    """The weights, with the last ones in a tensor of their own if they are some."""
    return [weights[:-count].clone(), weights[-count:].clone()] if count else [weights]


def _grouped_product() -> Iterator[Inputs]:
    def made(n: int, inputs: int, outputs: int, what: str = "") -> Inputs:
        leaves = {"x": normal(2 * n, inputs, seed=0), "weights": normal(6, outputs, inputs, seed=1)}

        def call(function: Callable[..., Any], t: list[Tensor]) -> Any:
            x, weights = t
            return function(x, weights, _routes(n, 6, 2, x.device)[4])

        return Inputs(leaves=leaves, call=call, what=what)

    yield made(48, 64, 32)
    yield made(200, 64, 32, what="200 tokens")
    yield made(48, 36, 20, what="36 features, 20 outputs")


def swiglu_of_experts(n: int, choices: int, spare: int) -> Inputs:
    """Rows of experts for the op `swiglu`, where places that no row takes follow."""
    order, _, ends = _routes_of_some(n, choices, spare)
    leaves = {"gate": normal(len(order), 40, seed=0), "up": normal(len(order), 40, seed=1)}

    def call(function: Callable[..., Any], t: list[Tensor]) -> Any:
        gate, up = (_taken(x, ends.to(x.device), math.nan) for x in t)
        y = function(gate, up, ends_E=ends.to(gate.device))
        return y if y is None else _taken(y, ends.to(y.device), 0.0)

    return Inputs(leaves=leaves, call=call, what=f"rows of experts, {spare} spare places")


def _combine() -> Iterator[Inputs]:
    def made(n: int, choices: int, what: str = "", *, spare: int = 0) -> Inputs:
        leaves = {"y": normal(n * choices + spare, 64, seed=0), "weights": normal(n, choices, seed=1).abs()}

        def call(function: Callable[..., Any], t: list[Tensor]) -> Any:
            y, weights = t
            _, _, order, slot, _ = _routes(n, 6, choices, y.device)
            return function(y, torch.cat((order, order[:spare])), slot, weights)

        return Inputs(leaves=leaves, call=call, what=what)

    yield made(48, 2)
    yield made(200, 3, what="200 tokens, 3 experts each")
    yield made(48, 2, what="rows that no token has", spare=16)
    yield _combine_of_some(48, 2)


def _combine_of_some(n: int, choices: int) -> Inputs:
    where = _routes_of_some(n, choices, 8)
    leaves = {"y": normal(len(where[0]), 64, seed=0), "weights": normal(n, choices, seed=1).abs()}

    def call(function: Callable[..., Any], t: list[Tensor]) -> Any:
        y, weights = t
        order, slot, ends = (given.to(y.device) for given in where)
        return function(_taken(y, ends, math.nan), order, slot, weights, parts=True)

    return Inputs(leaves=leaves, call=call, what="choices without a row, NaN in 8 spare places")


def _combined_linear() -> Iterator[Inputs]:
    def made(n: int, choices: int, what: str = "") -> Inputs:
        adapter = experts_ops.ExpertAdapter(rank=16, scale=0.75, dropout=0.0, salt=0)
        leaves = {"x": normal(n * choices, 32, seed=0), "weights": normal(n, choices, seed=1).abs()}
        leaves |= {"A": normal(6, 16, 32, seed=2), "B": normal(6, 64, 16, seed=3)}
        # Representable in bf16, so that all dtypes compute with the same weight.
        frozen = normal(6, 64, 32, seed=4).bfloat16()

        def call(function: Callable[..., Any], t: list[Tensor]) -> Any:
            x, weights, a, b = t
            _, _, order, slot, ends = _routes(n, 6, choices, x.device)
            down = frozen.to(x.device, x.dtype)
            return function(x, order, slot, ends, weights, None, adapter, None, down, a, b)

        return Inputs(leaves=leaves, call=call, what=what)

    yield made(48, 2)
    yield made(200, 3, what="200 tokens, 3 experts each")
    # A row that is not there shows where the last place has one, and where it has none.
    for apart, spare in ((0, 0), (1, 8)):
        yield _combined_of_some(48, 2, apart, spare)


def _combined_of_some(n: int, choices: int, apart: int, spare: int) -> Inputs:
    """Rows that not every choice has; the frozen weights of `apart` experts in a tensor of their own."""
    adapter = experts_ops.ExpertAdapter(rank=16, scale=0.75, dropout=0.0, salt=0)
    where, frozen = _routes_of_some(n, choices, spare), normal(4, 64, 32, seed=4).bfloat16()
    leaves = {"x": normal(len(where[0]), 32, seed=0), "weights": normal(n, choices, seed=1).abs()}
    leaves |= {"A": normal(4, 16, 32, seed=2), "B": normal(4, 64, 16, seed=3)}

    def call(function: Callable[..., Any], t: list[Tensor]) -> Any:
        x, weights, a, b = t
        order, slot, ends = (given.to(x.device) for given in where)
        down, *others = _apart(frozen.to(x.device, x.dtype), apart)
        named = {"others": others} if apart else {}
        rest = ends, weights, None, adapter, None, down, a, b
        return function(_taken(x, ends, math.nan), order, slot, *rest, parts=True, **named)

    what = f"choices without a row, NaN in {spare} spare places" + (", some weights apart" if apart else "")
    return Inputs(leaves=leaves, call=call, what=what)


def _of_experts(*shape: int) -> Iterator[Inputs]:
    """Inputs of ops with a number or a vector of each of 6 experts, here of `shape`."""

    def made(n: int, choices: int, what: str = "") -> Inputs:
        leaves = {"rows": normal(n * choices, *shape, seed=0), "own": normal(6, *shape, seed=1)}

        def call(function: Callable[..., Any], t: list[Tensor]) -> Any:
            _, experts, _, _, ends = _routes(n, 6, choices, t[0].device)
            return function(*t, ends) if shape else function(t[0].view(n, choices), t[1], experts)

        return Inputs(leaves=leaves, call=call, what=what)

    yield made(48, 2)
    yield made(200, 3, what="200 tokens, 3 experts each")


EXPERT_CASES: Mapping[str, Callable[[], Iterable[Inputs]]] = {
    "grouped_linears": _grouped_linears,
    "grouped_product": _grouped_product,
    "combine": _combine,
    "combined_linear": _combined_linear,
    "expert_bias": partial(_of_experts, 64),
    "expert_scale": _of_experts,
}
"""Op → its inputs."""
