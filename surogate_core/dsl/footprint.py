"""How much memory a traced layer needs while it runs, counted from its graphs; nothing is compiled or run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from surogate_core.dsl.exchanges import await_in_place
from surogate_core.dsl.products import defer_products
from surogate_core.dsl.trace import Compiler, Function, Recompute, Signature, _split, _summed, trace_joint
from surogate_core.dsl.values import base_op, flops, is_call, name_of, storages
from surogate_core.kernels import heads, linked
from surogate_core.kernels.balancing import moved
from surogate_core.kernels.begun import BEGINNINGS
from surogate_core.kernels.registry import workspaces

_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "logsumexp", "var_mean"})
"""ATen ops whose results are written, as many elements wait for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Memory and work of one layer."""

    kept: tuple[Signature, ...]
    """The tensors kept between forward and backward, inputs excluded."""
    forward_bytes: int
    """Most that exists at one time in the forward besides inputs; `kept` and the output are part of it."""
    backward_bytes: int
    """The same of the backward: values computed again, gradients. `kept` and the output's gradient are inputs."""
    again: int
    """FLOPs of products and attention that the backward computes again."""
    exchanged: tuple[int, ...] = ()
    """Bytes of each tensor that ranks which share rows exchange in forward and backward."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of `kept`."""
        return sum(s.nbytes for s in self.kept)

    @property
    def working_bytes(self) -> int:
        """Most that exists at one time on top of inputs, `kept` and the output's gradient."""
        return max(self.forward_bytes - self.kept_bytes, self.backward_bytes)


def footprint(
    function: Function,
    inputs: Sequence[Signature],
    *,
    recompute: Recompute,
    compiler: Compiler,
    summed: int = 0,
) -> Footprint:
    """What `differentiate` would make of the function."""
    exchanges = {*heads.EXCHANGES, *linked.EXCHANGES, *BEGINNINGS}
    forward, backward, kept = _split(trace_joint(function, inputs), recompute, compiler)
    defer_products(backward, _summed(inputs, summed))
    computed = {n.name for n in forward.graph.nodes if n.op == "call_function"}
    return Footprint(
        kept=tuple(Signature.of(n.meta["val"]) for n in kept),
        forward_bytes=peak_bytes(forward.graph, compiler),
        backward_bytes=peak_bytes(backward.graph, compiler),
        again=sum(flops(n) for n in backward.graph.nodes if n.op == "call_function" and n.name in computed),
        exchanged=tuple(
            _exchanged(n)
            for g in (forward.graph, backward.graph)
            for n in g.nodes
            if n.target in exchanges or n.target in moved.SENT
        ),
    )


def _exchanged(node: fx.Node) -> int:
    """Bytes that ranks exchange in an op."""
    if node.target in moved.SENT:
        return moved.SENT[node.target](*fx.node.map_arg(node.args, lambda n: n.meta["val"]))
    return int(node.meta["val"].nbytes)


def joint_bytes(function: Function, inputs: Sequence[Signature], *, compiler: Compiler, summed: int = 0) -> int:
    """Most that exists at one time besides inputs in what `with_gradients` would make of the function."""
    joint = trace_joint(function, inputs)
    defer_products(joint, 1 + _summed(inputs, summed))
    return peak_bytes(joint.graph, compiler)


def peak_bytes(graph: fx.Graph, compiler: Compiler) -> int:
    """Most bytes that values of the graph take at one time, each storage from its first value to its last use.

    Inputs are not counted. The memory that a custom op declares for its inside is counted. Under Inductor only the
    inputs and outputs of calls and reductions exist in memory: other elementwise ops are fused into the kernels of
    their readers, which then read the sources of these ops.
    """
    await_in_place(graph)
    nodes = list(graph.nodes)
    inputs = {s for n in nodes if n.op == "placeholder" for s, _ in storages(n)}
    in_memory: set[int] = set()
    for node in nodes:
        if compiler == "fx" or node.op == "output" or is_call(node):
            in_memory.update(s for n in (node, *node.all_input_nodes) for s, _ in storages(n))
        elif name_of(node) in _REDUCTIONS:
            in_memory.update(s for s, _ in storages(node))
    sizes: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    fused: dict[fx.Node, set[int]] = {}
    """A node that is not in memory → the storages that the kernels read into which it is fused."""
    for place, node in enumerate(nodes):
        reads: set[int] = set()
        for source in node.all_input_nodes:
            reads.update(s for s, _ in storages(source) if s in in_memory)
            reads |= fused.get(source, set())
        mine = [] if node.op in ("placeholder", "output") else list(storages(node))
        made = [(s, nbytes) for s, nbytes in mine if s in in_memory - inputs]
        for storage, nbytes in made:
            sizes[storage] = max(nbytes, sizes.get(storage, 0))
            first.setdefault(storage, place)
            last[storage] = place
        if made or node.op == "output":
            last.update(dict.fromkeys(reads, place))
        elif node.op != "placeholder":
            fused[node] = reads
    changes: dict[int, int] = {}
    spans = [(first[storage], last[storage], size) for storage, size in sizes.items()]
    spans += [(place, place, _within(node)) for place, node in enumerate(nodes)]
    for start, stop, size in spans:
        changes[start] = changes.get(start, 0) + size
        changes[stop + 1] = changes.get(stop + 1, 0) - size
    peak = now = 0
    for _, change in sorted(changes.items()):
        now += change
        peak = max(peak, now)
    return peak


def _within(node: fx.Node) -> int:
    """Bytes that an op has besides its inputs and results."""
    needed = workspaces.get(base_op(node))
    if needed is None:
        return 0
    arguments, named = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return needed(*arguments, **named)
