"""How long each optimizer's step takes: milliseconds, ns a parameter, on a GPU bytes a second and Polar Express' rate.

All weights of a Qwen3 shape are trained, in the two flat groups that the engine makes, with random gradients; the step
is the optimizer's alone: no clipping, no copy to bf16. On a GPU it is captured in a CUDA graph, with the packs' kernels
and, as `torch`, without; bytes are those that a single pass would move. On a CPU one matrix has `--values` elements.

    python benchmarks/optimizer_step.py [--models 0.6b 1.7b] [--masters fp32 bf16]
    python benchmarks/optimizer_step.py --device cpu --threads 1 [--values 4194304]
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import surogate_kernels_cuda
import surogate_kernels_triton
import surogate_optimizer_adamw
import surogate_optimizer_adamw_8bit
import surogate_optimizer_normuon
import torch

from surogate_core.bundles import FLAT_ALIGNMENT, Optimizer, OptimizerSpec, ParamGroup
from surogate_core.engine.host_memory import keep_freed_pages
from surogate_core.kernels.registry import KernelTable, using

SPECS: tuple[OptimizerSpec, ...] = (
    surogate_optimizer_adamw.surogate_optimizer(),
    surogate_optimizer_adamw_8bit.surogate_optimizer(),
    surogate_optimizer_normuon.surogate_optimizer(),
)
VOCABULARY, KEY_VALUE = 151936, 8 * 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A dense Qwen3 with a tied head."""

    layers: int
    width: int
    queries: int
    inner: int

    def matrices(self) -> list[tuple[int, int]]:
        """[outputs, inputs] of a layer's products."""
        w, q, i = self.width, self.queries, self.inner
        return [(q, w), (KEY_VALUE, w), (KEY_VALUE, w), (w, q), (i, w), (i, w), (w, i)]

    def polar_flops(self) -> float:
        """Of five steps of three products for every matrix."""
        total = 0.0
        for shape in self.matrices():
            short, long = sorted(shape)
            total += 5 * (2 * 2 * short * short * long + 2 * short**3)
        return total * self.layers


SHAPES = {
    "0.6b": Shape(layers=28, width=1024, queries=2048, inner=3072),
    "1.7b": Shape(layers=28, width=2048, queries=2048, inner=6144),
}


def make_groups(shape: Shape, device: torch.device, dtype: torch.dtype) -> list[ParamGroup]:
    """Matrices in one group, norms in another."""
    decayed: dict[str, tuple[int, ...]] = {"embedding": (VOCABULARY, shape.width)}
    undecayed: dict[str, tuple[int, ...]] = {}
    for layer in range(shape.layers):
        decayed |= {f"{layer}.{number}": each for number, each in enumerate(shape.matrices())}
        norms = (shape.width, shape.width, 128, 128)
        undecayed |= {f"{layer}.norm.{number}": (n,) for number, n in enumerate(norms)}
    seed = None if dtype == torch.float32 else torch.zeros((), dtype=torch.int32, device=device)
    groups = []
    for number, members in enumerate((decayed, undecayed)):
        shapes, size = {}, 0
        for name, each in members.items():
            shapes[name] = (size, each)
            size += -(-math.prod(each) // FLAT_ALIGNMENT) * FLAT_ALIGNMENT
        groups.append(
            ParamGroup(
                name=f"group{number}",
                master=torch.randn(size, device=device).mul_(0.02).to(dtype),
                grad=torch.randn(size, device=device).mul_(1e-3),
                shapes=shapes,
                weight_decay=0.1 if number == 0 else 0.0,
                hidden=frozenset(members) - {"embedding"} if number == 0 else frozenset(),
                seed=seed,
                number=number,
            )
        )
    return groups


def stepper(optimizer: Optimizer, device: torch.device) -> Callable[[], None]:
    """A step without arguments."""
    lr, clip, skip = (torch.tensor(value, device=device) for value in (1e-4, 0.5, 0.0))
    return lambda: optimizer.step(lr=lr, clip=clip, skip=skip)


def on_gpu(step: Callable[[], None], repeats: int) -> float:
    """Milliseconds of a replayed step: the median."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for number in range(repeats + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        if number >= 2:
            times.append(start.elapsed_time(stop))
    return sorted(times)[len(times) // 2]


def measure_gpu(name: str, dtype: torch.dtype, repeats: int) -> None:
    """A line for each optimizer and kind of kernels."""
    device, shape = torch.device("cuda"), SHAPES[name]
    packs = [surogate_kernels_triton.surogate_kernel_pack(), surogate_kernels_cuda.surogate_kernel_pack()]
    groups = make_groups(shape, device, dtype)
    count = sum(g.master.numel() for g in groups)
    for spec in SPECS:
        for label, table in (("packs", KernelTable.build(device, packs)), ("torch", KernelTable(device=device))):
            if label == "torch" and spec.name == "adamw":
                continue
            optimizer = spec.build(groups, spec.options())
            state = sum(t.nbytes for t in optimizer.state().values())
            with using(table):
                ms = on_gpu(stepper(optimizer, device), repeats)
            moved = count * (4 + 2 * dtype.itemsize) + 2 * state
            line = f"{name} {str(dtype).removeprefix('torch.'):8} {spec.name:10} {label}: {ms:8.2f} ms, "
            line += f"{1e6 * ms / count:.4f} ns a parameter of {count / 1e6:.0f}M, {moved / ms / 1e9:.2f} TB/s"
            if spec.name == "normuon":
                flops = shape.polar_flops()
                line += f", polar {flops / 1e12:.1f} TFLOP, so {flops / ms / 1e9:.0f} TFLOP/s at least"
            print(line, dict(sorted(table.chosen.items())) if table.chosen else "", flush=True)
            del optimizer
            torch.cuda.empty_cache()


def measure_cpu(values: int, dtype: torch.dtype, repeats: int) -> None:
    """A line for `adamw` and `adamw_8bit`: the shortest of the repeats; of one thread its CPU time."""
    keep_freed_pages()  # as the engine does
    device = torch.device("cpu")
    seed = None if dtype == torch.float32 else torch.zeros((), dtype=torch.int32)
    for spec in SPECS[:2]:
        group = ParamGroup(
            name="w",
            master=torch.randn(values).to(dtype),
            grad=torch.randn(values),
            shapes={"w": (0, (values,))},
            weight_decay=0.1,
            seed=seed,
        )
        step = stepper(spec.build([group], spec.options()), device)
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        times = []
        for _ in range(repeats + 2):
            begun = clock()
            step()
            times.append(clock() - begun)
        print(
            f"cpu {str(dtype).removeprefix('torch.'):8} {spec.name:10} {torch.get_num_threads()} threads: "
            f"{1e3 * min(times):.2f} ms, {1e9 * min(times) / values:.2f} ns a parameter of {values / 1e6:.2f}M"
        )


def main() -> None:
    """Print all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--masters", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--values", type=int, default=1 << 22)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    for masters in arguments.masters:
        dtype = torch.float32 if masters == "fp32" else torch.bfloat16
        if arguments.device == "cpu":
            torch.set_num_threads(arguments.threads)
            measure_cpu(arguments.values, dtype, arguments.repeats)
        for model in arguments.models if arguments.device == "cuda" else ():
            measure_gpu(model, dtype, arguments.repeats)


if __name__ == "__main__":
    main()
