"""Products of FP8 codes that add to their sums, by cuBLASLt."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import surogate_kernels_cuda
import torch
from torch import Tensor

from surogate_core.plugin import compute
from surogate_core.plugin import fp8 as scaled
from surogate_testing.op_cases import random

E4M3, E5M2 = scaled.E4M3, scaled.E5M2


@pytest.fixture
def product() -> Callable[..., None]:
    device = torch.device("cuda")
    if reason := surogate_kernels_cuda.unavailable(device):
        pytest.skip(reason)
    kernel = next(k for k in surogate_kernels_cuda.kernels() if k.op == "sum_coded_product")
    if not kernel.supports(device, torch.float32):
        pytest.skip("the GPU has no FP8 products")
    function: Callable[..., None] = kernel.function
    return function


def codes(rows: int, columns: int, kind: torch.dtype, device: str, seed: int) -> Tensor:
    return random(rows, columns, seed=seed).to(device).mul(8).to(kind)


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [(E5M2, E4M3), (E4M3, E4M3), (E4M3, E5M2)])
@pytest.mark.parametrize("sides", [(384, 512, 640), (16, 4096, 48), (1024, 272, 4096)])
@pytest.mark.parametrize("add", [True, False])
def test_it_is_the_product(
    product: Callable[..., None], kinds: tuple[torch.dtype, torch.dtype], sides: tuple[int, int, int], add: bool
) -> None:
    outputs, tokens, inputs = sides
    left, right = codes(outputs, tokens, kinds[0], "cuda", 1), codes(inputs, tokens, kinds[1], "cuda", 2).t()
    scales = torch.tensor(0.25, device="cuda"), torch.tensor(3.0, device="cuda")
    # One that begins off the alignment of an allocation, as the sums of most tensors do.
    size = outputs * inputs + 4
    room = random(size, seed=3).float().cuda() if add else torch.full((size,), torch.nan, device="cuda")
    total = room[4:].view(outputs, inputs)
    exact = left.double() @ right.double() * 0.75 + (total.double() if add else 0)
    again = total.clone()
    product(total, left, right, *scales, add)
    error = ((total.double() - exact).norm() / exact.norm()).item()
    # Tensor cores of Hopper keep 13 bits of each addend before they add in fp32.
    assert error < 2e-4, error
    product(again, left, right, *scales, add)
    assert torch.equal(total, again)


@pytest.mark.gpu
def test_it_is_the_product_in_a_graph(product: Callable[..., None]) -> None:
    left, right = codes(256, 384, E5M2, "cuda", 1), codes(512, 384, E4M3, "cuda", 2).t()
    one, total = torch.ones((), device="cuda"), torch.zeros(256, 512, device="cuda")
    product(total, left, right, one, one, True)
    once = total.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product(total, left, right, one, one, True)
    graph.replay()
    torch.testing.assert_close(total, 2 * once, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "taken"),
    [
        ("", True),
        ("two of e5m2", False),
        ("17 rows", False),
        ("rows of right", False),
        ("a part of the columns", False),
        ("bf16", False),
        ("off by one value", False),
    ],
)
def test_what_it_takes(change: str, taken: bool) -> None:
    from surogate_kernels_cuda import coded_products

    rows = 17 if change == "17 rows" else 32
    left = codes(rows, 48, E5M2, "cpu", 1)
    right = codes(64, 48, E5M2 if change == "two of e5m2" else E4M3, "cpu", 2).t()
    if change == "rows of right":
        right = right.contiguous()
    if change == "bf16":
        left = left.bfloat16()
    room = torch.zeros(rows * 64 + 64 * 8)
    total = room[: rows * 64].view(rows, 64)
    if change == "a part of the columns":
        total = room.view(-1, 64)[:rows, :48]
    if change == "off by one value":
        total = room[1 : rows * 64 + 1].view(rows, 64)
    one = torch.ones(())
    assert coded_products._takes(total, left, right, one, one, True) is taken


def test_the_reference_adds_and_writes() -> None:
    left, right, one = codes(32, 48, E5M2, "cpu", 1), codes(64, 48, E4M3, "cpu", 2).t(), torch.tensor(0.5)
    exact = left.float() @ right.float() / 4
    function = compute.references["sum_coded_product"].function
    for add in (True, False):
        total = torch.ones(32, 64)
        function(total, left, right, one, one, add)
        torch.testing.assert_close(total, exact + add)
