"""CUDA graphs of the micro-step, of the optimizer step, and of forwards of evaluation and generation."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Lock

import torch

_ONE = Lock()
"""torch allows one capture at a time in a process, and a generation ahead captures in a thread of its own."""


@cache
def _streams_of(device: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The streams of all warm-ups and of all captures on a device: cuBLAS keeps a workspace for each stream that it has
    seen. torch's stream for captures belongs to the device of the first of them, whatever device is captured later.
    """
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _side_stream() -> torch.cuda.Stream:
    return _streams_of(torch.cuda.current_device())[0]


_MODE = "thread_local"
"""NCCL's watchdog is a thread that asks about its events during a capture."""
Kind = tuple[bool, bool, bool]
"""(first, last, fresh) of a micro-step, as `MicroStep.train` takes them; equal where the work is equal."""


@contextmanager
def _recorded(graph: torch.cuda.CUDAGraph, beside: torch.cuda.CUDAGraph | None) -> Iterator[None]:
    """Inside, work goes into the graph. `beside`: as in `capture_forward`.

    The collector rests: what it frees, such as the graphs of an engine that is gone, may be what no capture allows.
    """
    pool = None if beside is None else beside.pool()
    stream = _streams_of(torch.cuda.current_device())[1]
    with _ONE, torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=_MODE):
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()


@torch.no_grad()
def warm_up(
    micro_step: Callable[[bool, bool, bool], None],
    update: Callable[[], None],
    spoil: Callable[[], None],
    forwards: Sequence[Callable[[], None]] = (),
    others: Sequence[Kind] = (),
) -> None:
    """Run a micro-step and an optimizer step that change nothing, to load kernels and allocate workspaces.

    `spoil` makes the gradients not finite between them; by contract, such an optimizer step changes nothing.
    `forwards`: others that are captured later. They run here, where memory is not yet shared out to graphs.
    `others`: kinds of micro-step with kernels of their own, which no capture can load.
    """
    micro_step(True, True, True)
    for kind in others:
        micro_step(*kind)
    for forward in forwards:
        forward()
    spoil()
    update()


@torch.no_grad()
def capture(
    micro_step: Callable[[bool, bool, bool], None],
    update: Callable[[], None],
    *,
    spoil: Callable[[], None],
    kinds: Sequence[Kind],
    update_on_cpu: bool,
    forwards: Sequence[Callable[[], None]] = (),
    others: Sequence[Kind] = (),
) -> tuple[Mapping[Kind, Callable[[], None]], Callable[[], None], torch.cuda.CUDAGraph]:
    """Replays of the micro-step by kind and, if it runs on the device, of the optimizer step; and a graph whose
    memory others can share.

    `spoil`, `forwards`, `others`: see `warm_up`.
    """
    side = _side_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm_up(micro_step, update, spoil, forwards, others)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    graphs: dict[Kind, torch.cuda.CUDAGraph] = {}
    for kind in kinds:
        beside = next(iter(graphs.values()), None)
        graphs[kind] = torch.cuda.CUDAGraph()
        with _recorded(graphs[kind], beside):
            micro_step(*kind)
    first = graphs[kinds[0]]
    replays = {kind: graph.replay for kind, graph in graphs.items()}
    if update_on_cpu:
        return replays, update, first
    captured = torch.cuda.CUDAGraph()
    with _recorded(captured, first):
        update()
    return replays, captured.replay, first


@torch.no_grad()
def capture_evaluation(evaluate: Callable[[], None], beside: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """The replay of `evaluate`, which has run before. It shares the memory of `beside`: nothing outlives a replay.

    A forward alone is launched more slowly than a GPU runs it. Where no memory is left, `evaluate` itself is returned.
    """
    graph = torch.cuda.CUDAGraph()
    try:
        with _recorded(graph, beside):
            evaluate()
    except torch.OutOfMemoryError:
        return evaluate
    return graph.replay


@torch.no_grad()
def capture_forward(
    forward: Callable[[], None], *, warm_up: Callable[[], None], beside: torch.cuda.CUDAGraph | None
) -> torch.cuda.CUDAGraph:
    """The graph of a forward whose results are in buffers of its own; `warm_up` runs the same work first.

    `beside`: a graph that never runs at the same time and whose memory this one shares.
    """
    side = _side_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        warm_up()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with _recorded(graph, beside):
        forward()
    return graph
