"""One rank of two GPUs: what is under way while products fill the GPU, launched and in replays of a graph.

Called with (rank, file of the store). Raises if a bit differs from what exchanges that are waited for bring.
"""

from __future__ import annotations

import faulthandler
import sys
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from surogate_core.bundles.fabrics import FabricContext
from surogate_core.engine.graphs import capture_forward
from surogate_core.kernels.expert_ranks import ExpertRanks, SumsTrip, TokensTrip, _Added, _Gathered
from surogate_core.mesh.groups import GroupFabric

WORLD, TOKENS, WIDTH = 2, 4096, 1024

Layer = Callable[[Tensor, Tensor], Tensor]


def work(x_MI: Tensor, weight: Tensor) -> Tensor:
    """fp32 sums of all tokens; long enough for the exchanges beside it."""
    for _ in range(4):
        x_MI = torch.tanh(x_MI @ weight)
    return x_MI.float()


def halves(ranks: ExpertRanks) -> Layer:
    """A layer of which one half travels while the other is computed."""

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        tokens = [TokensTrip.begun(half, ranks) for half in x.chunk(2)]
        sums = [SumsTrip.begun(work(half(), weight), ranks, x.dtype) for half in tokens]
        return x + torch.cat([arrived() for arrived in sums])

    return layer


def waited(ranks: ExpertRanks) -> Layer:
    """The same, one after the other."""

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        found = [_Added.apply(work(_Gathered.apply(half, ranks), weight), ranks, x.dtype) for half in x.chunk(2)]
        return x + torch.cat(found)

    return layer


def values(layer: Layer, x: Tensor, weight: Tensor) -> Sequence[Tensor]:
    """Outputs and gradients of three layers."""
    # A graph is captured in one thread.
    with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
        leaves = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = leaves[0]
        for _ in range(3):
            y = layer(y, leaves[1])
        return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]


def main(rank: int, path: str) -> None:
    """Compare launched and replayed halves with what is waited for, on several inputs."""
    # Says where a rank waits for another.
    faulthandler.dump_traceback_later(60)
    device = torch.device("cuda", 0)
    store = dist.FileStore(path, WORLD)
    fabric = GroupFabric(
        FabricContext(rank=rank, world=WORLD, near=WORLD, device=device, store=store, gather=lambda value: [value])
    )
    fabric.connect()
    ranks = ExpertRanks(WORLD)
    ranks.open(fabric)
    draw = torch.Generator(device).manual_seed(rank)
    weight = torch.randn(WIDTH, WIDTH, device=device, generator=draw).bfloat16() / 32
    x = torch.zeros(TOKENS, WIDTH, device=device, dtype=torch.bfloat16)
    found: list[Tensor] = []

    def run() -> None:
        results = values(halves(ranks), x, weight)
        if not found:
            found.extend(torch.empty_like(one) for one in results)
        for target, one in zip(found, results, strict=True):
            target.copy_(one)

    run()
    graph = capture_forward(run, warm_up=run, beside=None)
    for _ in range(10):
        x.copy_(torch.randn(TOKENS, WIDTH, device=device, generator=draw))
        expected = values(waited(ranks), x, weight)
        for what, again in (("launched", run), ("replayed", graph.replay)):
            again()
            for number, (one, other) in enumerate(zip(found, expected, strict=True)):
                assert torch.equal(one, other), f"{what}: tensor {number}"
    # A communicator that a graph uses cannot be closed, and `again` is a method of the graph.
    del graph, again
    ranks.close()
    fabric.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
