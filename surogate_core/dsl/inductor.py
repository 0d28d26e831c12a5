"""Inductor without timing: equal graphs become equal kernels.

Inductor times several tilings of a kernel and keeps the fastest, anew each time a program is loaded. The tiling of a
reduction decides the order of its sum, and that of any other kernel may decide which product of a·b + c·d is rounded
before the addition, so two runs of one configuration could differ in their last bits. With these settings torch's own
rules choose while the code is generated, so kernels that another process left on disk have the same tiling.

torch keeps compiled graphs on disk (AOTAutogradCache, FxGraphCache), by the text of the graph, its inputs, torch's own
code and its settings. What a custom op returns and writes is not in that text: it follows from the code of a plugin or
from the number of ranks. Nor are the vector instructions in it for which code for a CPU is written. So `facts_of` a
graph is a part of the key.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from surogate_core.caches import instructions, use_private_caches
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
    with torch.no_grad(), ExitStack() as stack:
        stack.enter_context(torch._inductor.config.patch(UNTIMED))
        _key_by(facts_of(module.graph), stack)
        return kernels.before(torch._inductor.compile(module, list(inputs)))


def _key_by(facts: str | None, stack: ExitStack) -> None:
    """Make the facts a part of the keys of torch's caches of compiled graphs; without facts, use none of them."""
    if facts is None:
        stack.enter_context(torch._inductor.config.patch(fx_graph_cache=False))
        stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
        return
    settings: Any = torch.compiler.config
    stack.enter_context(settings.patch(cache_key_tag=f"{settings.cache_key_tag} {facts}"))


def facts_of(graph: fx.Graph) -> str | None:
    """A digest of what each node of a traced graph returns, and of what each op may write and requires.

    The trace has it from the ops of this process. None if it is not known of a node, so that nobody can say what the
    compiled graph depends on.
    """
    lines: list[Any] = []
    for node in graph.nodes:
        ops = [leaf for leaf in tree_leaves((node.target, node.args, node.kwargs)) if isinstance(leaf, OpOverload)]
        lines.append((node.name, [(str(op._schema), sorted(map(str, op.tags))) for op in ops]))
        if "val" in node.meta:
            lines.append([_signature(value) for value in tree_leaves(node.meta["val"])])
        elif node.op == "call_function" and not _says_itself(node.target):
            return None
    values = (value for node in graph.nodes for value in tree_leaves(node.meta.get("val")))
    if any(isinstance(value, Tensor) and value.device.type == "cpu" for value in values):
        lines.append((instructions(), torch.get_num_threads()))
    return hashlib.sha256(repr(lines).encode()).hexdigest()


def _says_itself(target: Any) -> bool:
    """Whether torch's own code decides what a call returns, or nothing is returned."""
    if not isinstance(target, OpOverload):
        return target is operator.getitem
    return target.namespace in ("aten", "prims") or not target._schema.returns


def _signature(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return repr(value)
    layout = (tuple(value.shape), value.stride(), value.storage_offset())
    return (*layout, str(value.dtype), str(value.device))


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
