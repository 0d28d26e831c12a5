"""The rewrite of graphs for the last projection of experts; its kernel is tested in test_triton_experts.py."""

from __future__ import annotations

import importlib.util

import pytest
import torch


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_backward_reads_a_gradient_before_it_is_widened(dtype: torch.dtype) -> None:
    """Only one that has the dtype to which it would be narrowed again."""
    from surogate_kernels_triton import experts_combined

    graph, found = torch.fx.Graph(), torch.empty(4, 16, device="meta")
    dout, x = (graph.placeholder(name) for name in ("dout", "x"))
    dout.meta["val"], x.meta["val"] = found.to(dtype), found.bfloat16()
    wide = graph.call_function(torch.ops.aten._to_copy.default, (dout,), {"dtype": torch.float32})
    wide.meta["val"] = found
    backward = graph.call_function(torch.ops.surogate_triton.experts_combined_backward.default, (wide, x))
    experts_combined.rewrite(graph)
    assert backward.args == (dout if dtype == torch.bfloat16 else wide, x)
