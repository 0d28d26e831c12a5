"""The tilings of reductions are chosen by a rule, not by timing."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.hints import HeuristicType
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from surogate_core.dsl import inductor


def tiling(**blocks: int) -> Any:
    config = types.SimpleNamespace(kwargs=blocks, num_warps=2, num_stages=1)
    return types.SimpleNamespace(config=config)


def kernel(kind: HeuristicType, sizes: dict[str, int], launchers: list[Any]) -> CachingAutotuner:
    """One that was compiled, with several tilings; made without a GPU."""
    made = CachingAutotuner.__new__(CachingAutotuner)
    made.heuristic_type, made.size_hints, made.launchers = kind, sizes, launchers
    made.compile_results = []
    return made


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("compiled")
    monkeypatch.setattr(PyCodeCache, "modules", [module])
    monkeypatch.setattr(inductor, "_settled", set())
    return module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_additions_to_products_are_kept_apart_in_16_bits(dtype: torch.dtype) -> None:
    """Inductor would make one op of both; the numbers are those of the ops as written."""
    graph = torch.fx.Graph()
    x, a, b = (graph.placeholder(name) for name in "xab")
    values = [torch.randn(8, 8, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3)]
    product = graph.call_function(torch.ops.aten.mm.default, (a, b))
    total = graph.call_function(torch.ops.aten.add.Tensor, (x, product))
    other = graph.call_function(torch.ops.aten.add.Tensor, (total, product))
    graph.output((other,))
    for node, value in zip((x, a, b), values, strict=True):
        node.meta["val"] = value
    for node in (product, total, other):
        node.meta["val"] = values[0]
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    inductor._keep_additions(module)
    added = [n for n in module.graph.nodes if n.target is torch.ops.aten.add.Tensor and product in n.all_input_nodes]
    assert len(added) == (2 if dtype == torch.float32 else 0)
    x_value, a_value, b_value = values
    product_value = a_value @ b_value
    assert torch.equal(module(*values)[0], (x_value + product_value) + product_value)


def test_a_reduction_keeps_one_tiling_whatever_their_order(loaded: types.ModuleType) -> None:
    tilings = [tiling(XBLOCK=x) for x in (1, 8, 32, 128)]
    sizes = {"x": 4096, "r0_": 128}
    loaded.first = kernel(HeuristicType.PERSISTENT_REDUCTION, sizes, tilings)  # type: ignore[attr-defined]
    loaded.second = kernel(HeuristicType.PERSISTENT_REDUCTION, sizes, tilings[::-1])  # type: ignore[attr-defined]
    loaded.wide = kernel(HeuristicType.PERSISTENT_REDUCTION, {"x": 4096, "r0_": 4096}, tilings)  # type: ignore[attr-defined]
    inductor.settle_kernels()
    assert [one.config.kwargs for one in loaded.first.launchers] == [{"XBLOCK": 8}]
    assert [one.config.kwargs for one in loaded.second.launchers] == [{"XBLOCK": 8}]
    assert [one.config.kwargs for one in loaded.wide.launchers] == [{"XBLOCK": 1}]


def test_a_looped_reduction_too(loaded: types.ModuleType) -> None:
    tilings = [tiling(XBLOCK=1, R0_BLOCK=2048), tiling(XBLOCK=64, R0_BLOCK=8), tiling(XBLOCK=1, R0_BLOCK=1024)]
    loaded.sums = kernel(HeuristicType.REDUCTION, {"x": 64, "r0_": 100_000}, tilings)  # type: ignore[attr-defined]
    inductor.settle_kernels()
    assert [one.config.kwargs for one in loaded.sums.launchers] == [{"XBLOCK": 1, "R0_BLOCK": 1024}]


def test_kernels_without_a_sum_too(loaded: types.ModuleType) -> None:
    """Their tiling may decide which product of a·b + c·d is rounded, seen on an H200."""
    tilings = [tiling(XBLOCK=128), tiling(XBLOCK=1024), tiling(XBLOCK=256)]
    loaded.add = kernel(HeuristicType.POINTWISE, {"x": 4096}, tilings)  # type: ignore[attr-defined]
    planes = [tiling(XBLOCK=64, YBLOCK=64), tiling(XBLOCK=32, YBLOCK=32), tiling(XBLOCK=1, YBLOCK=256)]
    loaded.turn = kernel(HeuristicType.POINTWISE, {"x": 64, "y": 64}, planes)  # type: ignore[attr-defined]
    inductor.settle_kernels()
    assert [one.config.kwargs for one in loaded.add.launchers] == [{"XBLOCK": 1024}]
    assert [one.config.kwargs for one in loaded.turn.launchers] == [{"XBLOCK": 32, "YBLOCK": 32}]


def test_kernels_of_other_kinds_are_left_alone(loaded: types.ModuleType) -> None:
    loaded.given = kernel(HeuristicType.TEMPLATE, {"x": 64}, [tiling(XBLOCK=1), tiling(XBLOCK=8)])  # type: ignore[attr-defined]
    inductor.settle_kernels()
    assert len(loaded.given.launchers) == 2
