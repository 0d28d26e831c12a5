"""Inductor's kernels are chosen by rules, not by timing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from surogate_core.dsl import inductor


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


def test_nothing_is_timed_and_the_settings_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, ...]] = []

    def settings() -> tuple[bool, ...]:
        config = torch._inductor.config
        return config.deterministic, config.triton.autotune_pointwise, config.autotune_local_cache

    before = settings()
    monkeypatch.setattr(torch._inductor, "compile", lambda module, inputs: seen.append(settings()))
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    inductor.compile_graph(torch.fx.GraphModule(torch.nn.Module(), graph), [torch.zeros(1)])
    assert seen == [(True, False, False)]
    assert settings() == before


KERNELS = """
import json, torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from surogate_core.dsl.inductor import compile_graph

def run(x, y):
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return normed, (x * y + normed * x).sum(0, dtype=torch.float32), x.t() * y.t() + x.t().cos()

inputs = [torch.randn(4096, 192, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
compile_graph(make_fx(run)(*inputs), inputs)(*inputs)
found = {}
for module in PyCodeCache.modules:
    for name, kernel in vars(module).items():
        if isinstance(kernel, CachingAutotuner):
            found[name] = [[str(one.config), len(kernel.compile_results)] for one in kernel.launchers]
print(json.dumps(found))
"""


@pytest.mark.gpu
def test_kernels_from_disk_are_those_of_the_process_that_compiled_them(tmp_path: Path) -> None:
    """What an earlier process leaves on disk was once timed anew, each time a program was loaded."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", KERNELS]
    first, second = (
        json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
        for _ in range(2)
    )
    assert len(first) >= 2
    assert all(len(tilings) == 1 and tilings[0][1] == 1 for tilings in first.values()), first
    assert second == first
