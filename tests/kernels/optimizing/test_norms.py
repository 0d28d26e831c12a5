"""Norms of as many values as a model has, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from surogate_core.kernels.optimizing.norms import RUN, long_norm

LIMIT = 1e-6


def normal(x: Tensor) -> None:
    x.normal_(generator=torch.Generator(x.device).manual_seed(0))


def equal(x: Tensor) -> None:
    """Every addition rounds to the same side."""
    x.fill_(0.1234567)


def uneven(x: Tensor) -> None:
    """A few runs weigh as much as all the others, as gradients of an embedding's frequent rows do."""
    normal(x)
    x[: max(1, len(x) // 1000)] *= 1000
    x[len(x) // 2 :] *= 1e-3


VALUES = [normal, equal, uneven]
SIZES = [
    30_000_001,
    pytest.param(1_000_000_007, marks=pytest.mark.slow),
]


def reference(x: Tensor) -> float:
    """In float64, a little at a time."""
    wide = torch.empty(1 << (22 if x.is_cuda else 16), dtype=torch.float64, device=x.device)
    parts = (wide[: len(part)].copy_(part) for part in x.split(len(wide)))
    return math.sqrt(math.fsum(torch.dot(part, part).item() for part in parts))


@pytest.mark.parametrize("size", [0, 1, RUN - 1, RUN, 5 * RUN + 3])
def test_a_norm_of_few_values(size: int) -> None:
    x = torch.linspace(-1, 2, size)
    assert long_norm(x).item() == pytest.approx(reference(x), rel=LIMIT)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("size", SIZES)
def test_a_norm_of_many_values(size: int, values: Callable[[Tensor], None]) -> None:
    x = torch.empty(size)
    values(x)
    expected = reference(x)
    assert long_norm(x).item() == pytest.approx(expected, rel=LIMIT)


@pytest.mark.gpu
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("way", ["flat", "streamed"])
def test_a_norm_of_a_billion_values_on_a_gpu(way: str, values: Callable[[Tensor], None]) -> None:
    """What the engine takes of a flat group, captured in a graph, and of a piece's sums on their way to the host."""
    if torch.cuda.get_device_properties(0).total_memory < 8 * 2**30:
        pytest.skip("8 GiB of GPU memory")
    x = torch.empty(1_000_000_007, device="cuda")
    values(x)
    take = long_norm if way == "flat" else lambda x: torch._foreach_norm([x])[0]
    take(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = take(x)
    graph.replay()
    assert found.item() == pytest.approx(reference(x), rel=LIMIT)
    before = found.clone()
    graph.replay()
    assert torch.equal(found, before)


def test_the_number_of_threads_changes_no_bit() -> None:
    x = torch.empty(3_000_017)
    normal(x)
    found = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(long_norm(x).item())
    finally:
        torch.set_num_threads(before)
    assert len(set(found)) == 1


def test_of_each_matrix_and_in_bf16() -> None:
    x = torch.empty(6_000_000)
    normal(x)
    matrices = x.view(3, -1)
    assert long_norm(matrices).tolist() == pytest.approx([reference(m) for m in matrices], rel=LIMIT)
    narrow = x.bfloat16()
    assert long_norm(narrow).dtype == torch.float32
    assert long_norm(narrow).item() == pytest.approx(reference(narrow.float()), rel=LIMIT)


@pytest.mark.parametrize("place", [0, 5 * RUN + 2])
def test_what_is_not_finite_shows(place: int) -> None:
    for bad in (math.nan, math.inf):
        x = torch.ones(5 * RUN + 3)
        x[place] = bad
        assert not math.isfinite(long_norm(x).item())
