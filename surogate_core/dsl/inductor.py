"""Inductor without timing: equal graphs become equal kernels.

Inductor times several tilings of a kernel and keeps the fastest, anew each time a program is loaded.
The tiling of a reduction decides the order of its sum, and that of any other kernel which product of
a·b + c·d is rounded before the addition, so two runs of one configuration could differ in their last
bits. Here the tiling is chosen by a rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

ELEMENTS = 1024
"""Elements that a program works on at a time, as near as the offered tilings come."""
KINDS = ("POINTWISE", "REDUCTION", "PERSISTENT_REDUCTION", "SPLIT_SCAN")
"""Of Inductor's kinds of kernels those that it makes in several tilings."""

_settled: set[int] = set()


def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph for inputs like these (fake tensors)."""
    _keep_additions(module)
    # What another process timed and left on disk would be taken without being asked.
    with torch.no_grad(), torch._inductor.config.patch(autotune_local_cache=False):
        compiled = torch._inductor.compile(module, list(inputs))
    settle_kernels()
    return compiled


def _keep_additions(module: fx.GraphModule) -> None:
    """Keep Inductor from adding to a product inside it: in 16 bits it would copy the other operand first.

    An addition in fp32 it takes into the kernel that reads the sum, which is faster on a GPU.
    """
    add, mm, cast = torch.ops.aten.add.Tensor, torch.ops.aten.mm.default, torch.ops.aten._to_copy.default
    for node in list(module.graph.nodes):
        if node.target is not add or node.kwargs or not any(getattr(a, "target", None) is mm for a in node.args):
            continue
        values = [a.meta["val"] if isinstance(a, fx.Node) else None for a in node.args]
        dtype = node.meta["val"].dtype
        if dtype not in (torch.float16, torch.bfloat16) or any(v is None or v.dtype != dtype for v in values):
            continue
        with module.graph.inserting_before(node):
            wide = [module.graph.call_function(cast, (a,), {"dtype": torch.float32}) for a in node.args]
            total = module.graph.call_function(add, tuple(wide))
            narrow = module.graph.call_function(cast, (total,), {"dtype": dtype})
        narrow.meta = dict(node.meta)
        node.replace_all_uses_with(narrow)
        module.graph.erase_node(node)
    module.recompile()


def settle_kernels() -> None:
    """Leave each kernel that was compiled since the last call with one of its tilings."""
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    for loaded in PyCodeCache.modules:
        for kernel in vars(loaded).values():
            if not isinstance(kernel, CachingAutotuner) or kernel.heuristic_type.name not in KINDS:
                continue
            if id(kernel) in _settled:
                continue
            _settled.add(id(kernel))
            if not kernel.launchers and len(kernel.compile_results or ()) != 1:
                kernel.precompile()
            if len(kernel.launchers) > 1:
                kernel.launchers = [min(kernel.launchers, key=lambda one: _rank(one.config, kernel.size_hints))]


def _rank(config: Any, sizes: dict[str, int]) -> tuple[float, ...]:
    """The order of tilings: the first is taken."""
    blocks = config.kwargs
    reduced = math.prod(blocks.get(f"{name.upper()}BLOCK", size) for name, size in sizes.items() if name[0] == "r")
    kept = math.prod(value for name, value in blocks.items() if name in ("XBLOCK", "YBLOCK", "ZBLOCK"))
    distance = abs(math.log2(max(1, reduced * kept)) - math.log2(ELEMENTS))
    return distance, -kept, config.num_warps, config.num_stages
