"""CUDA graphs of the micro-step, of the optimizer step and of an evaluation's forward."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch


@cache
def _side_stream() -> torch.cuda.Stream:
    """The stream of every warm-up: cuBLAS keeps a workspace for each stream that it has seen."""
    return torch.cuda.Stream()


@torch.no_grad()
def warm_up(micro_step: Callable[[bool], None], update: Callable[[], None], spoil: Callable[[], None]) -> None:
    """Run a micro-step and an optimizer step that change nothing, to load kernels and allocate workspaces.

    `spoil` makes the gradients not finite between them; by contract, such an optimizer step changes nothing.
    """
    micro_step(True)
    spoil()
    update()


@torch.no_grad()
def capture(
    micro_step: Callable[[bool], None],
    update: Callable[[], None],
    *,
    spoil: Callable[[], None],
    first_differs: bool,
    update_on_cpu: bool,
) -> tuple[Callable[[bool], None], Callable[[], None], torch.cuda.CUDAGraph]:
    """Replays of the micro-step and, if it runs on the device, of the optimizer step; and a graph whose
    memory others can share.

    `spoil`: see `warm_up`. `first_differs`: whether the first micro-step of an optimizer step gets a graph of its own,
    because gradients are streamed and it starts from zeros instead of the running sums.
    """
    side = _side_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm_up(micro_step, update, spoil)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    first = following = torch.cuda.CUDAGraph()
    with torch.cuda.graph(first):
        micro_step(True)
    if first_differs:
        following = torch.cuda.CUDAGraph()
        with torch.cuda.graph(following, pool=first.pool()):
            micro_step(False)

    def replay_micro_step(is_first: bool) -> None:
        (first if is_first else following).replay()

    if update_on_cpu:
        return replay_micro_step, update, first
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, pool=first.pool()):
        update()
    return replay_micro_step, captured.replay, first


@torch.no_grad()
def capture_evaluation(evaluate: Callable[[], None], beside: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """The replay of `evaluate`, which has run before. It shares the memory of `beside`: nothing outlives a replay.

    A forward alone is launched more slowly than a GPU runs it. Where no memory is left, `evaluate` itself is returned.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=beside.pool()):
            evaluate()
    except torch.OutOfMemoryError:
        return evaluate
    return graph.replay
