"""Inductor without timing: equal graphs become equal kernels.

Inductor times several tilings of a kernel and keeps the fastest, anew each time a program is loaded. The tiling of a
reduction decides the order of its sum, and that of any other kernel may decide which product of a·b + c·d is rounded
before the addition, so two runs of one configuration could differ in their last bits. With these settings torch's own
rules choose while the code is generated, so kernels that another process left on disk have the same tiling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from surogate_core.caches import use_private_caches
from surogate_core.dsl.adjacent import join_columns_apart
from surogate_core.kernels.building.ahead import compiling
from surogate_core.kernels.registry import write_in_place

UNTIMED = {
    "deterministic": True,
    # Otherwise it times two tilings of a kernel without a reduction.
    "triton.autotune_pointwise": False,
    # Otherwise it takes the results that another process timed and left on disk.
    "autotune_local_cache": False,
}
"""Inductor's settings."""


def start_workers() -> None:
    """Start the processes that compile Triton kernels, and do not wait for them.

    They import torch for seconds. Until they are ready, Inductor compiles the kernels of a graph one after the other in
    this process. torch.compile starts them too; `torch._inductor.compile` does so only with its first kernel.
    """
    from torch._inductor.async_compile import maybe_warm_pool

    use_private_caches()
    _use_one_assembler()
    maybe_warm_pool()


def _use_one_assembler() -> None:
    """Have Triton use the ptxas that torch brings, if torch brings one.

    Inductor's processes always do. This process would do so from its first kernel of Inductor on, if it compiles one at
    all, and before that take Triton's: the same kernel would be compiled by one or the other.
    """
    from torch._inductor.runtime.compile_tasks import _set_triton_ptxas_path

    _set_triton_ptxas_path()


def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Compile a graph for inputs like these (fake tensors)."""
    _keep_additions(module)
    join_columns_apart(module.graph)
    write_in_place(module.graph)
    module.recompile()
    use_private_caches()
    _use_one_assembler()
    kernels = compiling(module.graph)
    with torch.no_grad(), torch._inductor.config.patch(UNTIMED):
        return kernels.before(torch._inductor.compile(module, list(inputs)))


def _keep_additions(module: fx.GraphModule) -> None:
    """Keep Inductor from adding to a product inside it: in 16 bits it would copy the other operand first.

    An fp32 addition is then fused into the kernel that reads the sum, which is faster on a GPU.
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
