"""Unpacking the experts of one projection from each weight format, in GB/s, with the shapes of Qwen3-30B-A3B.

    python benchmarks/unpack.py [--out unpack.json]
    python benchmarks/unpack.py --small          # tiny, on a CPU, plain torch

Random weights. `all` is one call for all experts, as in training; `each` is one call for each expert. Bytes are those
that are read and written once. A time is the median of 20 runs; on a GPU of replays of a CUDA graph, of a projection
that is larger than the L2 cache. `equal`: whether both give the same bits.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from surogate_core.bundles import WeightFormat
from surogate_core.engine.planning.weight_formats import ROW_ALIGNMENT

FORMATS = ("nf4", "fp8", "nvfp4")
SHAPES = {"gate_proj": (128, 768, 2048), "down_proj": (128, 2048, 768)}
SMALL = {"gate_proj": (4, 48, 64), "down_proj": (4, 64, 48)}
REPEATS = 20


def seconds(run: Callable[[], None], device: torch.device) -> float:
    """The median time of a run."""
    run()
    if device.type != "cuda":
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        return median(times)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def measure(weight_format: WeightFormat, shape: tuple[int, int, int], device: torch.device) -> dict[str, Any]:
    """Times and rates of one projection."""
    count, outputs, inputs = shape
    nbytes = weight_format.nbytes(outputs, inputs)
    row = -(-nbytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
    packed = torch.zeros(count, row, dtype=torch.uint8, device=device)
    for kept in packed:
        kept[:nbytes] = weight_format.pack(torch.randn(outputs, inputs, device=device).bfloat16())
    rooms = [torch.empty(shape, dtype=torch.bfloat16, device=device) for _ in range(2)]

    def each(room: Tensor) -> None:
        for kept, weight in zip(packed, room, strict=True):
            weight_format.unpack(kept[:nbytes], weight)

    moved = packed.nbytes + rooms[0].nbytes
    runs = {"all": lambda: weight_format.unpack_experts(packed, rooms[0]), "each": lambda: each(rooms[1])}
    times = {name: seconds(run, device) for name, run in runs.items()}
    rates = {f"{name} GB/s": float(f"{moved / taken / 1e9:.3g}") for name, taken in times.items()}
    return {
        **{f"{name} ms": round(1e3 * taken, 4) for name, taken in times.items()},
        **rates,
        "equal": torch.equal(*rooms),
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device("cpu" if arguments.small else "cuda")
    torch.manual_seed(0)
    rows = []
    for name in FORMATS:
        spec = import_module(f"surogate_quant_{name}").surogate_weight_format()
        weight_format = spec.build(spec.options())
        if note := weight_format.note(device):
            print(f"{name}: {note}")
        for projection, shape in (SMALL if arguments.small else SHAPES).items():
            rows.append({"format": name, "projection": projection, **measure(weight_format, shape, device)})
    print("| " + " | ".join(rows[0]) + " |")
    print("| " + " | ".join("---" for _ in rows[0]) + " |")
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
