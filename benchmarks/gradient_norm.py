"""The norm of a flat group: milliseconds, and its relative error against float64, beside torch's own in one call.

`engine` is what a step takes (`surogate_core.kernels.optimizing.norms.long_norm`); `vector_norm` is torch's over the
whole group, `foreach` torch's of a list, as of sums that are streamed to the host, and `runs` what a CPU takes, on the
device. On a GPU each is captured in a CUDA graph and timed by events over `--repeats` replays; on a CPU the ways take
turns and the fastest call counts.

    python benchmarks/gradient_norm.py [--device cuda] [--values 1000000007 66000000] [--threads 1]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from surogate_core.kernels.optimizing.norms import RUN, long_norm


def runs(x: Tensor) -> Tensor:
    """Runs in fp32, their norms in float64; the values past the last whole run are left out."""
    found = torch.linalg.vector_norm(x[: len(x) // RUN * RUN].view(-1, RUN), dim=-1).double()
    return torch.linalg.vector_norm(found).float()


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "vector_norm": torch.linalg.vector_norm,
    "engine": long_norm,
    "foreach": lambda x: torch._foreach_norm([x])[0],
    "runs": runs,
}


def on_gpu(x: Tensor, way: Callable[[Tensor], Tensor], repeats: int) -> tuple[float, float]:
    """(milliseconds of a replay, result)."""
    way(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = way(x)
    graph.replay()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        graph.replay()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / repeats, found.item()


def on_cpu(x: Tensor, repeats: int) -> dict[str, tuple[float, float]]:
    """(milliseconds of the fastest call, result) of each way."""
    best = dict.fromkeys(WAYS, (math.inf, 0.0))
    for _ in range(repeats):
        for name, way in WAYS.items():
            start = time.perf_counter()
            found = way(x).item()
            best[name] = (min(best[name][0], 1e3 * (time.perf_counter() - start)), found)
    return best


def main() -> None:
    """Print a table for each number of values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--values", type=int, nargs="+", default=[66_000_000, 300_000_001, 1_000_000_007])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, help="of the CPU")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    kinds: dict[str, Callable[[Tensor], object]] = {
        "normal": lambda x: x.normal_(generator=torch.Generator(x.device).manual_seed(0)),
        "equal": lambda x: x.fill_(0.1234567),
    }
    print("| values | kind | way | ms | relative error |\n| --- | --- | --- | --- | --- |")
    for count in arguments.values:
        x = torch.empty(count, device=arguments.device)
        for kind, fill in kinds.items():
            fill(x)
            exact = math.sqrt(math.fsum(part.double().square().sum().item() for part in x.split(1 << 22)))
            if x.device.type == "cuda":
                found = {name: on_gpu(x, way, arguments.repeats) for name, way in WAYS.items()}
            else:
                found = on_cpu(x, arguments.repeats)
            for name, (ms, value) in found.items():
                print(f"| {count:,} | {kind} | {name} | {ms:.3f} | {value / exact - 1:+.1e} |", flush=True)
        del x


if __name__ == "__main__":
    main()
