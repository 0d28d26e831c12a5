"""Our training step on one GPU: tokens a second, share of the GEMM ceiling, peak memory, set-up time.

Published Qwen3 and Qwen3-MoE shapes with random weights (shapes.py); LoRA r=16 or full fine-tuning;
2 rows of 2048 tokens a micro-step, 4 micro-steps an optimizer step. Times are CUDA events around
whole optimizer steps, the median is reported. The ceiling is a bf16 product of 8192³ in the same
process. Peak memory is that of training: random weights are drawn in fp32, which loaded ones are not.

    python benchmarks/gpu_lora.py 0.6b [--recipe fp8-hybrid] [--base nf4] [--documents lognormal] [--dropout 0.05]
                                  [--full] [--recompute] [--optimizer adamw_8bit] [--offload residuals]
                                  [--packs triton] [--any-order] [--profile] [--json FILE]

Shape suffixes: N tokens of a micro-batch, S document borders.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import bench
import numpy as np
import torch
from presets import PRESETS
from shapes import Weights, model_of
from waits import Span, waits

from surogate_core.batch import IGNORE_LABEL, MicroBatch
from surogate_core.bundles import (
    TensorKind,
)
from surogate_core.dsl.sides import Form, RouterLosses
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.engine import Engine
from surogate_core.engine.planning.assembly import Assembly, EngineSettings
from surogate_core.kernels.registry import KernelTable
from surogate_core.mesh.axes import Axes
from surogate_core.train.flops import ModelFlops, gemm_flops_per_second

ROWS, LENGTH, MICRO_STEPS, RANK, WARM_UP = 2, 2048, 4, 16, 3
RECIPES, OPTIMIZERS = ("bf16", "fp8-hybrid", "nvfp4"), ("adamw", "adamw_8bit")
BASES = ("bf16", "nf4", "fp8", "nvfp4", "mxfp4")
TARGETS = {"all": ("all",), "attention": ("q_proj", "k_proj", "v_proj", "o_proj")}
DOCUMENTS = {"row": 0.0, "lognormal": 400.0, "tiny": 40.0}
"""Mean length of documents; those of `row` fill one."""
SIGMA = 0.8
"""The standard deviation of the logarithm of a length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One configuration's figures."""

    preset: str
    setting: dict[str, Any]
    device: str
    gemm_tflops: float
    tokens_per_second: float
    milliseconds: float
    """Median of an optimizer step."""
    milliseconds_all: list[float]
    gflop_per_token: float
    speed_of_light: float
    """Share of the time that the counted FLOPs would need at the GEMM's rate."""
    peak_gib: float
    """Most that torch had allocated in a step."""
    reserved_gib: float
    """GiB that torch's allocator reserved on the device."""
    device_gib: float
    """GiB used on the device, as nvidia-smi shows them, CUDA's own included."""
    frozen_gib: float
    """GiB of frozen weights as stored: projections, embedding, head and norms."""
    projections_gib: float
    """The projections among them."""
    setup_seconds: float
    losses: list[float]
    kernels: dict[str, str]
    profile: dict[str, Any] | None


def lengths_of_row(documents: str, random: np.random.Generator) -> list[int]:
    """The lengths of a row's documents; they fill it."""
    if documents == "row":
        return [LENGTH]
    found: list[int] = []
    mean = np.log(DOCUMENTS[documents]) - SIGMA**2 / 2
    while (rest := LENGTH - sum(found)) > 0:
        found.append(min(rest, max(8, int(random.lognormal(mean, SIGMA)))))
    return found


def borders_of(documents: str) -> int:
    """Document borders for which a micro-batch has room."""
    return ROWS + 1 if documents == "row" else 64 if documents == "lognormal" else 64 + ROWS * LENGTH // 16


def make_batches(documents: str, vocab: int, borders: int) -> list[MicroBatch]:
    """The micro-batches of one optimizer step; random tokens, every token but a document's last is a label."""
    random = np.random.default_rng(0)
    batches = []
    for _ in range(MICRO_STEPS):
        lengths = [n for _ in range(ROWS) for n in lengths_of_row(documents, random)]
        stops = np.cumsum([0, *lengths])
        ids = torch.from_numpy(random.integers(0, vocab, ROWS * LENGTH))
        labels = torch.roll(ids, -1)
        labels[torch.from_numpy(stops[1:] - 1)] = IGNORE_LABEL
        padded = [*stops.tolist(), *[ROWS * LENGTH] * (borders - len(stops))]
        batches.append(
            MicroBatch(
                input_ids=ids,
                labels=labels,
                positions=torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths]),
                cu_seqlens=torch.tensor(padded, dtype=torch.int32),
                max_seqlen=LENGTH,
                tokens=ROWS * LENGTH,
                label_tokens=ROWS * LENGTH - len(lengths),
            )
        )
    return batches


def make_assembly(options: argparse.Namespace, device: torch.device, borders: int) -> Assembly:
    """The parts of the engine that a training run would make."""
    form = options.router_losses
    settings = EngineSettings(
        router_losses=RouterLosses() if form is None else RouterLosses(aux=0.001, z=0.001, form=form),
        axes=Axes(micro_batches=MICRO_STEPS),
        device=device,
        dtype=torch.bfloat16,
        compiler="inductor" if device.type == "cuda" else "fx",
        cuda_graphs=device.type == "cuda" and not options.no_graphs,
        tokens=ROWS * LENGTH,
        borders=borders,
        max_seqlen=LENGTH,
        head_chunks=options.head_chunks or (1 if options.full else 4),
        recompute=Recompute(block=options.recompute, regions=frozenset(options.regions), budget=options.budget),
    )
    return bench.assemble(
        model_of(options.preset, layers=options.layers),
        settings,
        recipe=options.recipe,
        optimizer=options.optimizer,
        offload=frozenset(options.offload),
        offload_experts=options.offload_experts,
        kernels=KernelTable.build(device, bench.packs(options.packs), deterministic=not options.any_order),
        lora=None if options.full else bench.adapters(RANK, dropout=options.dropout, targets=TARGETS[options.targets]),
        weight_format=None if options.base == "bf16" else options.base,
    )


def make_engine(options: argparse.Namespace, device: torch.device, borders: int) -> Engine:
    """The engine that a training run would make, with random weights."""
    return engine_of(make_assembly(options, device, borders))


def engine_of(assembly: Assembly) -> Engine:
    """An engine with random weights."""
    return Engine(assembly, Weights(seed=0, std=0.02, device=assembly.settings.device), progress=forget_the_set_up)


def forget_the_set_up(task: str, done: int, total: int) -> None:
    """Peaks are counted from the first step on, which is that before graphs are captured."""
    if torch.cuda.is_initialized() and done == 0:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def frozen_gib(engine: Engine, *roles: str) -> float:
    """Bytes of frozen weights of these roles as stored; of all roles without an argument."""
    kept = [s for s in engine.parameters.specs.values() if not s.trainable and (s.role in roles or not roles)]
    return sum(map(engine.parameters.kept_bytes, kept)) / 2**30


def device_gib() -> float:
    """Bytes used on the device, by all processes."""
    free, there = torch.cuda.mem_get_info()
    return (there - free) / 2**30


def gflop_per_token(preset: str, batches: list[MicroBatch], *, full: bool, layers: int = 0) -> float:
    """FLOPs that a step cannot do without, by the accounting of the training loop's own SOL."""
    work = ModelFlops.of(model_of(preset, layers=layers), frozen=not full)
    return work.step(batches) / sum(b.tokens for b in batches) / 1e9


def gemm_tflops(device: torch.device) -> float:
    """Rate of a bf16 product of 8192³ on random values."""
    return gemm_flops_per_second(device, torch.bfloat16) / 1e12


def timed(function: Callable[[], Any], count: int) -> list[float]:
    """Milliseconds of each call, by events."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        function()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


KINDS = (
    ("inductor", ("triton_",)),
    ("adapters", ("down", "up_backward", "dropped_dx")),
    ("attention", ("attention", "flash", "fmha")),
    ("scans", ("scan_", "delta_", "convolve")),
    ("quantising", ("quantise", "begin")),
    ("products", ("gemm", "nvjet", "cutlass", "splitk", "scaled_product")),
    ("copies", ("memcpy", "memset")),
    ("unpacking", ("unpack",)),
)
"""Kind of kernel → parts of names; the first that matches counts."""


def profile(step: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Kernel time by name and by kind, the share of the time in which no kernel ran, and where computation waits."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    by_name: dict[str, list[float]] = defaultdict(list)
    spans: list[Span] = []
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            by_name[event.name].append(event.time_range.elapsed_us())
            spans.append((event.name, event.time_range.start, event.time_range.end))
    spans.sort(key=lambda span: span[1])
    busy, began = 0.0, spans[0][1]
    reached = began
    for _, start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    kinds: dict[str, float] = defaultdict(float)
    for name, times in by_name.items():
        kind = next((k for k, parts in KINDS if any(p in name.lower() for p in parts)), "other")
        kinds[kind] += sum(times) / steps / 1e3
    order = sorted(by_name.items(), key=lambda item: -sum(item[1]))
    return {
        "idle": 1 - busy / (reached - began),
        "waits": waits(spans, steps),
        "milliseconds_by_kind": {k: round(v, 3) for k, v in sorted(kinds.items(), key=lambda item: -item[1])},
        "launches": sum(map(len, by_name.values())) // steps,
        "kernels": [
            {"name": name, "milliseconds": round(sum(t) / steps / 1e3, 3), "calls": len(t) / steps} for name, t in order
        ],
    }


def measure(options: argparse.Namespace, turn: Callable[[], None] = lambda: None) -> Result:
    """Build the engine, wait for this process' `turn`, warm the engine up, time it."""
    device = torch.device("cuda", torch.cuda.current_device())
    borders = max(borders_of(options.documents), options.borders)
    batches = make_batches(options.documents, PRESETS[options.preset]["vocab_size"], borders)
    started = time.perf_counter()
    engine = make_engine(options, device, batches[0].cu_seqlens.numel())
    number, losses = 0, []

    def step() -> None:
        nonlocal number
        result = engine.train_step(batches, step=number, lr=1e-4)
        number += 1
        losses.append(result)

    step()
    torch.cuda.synchronize()
    setup = time.perf_counter() - started
    torch.cuda.empty_cache()
    turn()
    # The product is none of a step's memory.
    peak = torch.cuda.max_memory_allocated()
    gemm = gemm_tflops(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP - 1):
        step()
    times = timed(step, options.steps)
    milliseconds = statistics.median(times)
    tokens = MICRO_STEPS * ROWS * LENGTH
    work = gflop_per_token(options.preset, batches, full=options.full, layers=options.layers)
    peak = max(peak, torch.cuda.max_memory_allocated())
    return Result(
        preset=options.preset,
        setting={k: v for k, v in vars(options).items() if k not in ("json", "preset", "steps")},
        device=torch.cuda.get_device_name(device),
        gemm_tflops=gemm,
        tokens_per_second=tokens / milliseconds * 1e3,
        milliseconds=milliseconds,
        milliseconds_all=times,
        gflop_per_token=work,
        speed_of_light=work * tokens / gemm / milliseconds,
        peak_gib=peak / 2**30,
        frozen_gib=frozen_gib(engine),
        projections_gib=frozen_gib(engine, "weight"),
        setup_seconds=setup,
        losses=[r.read()[0] for r in losses],
        reserved_gib=torch.cuda.max_memory_reserved() / 2**30,
        device_gib=device_gib(),
        kernels={op: name for (op, _), name in engine.programs.kernels.chosen.items()},
        profile=profile(step, 2) if options.profile else None,
    )


def make_parser() -> argparse.ArgumentParser:
    """The options of one configuration."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("preset", choices=list(PRESETS))
    parser.add_argument("--layers", type=int, default=0, help="fewer than the shape has")
    parser.add_argument("--targets", choices=list(TARGETS), default="all", help="the adapted projections")
    parser.add_argument("--recipe", choices=RECIPES, default="bf16")
    parser.add_argument("--documents", choices=list(DOCUMENTS), default="row", help="one a row, or mean 400, or 40")
    parser.add_argument("--borders", type=int, default=0, help="at least this many document borders a micro-batch")
    parser.add_argument("--dropout", type=float, default=0.0, help="of the adapters' inputs")
    parser.add_argument("--full", action="store_true", help="train all weights")
    parser.add_argument("--router-losses", choices=get_args(Form), help="both, with the balance over what")
    parser.add_argument("--base", choices=BASES, default="bf16", help="of frozen weights")
    parser.add_argument("--recompute", action="store_true", help="keep only the inputs of blocks")
    parser.add_argument("--regions", nargs="*", default=[], help="recompute these regions alone, such as swiglu")
    parser.add_argument("--budget", type=float, default=1.0, help="share of the residuals that is kept")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--offload", nargs="*", choices=get_args(TensorKind), default=[], help="to host memory")
    parser.add_argument("--offload-experts", action="store_true", help="frozen experts to host memory")
    parser.add_argument("--packs", nargs="*", choices=list(bench.PACKS), default=list(bench.PACKS))
    parser.add_argument("--any-order", action="store_true", help="allow kernels that do not repeat bit for bit")
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--head-chunks", type=int, help="pieces of the logits; 4, or 1 with --full")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="kernel times by kind and name")
    parser.add_argument("--json", type=Path)
    return parser


def main() -> None:
    """Measure one configuration, print it, write it."""
    options = make_parser().parse_args()
    result = measure(options)
    setting = " ".join(f"{k}={v}" for k, v in result.setting.items() if v and k != "profile")
    print(f"{result.preset} {setting}: {result.device}, GEMM {result.gemm_tflops:.0f} TFLOP/s")
    print(
        f"  {result.tokens_per_second:,.0f} tok/s  {result.milliseconds:.1f} ms a step  "
        f"SOL {result.speed_of_light:.1%}  peak {result.peak_gib:.2f} GiB, reserved {result.reserved_gib:.2f}, "
        f"device {result.device_gib:.2f}  "
        f"frozen {result.frozen_gib:.2f} GiB, projections {result.projections_gib:.2f}  "
        f"set-up {result.setup_seconds:.1f} s  "
        f"loss {result.losses[0]:.4f} … {result.losses[-1]:.4f}  {result.kernels}"
    )
    if result.profile:
        print(f"  idle {result.profile['idle']:.1%}, {result.profile['launches']} launches a step")
        for kind, value in result.profile["milliseconds_by_kind"].items():
            print(f"  {value:9.2f} ms  {kind}")
        for kernel in result.profile["kernels"][:45]:
            print(f"  {kernel['milliseconds']:9.2f} ms {kernel['calls']:7.0f} ×  {kernel['name'][:110]}")
    if options.json:
        fields = {name: getattr(result, name) for name in Result.__slots__}
        options.json.write_text(json.dumps(fields, indent=1))


if __name__ == "__main__":
    main()
