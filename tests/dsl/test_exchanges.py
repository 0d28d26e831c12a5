"""What is under way while what is computed, and what a compiler may reorder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from surogate_core.dsl.exchanges import await_in_place
from surogate_core.dsl.experts import BoundExperts, ExpertSlot, Routes, mixture
from surogate_core.dsl.trace import Compiler, Recompute, Signature, _split, trace_joint
from surogate_core.kernels.begun import BEGINNINGS
from surogate_core.kernels.expert_ranks import ExpertRanks, SumsTrip, TokensTrip
from surogate_core.kernels.linked import among
from surogate_core.kernels.regions import region

RANKS, WIDTH = 2, 3


def layer(x: Tensor, weight: Tensor) -> Tensor:
    """Tokens of two halves, each multiplied while the other half is under way."""
    group = ExpertRanks(RANKS)
    with region("ffn"):
        halves = [TokensTrip.begun(half, group) for half in torch.tanh(x).chunk(2)]
        sums = [SumsTrip.begun(torch.sin(half() @ weight), group, x.dtype) for half in halves]
        return x + torch.cat([arrived() for arrived in sums])


def graphs(recompute: Recompute, compiler: Compiler = "fx") -> Sequence[fx.Graph]:
    """The graphs of forward and backward, as they are compiled."""
    made = [Signature((4, WIDTH), torch.float32, torch.device("cpu"), True)]
    made.append(Signature((WIDTH, WIDTH), torch.float32, torch.device("cpu"), True))
    with among():
        forward, backward, _ = _split(trace_joint(layer, made), recompute, compiler)
    for module in (forward, backward):
        await_in_place(module.graph)
        module.graph.lint()
    return forward.graph, backward.graph


def names(graph: fx.Graph) -> list[str]:
    """The exchanges of a graph and its products, in order."""
    short = {"begin_gather": "gather", "begin_exchange": "exchange", "await_arrival": "await", "mm": "product"}
    found = [getattr(node.target, "_opname", "") for node in graph.nodes]
    return [short[name] for name in found if name in short]


def test_a_half_is_under_way_while_the_other_is_multiplied() -> None:
    forward, backward = graphs(Recompute(block=False))
    half = ["await", "product", "exchange"]
    assert names(forward) == ["gather", "gather", *half, *half, "await", "await"]
    # Each half has a product for the gradient of the weight and one for that of its tokens.
    half = ["await", "product", "product", "exchange"]
    assert names(backward) == ["gather", "gather", *half, *half, "await", "await"]


def test_what_is_computed_again_sends_no_sums_and_gradients_leave_at_once() -> None:
    _, backward = graphs(Recompute(block=True))
    again, half = ["await", "product"], ["await", "product", "product", "exchange"]
    assert names(backward) == [*["gather"] * 4, *again, *again, *half, *half, "await", "await"]


def test_torch_finds_no_marks_of_the_partitioner() -> None:
    """It would compute marked values again, and refuses a backward that exchanges divide (torch 2.13)."""
    ffn = Recompute(block=False, regions=frozenset({"ffn"}))
    assert not any("recompute" in node.meta for graph in graphs(ffn, "inductor") for node in graph.nodes)


@pytest.mark.parametrize("again", ["ffn", "att"])
def test_what_is_under_way_is_not_kept(again: str) -> None:
    """Even if one region of the experts' two is computed again."""

    def slot(number: int, name: str) -> ExpertSlot:
        sizes: dict[str, Any] = {"count": 4, "choices": 2, "inputs": WIDTH, "outputs": WIDTH, "index": number}
        return ExpertSlot(name=name, module="e.{e}", region=name, fused=None, adapter=None, **sizes)

    def sparse(x: Tensor, logits: Tensor, up: Tensor, down: Tensor) -> Tensor:
        routes = Routes.of(logits, 2, renormalise=True)
        bound = [
            BoundExperts(slot(number, name), {"weight": weight}, seed=None)
            for number, (name, weight) in enumerate((("ffn", up), ("att", down)))
        ]
        return mixture(x, routes, bound[:1], lambda routes, rows: torch.sin(rows), bound[1])

    shapes = (4, WIDTH), (4, 4), (2, WIDTH, WIDTH), (2, WIDTH, WIDTH)
    made = [Signature(shape, torch.float32, torch.device("cpu"), len(shape) == 2) for shape in shapes]
    with among(ExpertRanks(RANKS)):
        joint = trace_joint(sparse, made)
    _, _, kept = _split(joint, Recompute(block=False, regions=frozenset({again})), "fx")
    assert kept
    assert not [node for node in kept if node.target in BEGINNINGS]


@pytest.mark.parametrize("block", [False, True])
def test_the_order_does_not_hang_on_the_compiler(block: bool) -> None:
    """A beginning reads the one before it unless that has arrived, and a wait the beginnings before it."""
    for graph in graphs(Recompute(block=block)):
        arrived: set[fx.Node] = set()
        before: fx.Node | None = None
        for node in graph.nodes:
            if node.target in BEGINNINGS:
                assert (before in node.all_input_nodes) == (before is not None and before not in arrived)
                before = node
            elif node.target is torch.ops.surogate.await_arrival.default:
                assert before is not None
                arrived.add(node.args[0])
                assert before in node.all_input_nodes or before in arrived
        assert before is not None
