"""Custom ops of attention from two launches: which arguments the launches get, and what becomes of their results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.kernels.packed_attention import attention_flops, packed_attention

calls: list[list[str]] = []
"""The keywords of each launch."""
ROOM = 8


def _forward(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, scale: float, out: Tensor, lse: Tensor, **named: Any
) -> None:
    calls.append(sorted(named))
    assert out.shape == (q.shape[0], q.shape[1] * v.shape[2] + ROOM)
    out.copy_(torch.arange(out.shape[1]).expand_as(out))
    lse.zero_()


def _backward(*tensors: Any, dsinks: Tensor | None = None, **named: Any) -> None:
    calls.append(sorted(named))
    *_, dq, dk, dv = tensors
    for number, gradient in enumerate((dq, dk, dv) if dsinks is None else (dq, dk, dv, dsinks)):
        gradient.fill_(number + 1)


attend = packed_attention("surogate_test_packed", _forward, _backward, ROOM)


def _leaves(n: int, values: int) -> list[Tensor]:
    """q, k, v and sinks."""
    return [torch.ones(n, *shape, requires_grad=True) for shape in ((4, 8), (2, 8), (2, values))] + [
        torch.ones(4, dtype=torch.bfloat16, requires_grad=True)
    ]


BORDERS = torch.tensor([0, 5, 12], dtype=torch.int32)


@pytest.mark.parametrize(
    ("named", "sinks", "values"),
    [({}, False, 8), ({}, False, 16), ({"window": 3}, False, 8), ({"softcap": 2.0}, True, 16), ({}, True, 8)],
)
def test_launches_get_only_the_extensions_of_a_call(named: dict[str, Any], sinks: bool, values: int) -> None:
    calls.clear()
    leaves = _leaves(12, values)[: 4 if sinks else 3]
    y = attend(*leaves[:3], BORDERS, 0.3, **named, **({"sinks": leaves[3]} if sinks else {}))
    assert torch.equal(y, torch.arange(4.0 * values).view(1, 4, values).expand(12, 4, values))
    for number, (gradient, leaf) in enumerate(zip(torch.autograd.grad(y.sum(), leaves), leaves, strict=True)):
        assert torch.equal(gradient, torch.full_like(leaf, number + 1))
    assert calls == [sorted([*named, *(["sinks"] if sinks else [])])] * 2


def test_without_tokens_nothing_is_launched() -> None:
    calls.clear()
    leaves = _leaves(0, 8)
    y = attend(*leaves[:3], torch.zeros(2, dtype=torch.int32), 0.3, sinks=leaves[3])
    assert not torch.autograd.grad(y.sum(), leaves)[3].any()
    assert not calls


@pytest.mark.parametrize("sinks", [None, torch.ones(4)])
def test_the_traced_forms_have_the_shapes_of_the_results(sinks: Tensor | None) -> None:
    q, k, v, _ = (t.detach() for t in _leaves(12, 16))
    ops, more = torch.ops.surogate_test_packed, () if sinks is None else (3, 2.0, sinks)
    torch.library.opcheck(ops.attention, (q, k, v, BORDERS, 0.3, *more), test_utils="test_faketensor")
    out, lse = ops.attention(q, k, v, BORDERS, 0.3, *more)
    y = out[:, :-ROOM].view(12, 4, 16)
    arguments = (y, q, k, v, y, lse, BORDERS, 0.3, *more)
    torch.library.opcheck(ops.attention_backward, arguments, test_utils="test_faketensor")


def test_flops_count_values_and_window() -> None:
    q, k, v = (4096, 4, 64), (4096, 2, 64), (4096, 2, 128)
    assert attention_flops(q) == 4 * 4096 * 4 * 64 * 1024
    assert attention_flops(q, k, v, (2,), 0.1) == 2 * 4096 * 4 * (64 + 128) * 1024
    assert attention_flops(q, k, q, (2,), 0.1, 512) == attention_flops(q, window=512) == 4 * 4096 * 4 * 64 * 512
