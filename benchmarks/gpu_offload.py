"""Full fine-tuning with tensors off the GPU: memory, tokens a second, and how much of the copying is hidden.

Published Qwen3 shapes with random weights, `recompute`, CUDA graphs. A step of each accumulation is timed by the
wall clock after the capture's own steps have warmed everything up; the time of its optimizer step apart. What
the bus could do at best is measured in the same process with pinned memory, both directions at once.

    python benchmarks/gpu_offload.py 8b --place cpu_training --optimizer adamw --rows 8 --accumulation 4 32
    python benchmarks/gpu_offload.py 8b --place optimizer --optimizer adamw_8bit --rows 8 --accumulation 4

Floors of a step: the same computation with all on the device (`--floor-milliseconds` of a micro-step, measured
by another run of this), and the bytes over the bus in the busier direction at the measured rate.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import bench
import torch
from surogate_model_qwen3.model import build
from surogate_model_qwen3.presets import PRESETS

from surogate_core.batch import MicroBatch
from surogate_core.bundles import TensorKind
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.engine import Engine
from surogate_core.engine.planning.assembly import EngineSettings
from surogate_core.engine.planning.pieces import RandomSource
from surogate_core.kernels.registry import KernelTable

GIB = 2**30
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CPU_TRAINING: tuple[TensorKind, ...] = ("weights", "master", "gradients")
PLACES: dict[str, tuple[TensorKind, ...]] = {
    "device": (),
    "optimizer": ("optimizer",),
    "gradients": ("gradients",),
    "cpu_training": CPU_TRAINING,
    "all by the GPU": (*CPU_TRAINING, "optimizer"),
}
"""Name → the kinds that live on the host. With `cpu_training` the optimizer's state is the CPU's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One optimizer step."""

    accumulation: int
    seconds: float
    update_seconds: float
    tokens_per_second: float
    device_floor: float | None
    """Seconds of its micro-steps with all on the device."""
    bus_floor: float
    """Seconds of its bytes in the busier direction."""
    share_of_floor: float
    """The slower floor over the time of the step."""
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Overlap of kernels and copies during two micro-steps, in seconds, from the profiler."""

    wall: float
    computing: float
    copying: float
    hidden: float
    """Copying while a kernel ran."""
    in_gb: float
    """GB that were copied to the device."""
    out_gb: float
    in_seconds: float
    """Time in which a copy to the device ran."""
    out_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One configuration's figures."""

    setting: dict[str, Any]
    device: str
    tokens: int
    """Of a micro-step."""
    parameters: int
    peak_gib: float
    """Torch's peak, set-up and capture included."""
    reserved_gib: float
    used_gib: float
    """GiB used on the whole GPU at the end, with CUDA's context."""
    host_gib: float
    """Largest resident set of the process."""
    setup_seconds: float
    bus_gb_s: dict[str, float]
    micro_step_seconds: float
    micro_step_gb: dict[str, float]
    """Over the bus in a micro-step but a step's first, by direction."""
    steps: list[Step]
    overlap: Overlap | None


def batch(tokens: int, length: int, vocabulary: int, seed: int) -> MicroBatch:
    """Random tokens, one document a row."""
    ids = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(seed))
    return MicroBatch(
        input_ids=ids,
        labels=torch.roll(ids, -1),
        positions=torch.arange(length, dtype=torch.int32).repeat(tokens // length),
        cu_seqlens=torch.tensor([*range(0, tokens + 1, length)], dtype=torch.int32),
        max_seqlen=length,
        tokens=tokens,
        label_tokens=tokens,
    )


def make_engine(options: argparse.Namespace, device: torch.device) -> Engine:
    """The engine that a training run would make."""
    config = dict(PRESETS[options.preset])
    if options.layers:
        config["num_hidden_layers"] = options.layers
    started = time.perf_counter()

    def progress(task: str, done: int, total: int) -> None:
        if done in (0, total):
            print(f"{time.perf_counter() - started:6.1f} s  {task} {done} of {total}", flush=True)

    cuda = device.type == "cuda"
    settings = EngineSettings(
        device=device,
        dtype=torch.bfloat16,
        compiler="inductor" if cuda else "fx",
        cuda_graphs=cuda and not options.no_graphs,
        tokens=options.rows * options.length,
        borders=options.rows + 1,
        max_seqlen=options.length,
        head_chunks=options.head_chunks,
        recompute=Recompute(block=True),
        master_dtype=DTYPES[options.master],
        update_on_cpu=options.place == "cpu_training",
    )
    assembly = bench.assemble(
        build(config),
        settings,
        optimizer=options.optimizer,
        offload=frozenset(PLACES[options.place]),
        kernels=KernelTable.build(device, bench.packs(options.packs)),
    )
    return Engine(assembly, RandomSource(seed=0, std=0.02, device=device), progress=progress)


def bus_rates(device: torch.device) -> dict[str, float]:
    """GB/s of copies between pinned memory and the device: each way alone, and each way with the other."""
    size = GIB // 4
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def timed(*directions: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(3):
            for i in directions:
                with torch.cuda.stream(streams[i]):
                    target, source = (there[i], host[i]) if i == 0 else (host[i], there[i])
                    target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        return 3 * size / (time.perf_counter() - started) / 1e9

    timed(0, 1)
    found = {"in": timed(0), "out": timed(1), "each at once": timed(0, 1)}
    return {name: round(rate, 1) for name, rate in found.items()}


def bus_bytes(engine: Engine, *, first: bool) -> dict[str, float]:
    """GB over the bus in a micro-step by direction, of weights and sums that the schedule moves."""
    parameters = engine.parameters
    sizes: dict[str | None, dict[str, int]] = {"weights": {}, "gradients": {}}
    streamed = parameters.placement.streams_trained(masters=parameters.master_dtype == parameters.dtype)
    for piece in parameters.pieces:
        elements = sum(prod(s.shape) for s in piece.specs)
        sizes["weights"][piece.key] = elements * parameters.dtype.itemsize if streamed else 0
        sizes["gradients"][piece.key] = elements * 4 if engine.stores.streams_gradients else 0
    moved = {"in": 0, "out": 0}
    for action in engine.step.training:
        if action.verb == "fetch" and action.kind in sizes and not (first and action.kind == "gradients"):
            moved["in"] += sizes[action.kind][action.key]
        elif action.verb == "release" and action.kind == "gradients":
            moved["out"] += sizes["gradients"][action.key]
    return {way: nbytes / 1e9 for way, nbytes in moved.items()}


def _length(spans: list[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def overlap(run: Callable[[], Any], in_gb: float, out_gb: float) -> Overlap:
    """Profile a run whose bytes over the bus are known."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    spans: dict[str, list[tuple[float, float]]] = {"in": [], "out": [], "kernel": []}
    for event in found.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        span = event.time_range.start / 1e6, event.time_range.end / 1e6
        name = event.name.lower()
        if "memcpy" in name:
            way = "in" if "htod" in name else "out" if "dtoh" in name else "kernel"
            spans[way].append(span)
        else:
            spans["kernel"].append(span)
    copies = spans["in"] + spans["out"]
    everything = copies + spans["kernel"]
    computing, copying, wall = _length(spans["kernel"]), _length(copies), _length(everything)
    return Overlap(
        wall=max(e for _, e in everything) - min(s for s, _ in everything),
        computing=computing,
        copying=copying,
        hidden=computing + copying - wall,
        in_gb=in_gb,
        out_gb=out_gb,
        in_seconds=_length(spans["in"]),
        out_seconds=_length(spans["out"]),
    )


def measure(options: argparse.Namespace) -> Result:
    """Build the engine, time a step of each accumulation."""
    device = torch.device("cuda", torch.cuda.current_device())
    rates = bus_rates(device)
    torch.cuda.empty_cache()
    if options.limit_gib:
        torch.cuda.set_per_process_memory_fraction(
            options.limit_gib * GIB / torch.cuda.get_device_properties(device).total_memory
        )
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    engine = make_engine(options, device)
    torch.cuda.synchronize()
    setup = time.perf_counter() - started
    print(f"set-up {setup:.1f} s", flush=True)
    tokens = options.rows * options.length
    if options.wait:
        sys.stdin.readline()
    vocabulary = PRESETS[options.preset]["vocab_size"]
    batches = [batch(tokens, options.length, vocabulary, seed) for seed in range(4)]
    later, first = bus_bytes(engine, first=False), bus_bytes(engine, first=True)
    at_once = rates["each at once"] if engine.stores.streams_gradients else rates["in"]
    floors = {
        accumulation: max((first[w] + (accumulation - 1) * later[w]) / at_once for w in ("in", "out"))
        for accumulation in options.accumulation
    }
    steps = _timed_steps(engine, options, batches, floors)
    profile = None
    if options.profile:
        two = {way: first[way] + later[way] for way in first}
        profile = overlap(
            lambda: engine._accumulate(batches[:2], step=9, loss_weight=2 * tokens), two["in"], two["out"]
        )
    free, total = torch.cuda.mem_get_info()
    return Result(
        setting={k: v for k, v in vars(options).items() if k not in ("json",)},
        device=torch.cuda.get_device_name(device),
        tokens=tokens,
        parameters=engine.parameters.counts()[0],
        peak_gib=torch.cuda.max_memory_allocated() / GIB,
        reserved_gib=torch.cuda.max_memory_reserved() / GIB,
        used_gib=(total - free) / GIB,
        host_gib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        setup_seconds=setup,
        bus_gb_s=rates,
        micro_step_seconds=(steps[-1].seconds - steps[-1].update_seconds) / steps[-1].accumulation,
        micro_step_gb=later,
        steps=steps,
        overlap=profile,
    )


def _timed_steps(
    engine: Engine, options: argparse.Namespace, batches: Sequence[MicroBatch], bus_floors: Mapping[int, float]
) -> list[Step]:
    """A step of each accumulation; `bus_floors`: seconds that its bytes take on the bus."""
    tokens = options.rows * options.length
    steps: list[Step] = []
    for number, accumulation in enumerate(options.accumulation):
        chosen = [batches[i % len(batches)] for i in range(accumulation)]
        torch.cuda.synchronize()
        began = time.perf_counter()
        engine._accumulate(chosen, step=number, loss_weight=tokens * accumulation)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        loss, _ = engine.train_step([], step=number, lr=1e-5).read()
        torch.cuda.synchronize()
        ended = time.perf_counter()
        device_floor = accumulation * options.floor_milliseconds / 1e3 if options.floor_milliseconds else None
        bus = bus_floors[accumulation]
        found = Step(
            accumulation=accumulation,
            seconds=ended - began,
            update_seconds=ended - middle,
            tokens_per_second=accumulation * tokens / (ended - began),
            device_floor=device_floor,
            bus_floor=bus,
            share_of_floor=max(device_floor or 0.0, bus) / (ended - began),
            loss=loss / (tokens * accumulation),
        )
        steps.append(found)
        print(found, flush=True)
    return steps


def main() -> None:
    """Measure one configuration, print it, write it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("preset", choices=list(PRESETS))
    parser.add_argument("--layers", type=int, default=0, help="of the shape; 0 is all")
    parser.add_argument("--place", choices=list(PLACES), default="cpu_training")
    parser.add_argument("--optimizer", choices=["adamw", "adamw_8bit"], default="adamw")
    parser.add_argument("--master", choices=list(DTYPES), default="bf16")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--head-chunks", type=int, default=8)
    parser.add_argument("--accumulation", type=int, nargs="+", default=[4])
    parser.add_argument("--packs", nargs="*", default=["cuda", "hopper", "triton"])
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--limit-gib", type=float, default=0.0, help="let torch take no more of the GPU")
    parser.add_argument("--floor-milliseconds", type=float, default=0.0, help="of a micro-step, all on the device")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--wait", action="store_true", help="for a line of input before timing: other work may end")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = measure(options)
    text = json.dumps(asdict(result), indent=1)
    print(text)
    if options.json:
        options.json.write_text(text)


if __name__ == "__main__":
    main()
