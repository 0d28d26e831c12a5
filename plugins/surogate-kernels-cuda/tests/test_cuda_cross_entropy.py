"""Cross-entropy against the reference in float64, and against itself."""

from __future__ import annotations

import pytest
import surogate_kernels_cuda
import torch
from surogate_kernels_cuda.cross_entropy import cross_entropy
from torch import Tensor

from surogate_core.plugin import IGNORE_LABEL, ops

pytestmark = pytest.mark.gpu

BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Largest error over the largest value: the gradient is rounded once to its dtype."""


@pytest.fixture(autouse=True)
def _needs_the_pack() -> None:
    reason = surogate_kernels_cuda.unavailable(torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)


def run(logits: Tensor, labels: Tensor, dloss: Tensor) -> tuple[Tensor, Tensor]:
    """(loss, gradient of the logits)."""
    logits = logits.detach().requires_grad_()
    loss = cross_entropy(logits, labels)
    (gradient,) = torch.autograd.grad(loss, logits, dloss)
    return loss.detach(), gradient


def reference(logits: Tensor, labels: Tensor, dloss: Tensor) -> tuple[Tensor, Tensor]:
    """The same in float64 on the CPU."""
    wide = logits.detach().cpu().double().requires_grad_()
    loss = ops.cross_entropy(wide, labels.cpu())
    (gradient,) = torch.autograd.grad(loss, wide, dloss.cpu().double())
    return loss.detach(), gradient


def error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return ((found.cpu().double() - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def make(rows: int, columns: int, dtype: torch.dtype, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(rows * 1_000_003 + columns)
    logits = (torch.randn(rows, columns, generator=generator, device="cuda") * scale).to(dtype)
    labels = torch.randint(columns, (rows,), generator=generator, device="cuda")
    labels[::3] = IGNORE_LABEL
    return logits, labels, torch.rand(rows, generator=generator, device="cuda")


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("columns", [1, 2, 7, 8, 513, 4096, 32_003, 151_936])
@pytest.mark.parametrize("scale", [0.0, 1e-4, 3.0, 2000.0])
def test_it_is_the_reference_in_float64(dtype: torch.dtype, columns: int, scale: float) -> None:
    logits, labels, dloss = make(5, columns, dtype, scale)
    loss, gradient = run(logits, labels, dloss)
    expected_loss, expected_gradient = reference(logits, labels, dloss)
    assert loss.dtype == torch.float32
    assert gradient.dtype == dtype
    assert (loss.cpu().double() - expected_loss).abs().max() <= 3e-6 * expected_loss.abs().max().clamp(min=1)
    assert (gradient.cpu().double() - expected_gradient).abs().max() <= BOUNDS[
        dtype
    ] * expected_gradient.abs().max().clamp(min=1e-4)
    assert not gradient[::3].any(), "rows without a label"


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
def test_rows_may_lie_anywhere(offset: int) -> None:
    whole, labels, dloss = make(6, 1031, torch.bfloat16)
    logits = whole[:, offset : offset + 1000]
    labels = labels.clamp(max=999)
    expected = reference(logits, labels, dloss)
    for view in (logits, logits.contiguous(), logits.t().contiguous().t()):
        found = run(view, labels, dloss)
        assert error(found[0], expected[0]) <= 3e-6
        assert error(found[1], expected[1]) <= BOUNDS[torch.bfloat16]


def test_minus_infinity_is_no_choice_and_a_nan_is_seen() -> None:
    logits, labels, dloss = make(4, 300, torch.bfloat16)
    logits[:, 100:200] = float("-inf")
    labels = torch.tensor([3, 250, IGNORE_LABEL, 7], device="cuda")
    found, expected = run(logits, labels, dloss), reference(logits, labels, dloss)
    assert error(found[0], expected[0]) <= 3e-6
    assert error(found[1], expected[1]) <= BOUNDS[torch.bfloat16]
    logits[0, 299] = logits[2, 5] = float("nan")
    loss, gradient = run(logits, labels, dloss)
    assert loss.isnan().tolist() == [True, False, False, False], "a row without a label is none's business"
    assert gradient.isnan().any(1).tolist() == [True, False, False, False]


def test_no_rows() -> None:
    logits, labels, dloss = make(0, 10, torch.bfloat16)
    loss, gradient = run(logits, labels, dloss)
    assert loss.shape == (0,)
    assert gradient.shape == (0, 10)


def test_equal_inputs_give_equal_bits_in_a_graph_and_beside_another_stream() -> None:
    logits, labels, dloss = make(64, 50_000, torch.bfloat16)
    first = run(logits, labels, dloss)
    load = torch.randn(4096, 4096, device="cuda")
    other = torch.cuda.Stream()
    for _ in range(10):
        with torch.cuda.stream(other):
            load @ load
        again = run(logits, labels, dloss)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(logits, labels, dloss)
    for value in captured:
        value.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(first, captured, strict=True))
