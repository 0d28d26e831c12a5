"""The tilings of reductions are chosen by a rule, not by timing."""

from __future__ import annotations

import types
from typing import Any

import pytest
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


def test_what_changes_no_bit_may_be_timed(loaded: types.ModuleType) -> None:
    tilings = [tiling(XBLOCK=128), tiling(XBLOCK=256)]
    loaded.add = kernel(HeuristicType.POINTWISE, {"x": 4096}, tilings)  # type: ignore[attr-defined]
    inductor.settle_kernels()
    assert len(loaded.add.launchers) == 2
