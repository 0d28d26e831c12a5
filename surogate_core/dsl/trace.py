"""Ahead-of-time differentiation: one traced joint graph per distinct piece of a model.

A pure function of tensors is traced with its backward (AOTAutograd), and the joint graph is cut
into a forward that also returns what the backward must keep, and a backward that receives it.
Values that are inputs of the piece (weights, tables, its activation) are never kept: they are
handed to the backward again, so that a store may have moved them in between.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy

from surogate_core.dsl.adjacent import drop_joins
from surogate_core.dsl.budget import chosen
from surogate_core.dsl.exchanges import await_in_place
from surogate_core.dsl.inductor import compile_graph
from surogate_core.dsl.parts import copy_parts, keep_whole, wholes
from surogate_core.dsl.products import collect, defer_products
from surogate_core.dsl.values import EMPTY, VIEWS, base_op, is_result, root_of
from surogate_core.imports import quick_import_tracing
from surogate_core.kernels import registry
from surogate_core.kernels.begun import BEGINNINGS

Compiler = Literal["fx", "inductor"]
Compiled = Callable[..., Sequence[Any]]

CRUMB = 8
"""With recomputation, an op's small outputs are kept instead of running the op again, if they are at most 1/CRUMB of
its output bytes.
"""

_OUTPUTS, _INPUTS, _EXPERTS = "surogate_outputs", "surogate_inputs", "surogate_experts"
"""Keys of a joint graph's meta: number of the function's outputs, number of its inputs, places of experts' tensors."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Shape, dtype and device of a program's input."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False
    of_experts: bool = False
    """Whether it is a tensor of all experts of a layer. What is computed from such tensors alone is never kept."""

    @property
    def nbytes(self) -> int:
        """Bytes of such a tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, tensor: Tensor, *, requires_grad: bool = False) -> Signature:
        """The signature of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """The values that the backward computes again instead of receiving them."""

    block: bool
    """Everything, except the inputs and small outputs of products."""
    regions: frozenset[str] = frozenset()
    """Outputs of these regions (`kernels.ops.region`)."""
    budget: float = 1.0
    """0 to 1: share of the bytes to keep, of those that would be kept otherwise. The values that are cheapest to
    compute again are not kept.
    """


@dataclass(frozen=True, slots=True)
class _Call:
    """A compiled graph, and the positions of its arguments in a longer list."""

    function: Compiled
    taken: tuple[int, ...]
    products: tuple[int, ...] = ()
    """For each output, how many the graph gives for it, see `defer_products`; one for each where empty."""

    def __call__(self, arguments: Sequence[Any]) -> Sequence[Any]:
        outputs = self.function(*[arguments[i] for i in self.taken])
        return collect(outputs, self.products) if self.products else outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A differentiated piece.

    `forward(inputs)` → [*outputs, *kept]; `backward([*inputs, *kept, *d_outputs])` → gradients of
    the inputs that require them, in order, some as `products.Product`; only the outputs that depend on such inputs have
    a gradient. `reads_input[i]`: whether the backward reads input i.
    """

    forward: _Call
    backward: _Call
    reads_input: tuple[bool, ...]
    kept: tuple[Signature, ...]
    """Signatures of what the forward keeps besides inputs; their bytes are the residuals'."""


class UnusedInputsError(ValueError):
    """The output does not depend on inputs whose gradients are asked for."""

    def __init__(self, positions: Sequence[int]):
        super().__init__(f"the output does not depend on the inputs {list(positions)}")
        self.positions = tuple(positions)


Function = Callable[..., Tensor | Sequence[Tensor]]
"""A function of flat tensor inputs with one output or several."""


def trace_joint(function: Function, inputs: Sequence[Signature]) -> fx.GraphModule:
    """The joint graph of a function.

    Placeholders: the inputs, then the gradients of the outputs that depend on inputs that require them. Outputs: those
    of the function, then the gradients of the inputs that require them. Raises `UnusedInputsError` where there is none.
    """
    joint = _export(function, inputs, joint=True)
    (output,) = (n for n in joint.graph.nodes if n.op == "output")
    flat = list(torch.utils._pytree.tree_leaves(output.args[0]))
    count = len(flat) - len(inputs)
    found = list(zip(flat[count:], inputs, strict=True))
    unused = [i for i, (g, s) in enumerate(found) if s.requires_grad and g is None]
    if unused:
        raise UnusedInputsError(unused)
    output.args = ([*flat[:count], *(g for g, signature in found if signature.requires_grad)],)
    joint.meta[_OUTPUTS], joint.meta[_INPUTS] = count, len(inputs)
    joint.meta[_EXPERTS] = [i for i, signature in enumerate(inputs) if signature.of_experts]
    joint.graph.eliminate_dead_code()
    registry.rewrite(joint.graph)
    return joint


def _outputs(joint: fx.GraphModule) -> tuple[list[fx.Node], list[fx.Node]]:
    """(outputs of the function, gradients) of a joint graph."""
    found: list[fx.Node] = list(next(iter(reversed(joint.graph.nodes))).args[0])
    count = joint.meta[_OUTPUTS]
    return found[:count], found[count:]


def _placeholders(joint: fx.GraphModule) -> tuple[list[fx.Node], list[fx.Node]]:
    """(inputs, gradients of outputs) of a joint graph."""
    found = [n for n in joint.graph.nodes if n.op == "placeholder"]
    count = joint.meta[_INPUTS]
    return found[:count], found[count:]


def _export(function: Function, inputs: Sequence[Signature], *, joint: bool) -> fx.GraphModule:
    # Importing them takes half a second, which a plan whose figures are kept saves.
    quick_import_tracing(keeps=False)  # what was made for an engine is to be freed with it
    from torch._dynamo.convert_frame import compile_lock
    from torch._functorch.aot_autograd import aot_export_joint_simple
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # No shape is symbolic, but torch keeps compiled graphs on disk only where there is a shape environment.
    with FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True):
        fakes = [
            torch.empty(s.shape, dtype=s.dtype, device=s.device, requires_grad=s.requires_grad and joint)
            for s in inputs
        ]
    # A trace patches torch for the whole process, and a generation ahead is compiled in another thread.
    with compile_lock, fx_traceback.preserve_node_meta(), torch.set_grad_enabled(joint):
        exported: Any = aot_export_joint_simple(_several(function), tuple(fakes), trace_joint=joint)
    module: fx.GraphModule = exported
    module.graph.set_codegen(fx.graph.CodeGen())
    (output,) = (n for n in module.graph.nodes if n.op == "output")
    output.args = (list(torch.utils._pytree.tree_leaves(output.args[0], is_leaf=lambda x: x is None)),)
    _drop_assertions(module.graph)
    drop_joins(module.graph)
    module.graph.eliminate_dead_code()
    return module


def _several(function: Function) -> Callable[..., tuple[Tensor, ...]]:
    """The function with a tuple of outputs."""

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        found = function(*inputs)
        return (found,) if isinstance(found, Tensor) else tuple(found)

    return run


def _drop_assertions(graph: fx.Graph) -> None:
    """Traced metadata assertions hold by construction; at run time they only cost."""
    for node in list(graph.nodes):
        if node.target == torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)


def _extract(
    graph: fx.Graph, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node], within: set[fx.Node]
) -> fx.GraphModule:
    """The subgraph that computes `outputs` from `inputs` with the nodes `within`."""
    extracted = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = extracted.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in graph.nodes:
        if node in within and node not in copies:
            copies[node] = extracted.node_copy(node, lambda n: copies[n])
    extracted.output([copies[n] for n in outputs])
    extracted.eliminate_dead_code()
    extracted.lint()
    return fx.GraphModule(torch.nn.Module(), extracted)


def _closure(outputs: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that the outputs depend on, themselves included."""
    seen: set[fx.Node] = set()
    todo = list(outputs)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo.extend(node.all_input_nodes)
    return seen


def _again(node: fx.Node, forward: set[fx.Node], recompute: Recompute) -> bool:
    """Whether the backward computes this forward value again."""
    if recompute.block or node not in forward:
        return True
    made_by = node
    if node.target is operator.getitem:
        made_by = node.all_input_nodes[0]
    elif not isinstance(node.meta.get("val"), Tensor):
        # A tuple is never kept itself; it is here because one of its elements is computed again.
        return True
    marks = _marks(made_by)
    return base_op(made_by) in VIEWS or bool(marks.get("again")) or marks.get("region") in recompute.regions


def _marks(node: fx.Node) -> dict[str, Any]:
    """The marks of `kernels.regions`."""
    return node.meta.get("custom") or {}


def _is_choice(node: fx.Node) -> bool:
    """Whether an op decided something by these values (`kernels.ops.choice`): computed again, it might decide
    otherwise.
    """
    return bool(_marks(node).get("choice"))


def _crumbs(again: set[fx.Node]) -> set[fx.Node]:
    """The nodes computed `again` that are the only needed outputs of their op, and a small part of its output.

    For example, x Aᵀ of the last projection of a block is kept, so the projection is not computed again.
    """
    found: set[fx.Node] = set()
    for node in again:
        values = node.meta.get("val")
        if not isinstance(values, tuple | list):
            continue
        wanted = [n for n in node.users if n in again]
        if any(n.target is not operator.getitem for n in wanted):
            continue
        sizes = [v.numel() * v.element_size() if isinstance(v, Tensor) else 0 for v in values]
        if CRUMB * sum(sizes[n.args[1]] for n in wanted) <= sum(sizes):  # type: ignore[index, misc]
            found.update(wanted)
    return found


def _forward_of(joint: fx.GraphModule) -> set[fx.Node]:
    """What the outputs depend on, and the other results of an op that they do, such as attention's log-sum-exp."""
    nodes = list(joint.graph.nodes)
    forward = _closure(_outputs(joint)[0])
    return forward | {n for n in nodes if n.target is operator.getitem and n.all_input_nodes[0] in forward}


def _within(joint: fx.GraphModule, kept: frozenset[fx.Node]) -> set[fx.Node]:
    """The nodes that a backward computes if it receives `kept`."""
    within: set[fx.Node] = set()
    todo = _outputs(joint)[1]
    while todo:
        node = todo.pop()
        if node.op != "placeholder" and node not in kept and node not in within:
            within.add(node)
            todo.extend(node.all_input_nodes)
    return within


def _cut_at(joint: fx.GraphModule, kept: Sequence[fx.Node]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward graphs; the backward receives `kept`, and computes its other inputs again."""
    outputs, gradients = _outputs(joint)
    inputs, tangents = _placeholders(joint)
    within = _within(joint, frozenset(kept))
    return (
        _extract(joint.graph, inputs, [*outputs, *kept], _forward_of(joint) | _closure(kept)),
        _extract(joint.graph, [*inputs, *kept, *tangents], gradients, within),
    )


def _spared(joint: fx.GraphModule, recompute: Recompute) -> list[fx.Node]:
    """What is kept where nothing is fused: what the backward cannot compute again, and what is too small to."""
    nodes = list(joint.graph.nodes)
    placeholders = {n for n in nodes if n.op == "placeholder"}
    _, gradients = _outputs(joint)
    forward = _forward_of(joint)
    downstream = set(_placeholders(joint)[1])
    for node in nodes:
        if any(i in downstream for i in node.all_input_nodes):
            downstream.add(node)

    def walk(spared: set[fx.Node]) -> tuple[set[fx.Node], set[fx.Node]]:
        kept: set[fx.Node] = set()
        within: set[fx.Node] = set()
        todo = list(gradients)
        while todo:
            node = todo.pop()
            if node in within or node in placeholders:
                continue
            if node in spared or (node not in downstream and not _again(node, forward, recompute)):
                kept.add(node)
                continue
            within.add(node)
            todo.extend(node.all_input_nodes)
        return kept, within

    choices = {node for node in forward if _is_choice(node)}
    found, within = walk(choices)
    if spared := _crumbs(within & forward):
        found, within = walk(spared | choices)
    return [n for n in nodes if n in found]


def _compile(module: fx.GraphModule, compiler: Compiler) -> Compiled:
    await_in_place(module.graph)
    module.recompile()
    if compiler == "fx":
        return module.forward
    fakes = [n.meta["val"] for n in module.graph.nodes if n.op == "placeholder"]
    return compile_graph(module, fakes)


def _compiled(
    module: fx.GraphModule, names: Sequence[str], compiler: Compiler, products: tuple[int, ...] = ()
) -> _Call:
    """The graph compiled without the placeholders that it does not read."""
    for node in list(module.graph.nodes):
        if node.op == "placeholder" and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    taken = [n.name for n in module.graph.nodes if n.op == "placeholder"]
    position = {name: i for i, name in enumerate(names)}
    return _Call(_compile(module, compiler), tuple(position[name] for name in taken), products)


def _summed(inputs: Sequence[Signature], count: int) -> int:
    """Gradients that the first `count` inputs have."""
    return sum(signature.requires_grad for signature in inputs[:count])


def _split(
    joint: fx.GraphModule, recompute: Recompute, compiler: Compiler
) -> tuple[fx.GraphModule, fx.GraphModule, list[fx.Node]]:
    """(forward, backward, the nodes that the forward returns for the backward besides inputs)."""
    inputs = {n.name for n in joint.graph.nodes if n.op == "placeholder"}
    count = joint.meta[_OUTPUTS]
    if compiler != "inductor" or recompute.block:
        spared = _spared(joint, recompute)
        if recompute.budget < 1 and not recompute.block:
            spared = _within_budget(joint, spared, recompute.budget)
        forward, backward = _cut_at(joint, spared)
    else:
        from torch._functorch import config as functorch_config
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        # Fused elementwise work is cheaper to repeat than to store; min-cut weighs it.
        _mark(joint, recompute)
        with functorch_config.patch(recompute_views=True):
            forward, backward = min_cut_rematerialization_partition(joint, None, num_fwd_outputs=count)
        if recompute.budget < 1:
            # The partitioner left other nodes in the joint graph, under the same names.
            names = {n.name for n in _returned(forward, count)} - inputs
            found = [n for n in joint.graph.nodes if n.name in names]
            assert len(found) == len(names), "every residual is a value of the joint graph"
            found = [n for n in found if root_of(n).op != "placeholder"]
            whole = wholes(found)
            found = list(dict.fromkeys(whole.get(n, n) for n in found))
            forward, backward = _cut_at(joint, _within_budget(joint, found, recompute.budget))
        else:
            keep_whole(forward, backward, count)
    copy_parts(forward, backward, count)
    output = next(iter(reversed(forward.graph.nodes)))
    kept = [n for n in _returned(forward, count) if n.name not in inputs]
    output.args = ([*output.args[0][:count], *kept],)
    return forward, backward, kept


def _returned(forward: fx.GraphModule, count: int) -> list[fx.Node]:
    """The outputs of a forward graph that the backward receives: those after the function's, which are `count`."""
    returned: list[fx.Node] = list(next(iter(reversed(forward.graph.nodes))).args[0])
    return returned[count:]


def _within_budget(joint: fx.GraphModule, kept: Sequence[fx.Node], budget: float) -> list[fx.Node]:
    """The nodes to keep within the budget, from `kept` or in their place, and the choices, which are small; if none
    fits, those of whole-block recomputation.
    """
    behind = _closure(kept)
    forward = _forward_of(joint) | behind
    # The choices themselves, even where `kept` has what was computed from them.
    always = frozenset(n for n in forward if _is_choice(n))
    free = [n for n in kept if n not in always]
    others = [n for n in joint.graph.nodes if n in behind and n not in kept and is_result(n)]
    # What is under way is no value yet.
    others = [n for n in others if n.target not in BEGINNINGS]
    found = set(chosen(free, others, budget, lambda keep: _within(joint, keep | always) & forward))
    if not found:
        return _spared(joint, Recompute(block=True))
    within = _within(joint, frozenset(found | always))
    read = {n for n in always if any(user in within for user in n.users)}
    return [n for n in joint.graph.nodes if n in found | read]


def _of_experts(joint: fx.GraphModule) -> set[fx.Node]:
    """The tensors of experts and what is computed from them alone."""
    inputs, _ = _placeholders(joint)
    found = {inputs[place] for place in joint.meta[_EXPERTS]}
    for node in joint.graph.nodes:
        if node.op == "call_function":
            sources = [n for n in node.all_input_nodes if n.all_input_nodes or n.op == "placeholder"]
            if sources and found.issuperset(sources):
                found.add(node)
    return found


def _mark(joint: fx.GraphModule, recompute: Recompute) -> None:
    """Mark the forward values that min-cut must let the backward compute again.

    Views and concatenations of marked values are marked too, in every region, and what is computed from weights of
    experts alone: their codes under a recipe would take half as much memory in every layer as the layer's weights.
    """
    forward = _closure(_outputs(joint)[0])
    marked: set[fx.Node] = set()
    of_experts = _of_experts(joint)
    for node in joint.graph.nodes:
        if node in of_experts and node.op == "call_function":
            node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 0}
            marked.add(node)
            continue
        if node not in forward or node.op != "call_function":
            continue
        if _is_choice(node):
            node.meta |= {"recompute": CheckpointPolicy.MUST_SAVE, "ac_graph_id": 0}
            continue
        sources = [n for n in node.all_input_nodes if base_op(n) not in EMPTY]
        follows = base_op(node) in {*VIEWS, torch.ops.aten.cat} and sources and marked.issuperset(sources)
        marks = _marks(node)
        if follows or base_op(node) in EMPTY or marks.get("again") or marks.get("region") in recompute.regions:
            node.meta |= {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "ac_graph_id": 0}
            marked.add(node)


def differentiate(
    function: Function,
    inputs: Sequence[Signature],
    *,
    recompute: Recompute,
    compiler: Compiler,
    summed: int = 0,
) -> Program:
    """Trace, cut and compile a function.

    The gradients of the first `summed` inputs are added to sums: those that are products are left as such.
    """
    joint = trace_joint(function, inputs)
    input_names, tangents = ([n.name for n in nodes] for nodes in _placeholders(joint))
    forward, backward, kept = _split(joint, recompute, compiler)
    products = defer_products(backward, _summed(inputs, summed))
    read = {n.name for n in backward.graph.nodes if n.op == "placeholder" and n.users}
    return Program(
        forward=_compiled(forward, input_names, compiler),
        backward=_compiled(backward, [*input_names, *(n.name for n in kept), *tangents], compiler, products),
        reads_input=tuple(name in read for name in input_names),
        kept=tuple(Signature.of(n.meta["val"]) for n in kept),
    )


def with_gradients(function: Function, inputs: Sequence[Signature], *, compiler: Compiler, summed: int = 0) -> _Call:
    """Compile the joint graph whole: ([*inputs, d_output]) → [*outputs, *gradients]; `summed` as in `differentiate`.

    One output depends on inputs that require gradients; others must be detached.
    """
    joint = trace_joint(function, inputs)
    names = [n.name for n in joint.graph.nodes if n.op == "placeholder"]
    products = defer_products(joint, joint.meta[_OUTPUTS] + _summed(inputs, summed))
    return _compiled(joint, names, compiler, products)


def without_gradients(function: Function, inputs: Sequence[Signature], *, compiler: Compiler) -> _Call:
    """Compile the forward alone: (inputs) → [output]."""
    module = _export(function, inputs, joint=False)
    names = [n.name for n in module.graph.nodes if n.op == "placeholder"]
    return _compiled(module, names, compiler)
