"""Marks of regions: traced nodes have them, and nothing is left of them outside of a trace."""

from __future__ import annotations

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from surogate_core.kernels.regions import choice, region


def marked(x: Tensor) -> Tensor:
    with region("att"):
        y = x * 2
    with choice():
        return y + 1


def test_only_a_trace_has_marks() -> None:
    """torch keeps them in one place: those of threads that compute at the same time would stay there."""
    with region("ffn"):
        assert "custom" not in fx_traceback.current_meta
    with fx_traceback.preserve_node_meta():
        graph = make_fx(marked)(torch.ones(2)).graph
    found = [node.meta.get("custom") for node in graph.nodes if node.op == "call_function"]
    assert found == [{"region": "att"}, {"choice": True}]
    assert "custom" not in fx_traceback.current_meta
