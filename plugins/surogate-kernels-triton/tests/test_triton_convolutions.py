"""The convolution against the reference, bit by bit: on a GPU or in Triton's interpreter.

`test_in_the_interpreter` runs this file in a process of its own where triton is installed and there is no GPU.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.service.kernels import convolutions
from surogate_testing.interpreter import INTERPRETED, devices, run_interpreted, starts_interpreter
from surogate_testing.op_cases import random
from surogate_testing.triton_programs import SHARED, empty, recorded

LENGTHS = (1, 17, 0, 33, 2, 3, 4, 0)
HALF = torch.float16 if INTERPRETED else torch.bfloat16
"""The interpreter cuts numbers off where it makes bf16 of them."""
dtypes = pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)


@starts_interpreter
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def kernel(*tensors: Tensor | None) -> Tensor:
    from surogate_kernels_triton import convolutions as own

    y_NC: Tensor = own.causal_convolution(*tensors)[0]
    return y_NC


def reference(*tensors: Tensor | None) -> Tensor:
    y_NC: Tensor = convolutions.causal_convolution(*tensors)[0]
    return y_NC


def make(
    rows: int, channels: int, width: int, dtype: torch.dtype, device: str, *, bias: bool
) -> tuple[list[Tensor], Tensor | None]:
    """Rows that are a part of wider ones, weights and a bias."""
    x = random(rows, channels + 5, seed=0).to(device, dtype)[:, 3 : 3 + channels]
    weight = random(channels, width, seed=1).to(device, dtype)
    return [x, weight], random(channels, seed=2).to(device, dtype) if bias else None


def borders_of(lengths: Sequence[int], device: str) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def with_gradients(function: Any, tensors: Sequence[Tensor], bias: Tensor | None, borders: Tensor) -> list[Tensor]:
    """The result, and the gradients of all arguments."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    last = None if bias is None else bias.detach().requires_grad_()
    y = function(*leaves, last, borders)
    wanted = leaves if last is None else [*leaves, last]
    return [y.detach(), *torch.autograd.grad(y, wanted, torch.ones_like(y) / 3 + y.detach())]


@dtypes
@devices
@pytest.mark.parametrize(("channels", "width", "bias"), [(40, 4, True), (130, 4, False), (7, 2, True), (16, 8, False)])
def test_bits_are_those_of_the_reference(
    channels: int, width: int, bias: bool, dtype: torch.dtype, device: str
) -> None:
    """Sums over rows have an order of their own."""
    tensors, added = make(sum(LENGTHS), channels, width, dtype, device, bias=bias)
    borders = borders_of(LENGTHS, device)
    (y, dx, *sums), (wanted, wanted_dx, *others) = (
        with_gradients(function, tensors, added, borders) for function in (kernel, reference)
    )
    assert torch.equal(y, wanted)
    assert torch.equal(dx, wanted_dx)
    for a, b in zip(sums, others, strict=True):
        assert a.dtype == b.dtype
        assert (a.double() - b.double()).norm() <= (1e-6 if dtype == torch.float32 else 1e-2) * b.double().norm()


@devices
def test_frozen_weights_have_no_gradient(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from surogate_kernels_triton import convolutions as own

    noted, backward = [], own._backward
    monkeypatch.setattr(own, "_backward", lambda *given: (noted.append(given[-1]), backward(*given))[1])
    (x, weight), bias = make(20, 16, 4, torch.float32, device, bias=True)
    borders = borders_of((20,), device)
    found = []
    for trained in (False, True):
        leaf = x.detach().requires_grad_()
        y = kernel(leaf, weight.detach().requires_grad_(trained), bias, borders)
        found.append(torch.autograd.grad(y.sum(), leaf)[0])
    assert noted == [False, True]
    assert torch.equal(*found)


@devices
def test_no_rows(device: str) -> None:
    (x, weight), bias = make(0, 16, 4, torch.float32, device, bias=True)
    y, dx, dweight, dbias = with_gradients(kernel, (x, weight), bias, borders_of((0, 0), device))
    assert y.shape == dx.shape == (0, 16)
    assert not dweight.any()
    assert not dbias.any()


@pytest.mark.gpu
def test_a_captured_graph_serves_any_packing() -> None:
    """And gives the bits of a call."""
    lengths = ((300, 0, 212), (1, 500, 11))
    tensors, bias = make(512, 256, 4, torch.bfloat16, "cuda", bias=True)
    borders = borders_of(lengths[0], "cuda")
    with_gradients(kernel, tensors, bias, borders)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = with_gradients(kernel, tensors, bias, borders)
    for packing in lengths:
        borders.copy_(borders_of(packing, "cuda"))
        graph.replay()
        torch.cuda.synchronize()
        called = with_gradients(kernel, tensors, bias, borders)
        assert all(torch.equal(a, b) for a, b in zip(found, called, strict=True))


def test_what_it_takes() -> None:
    pytest.importorskip("triton")
    from surogate_kernels_triton import convolutions as own

    x, weight, borders = torch.empty(4, 8), torch.empty(8, 4), torch.empty(2, dtype=torch.int32)
    assert own.takes(x, weight, None, borders)
    assert not own.takes(x, torch.empty(8, 9), None, borders)
    assert not own.takes(x.double(), weight, None, borders)
    assert not own.kernel().knows


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets")
@pytest.mark.parametrize("capability", SHARED)
def test_every_program_compiles(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    from surogate_kernels_triton import convolutions as own

    x, weight, bias = empty(64, 256), empty(256, 4), empty(256)
    borders = empty(5, dtype=torch.int32)
    with recorded(monkeypatch) as launches:
        own._forward._init_fn(x, weight, bias, borders)
        for trained in (True, False):
            own._backward._init_fn(x, x, weight, borders, trained)
    assert {found.program.__name__ for found in launches} == {"convolve", "convolve_backward"}
    for found in launches:
        assert found.compile(capability).metadata.shared <= SHARED[capability] * 1024
