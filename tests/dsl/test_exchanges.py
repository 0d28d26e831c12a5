"""What is under way while what is computed, and what a compiler may reorder."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, fx

from surogate_core.dsl.exchanges import await_in_place
from surogate_core.dsl.trace import Recompute, Signature, _split, trace_joint
from surogate_core.kernels.begun import BEGINNINGS
from surogate_core.kernels.expert_ranks import ExpertRanks, SumsTrip, TokensTrip
from surogate_core.kernels.linked import among

RANKS, WIDTH = 2, 3


def layer(x: Tensor, weight: Tensor) -> Tensor:
    """Tokens of two halves, each multiplied while the other half is under way."""
    group = ExpertRanks(RANKS)
    halves = [TokensTrip.begun(half, group) for half in torch.tanh(x).chunk(2)]
    sums = [SumsTrip.begun(torch.sin(half() @ weight), group, x.dtype) for half in halves]
    return x + torch.cat([arrived() for arrived in sums])


def graphs(*, block: bool) -> Sequence[fx.Graph]:
    """The graphs of forward and backward, as they are compiled."""
    made = [Signature((4, WIDTH), torch.float32, torch.device("cpu"), True)]
    made.append(Signature((WIDTH, WIDTH), torch.float32, torch.device("cpu"), True))
    with among():
        forward, backward, _ = _split(trace_joint(layer, made), Recompute(block=block), "fx")
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
    forward, backward = graphs(block=False)
    half = ["await", "product", "exchange"]
    assert names(forward) == ["gather", "gather", *half, *half, "await", "await"]
    # Each half has a product for the gradient of the weight and one for that of its tokens.
    half = ["await", "product", "product", "exchange"]
    assert names(backward) == ["gather", "gather", *half, *half, "await", "await"]


def test_what_is_computed_again_sends_no_sums_and_gradients_leave_at_once() -> None:
    _, backward = graphs(block=True)
    again, half = ["await", "product"], ["await", "product", "product", "exchange"]
    assert names(backward) == [*["gather"] * 4, *again, *again, *half, *half, "await", "await"]


@pytest.mark.parametrize("block", [False, True])
def test_the_order_does_not_hang_on_the_compiler(block: bool) -> None:
    """A beginning reads the one before it unless that has arrived, and a wait the beginnings before it."""
    for graph in graphs(block=block):
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
