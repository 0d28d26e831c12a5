"""The time of one call of a kernel, and how far two results are apart."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

Run = Callable[[], Sequence[Tensor]]


def gpu_ms(run: Run, repeats: int) -> float:
    """The median of replays of a CUDA graph, each after the L2 cache was overwritten."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(repeats + 2):
        flush.zero_()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
        if sum(times) > 2000:
            break
    del kept
    return median(times[2:] or times)


def cpu_ms(run: Run, repeats: int) -> float:
    """The shortest of the repeats."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return 1e3 * min(times)


def relative(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest relative error of the tensors, in the Euclidean norm."""
    return max(
        float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
        for a, b in zip(found, expected, strict=True)
    )
