"""How much memory a traced layer needs while it runs, counted from its graphs; nothing is compiled or run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from surogate_core.dsl.trace import Compiler, Recompute, Signature, _split, trace_joint

_CALLS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "embedding_dense_backward", "sort", "index_put"})
"""ATen ops that Inductor calls, as it does attention's and those of packs; the rest it fuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Of one layer."""

    kept: tuple[Signature, ...]
    """What stays between forward and backward besides inputs."""
    forward_bytes: int
    """Most that exists at one time in the forward besides inputs; `kept` and the output are part of it."""
    backward_bytes: int
    """The same of the backward: values computed again, gradients. `kept` and the output's gradient are inputs."""

    @property
    def working_bytes(self) -> int:
        """Most that exists at one time on top of inputs, `kept` and the output's gradient."""
        return max(self.forward_bytes - sum(s.nbytes for s in self.kept), self.backward_bytes)


def footprint(
    function: Callable[..., Tensor], inputs: Sequence[Signature], *, recompute: Recompute, compiler: Compiler
) -> Footprint:
    """What `differentiate` would make of the function."""
    forward, backward, kept = _split(trace_joint(function, inputs), recompute, compiler)
    return Footprint(
        kept=tuple(Signature.of(n.meta["val"]) for n in kept),
        forward_bytes=peak_bytes(forward.graph, compiler),
        backward_bytes=peak_bytes(backward.graph, compiler),
    )


def peak_bytes(graph: fx.Graph, compiler: Compiler) -> int:
    """Most bytes that values of the graph take at one time, each storage from its first value to its last use.

    Inputs are not counted. Under Inductor only what goes into or comes out of a call exists in memory: results of
    elementwise code that only other elementwise code reads stay in registers.
    """
    nodes = list(graph.nodes)
    inputs = {s for n in nodes if n.op == "placeholder" for s, _ in _storages(n)}
    sizes: dict[int, int] = {}
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    in_memory: set[int] = set()
    for place, node in enumerate(nodes):
        mine = [] if node.op in ("placeholder", "output") else list(_storages(node))
        for storage, nbytes in mine:
            if storage not in inputs:
                sizes[storage] = max(nbytes, sizes.get(storage, 0))
                first.setdefault(storage, place)
                last[storage] = max(place, last.get(storage, 0))
        calls = compiler == "fx" or node.op == "output" or _is_call(node)
        if calls:
            in_memory.update(s for s, _ in mine)
        for source in node.all_input_nodes:
            for storage, _ in _storages(source):
                last[storage] = place
                if calls:
                    in_memory.add(storage)
    changes: dict[int, int] = {}
    for storage in in_memory & sizes.keys():
        changes[first[storage]] = changes.get(first[storage], 0) + sizes[storage]
        after = last[storage] + 1
        changes[after] = changes.get(after, 0) - sizes[storage]
    peak = now = 0
    for _, change in sorted(changes.items()):
        now += change
        peak = max(peak, now)
    return peak


def _storages(node: fx.Node) -> Iterator[tuple[int, int]]:
    """(identity, bytes) of each storage of a node's value; a view has its base's."""
    value: Any = node.meta.get("val")
    for tensor in value if isinstance(value, tuple | list) else (value,):
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            yield storage._cdata, int(storage.nbytes())


def _is_call(node: fx.Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    if not isinstance(node.target, torch._ops.OpOverload):
        return True
    name = node.target.overloadpacket.__name__
    return node.target.namespace not in ("aten", "prims") or name in _CALLS or "attention" in name
