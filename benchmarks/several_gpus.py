"""Training on 1, 2 and 4 GPUs of one machine: tokens a second, efficiency, memory beside `plan`'s, spread over ranks.

    python benchmarks/several_gpus.py [--worlds 1 2] [--only NAME …] [--repeats 1] [--steps 8] [--profile]
    python benchmarks/several_gpus.py --commands          # whole `surogate sft gpus=N` runs instead
    python benchmarks/several_gpus.py --device cpu --tiny  # without a GPU: the script itself

Published Qwen3 shapes with random weights, 2 rows of 2048 random tokens a micro-batch. Unless its name says otherwise
a case has the same number of tokens per GPU and step in every world; "M = 64" has 64 micro-batches per step in every
world. Efficiency is tok/s on N GPUs ÷ (N × tok/s on one). A step takes as long as its slowest rank, by CUDA events; the
figure is the median of the steps. Spread is (slowest − fastest) ÷ fastest of the ranks' medians. Every world of a case
runs directly after the one before, as a group of processes of its own, which starts while the one before is measured.
Compiled programs are kept between groups. Results are written as JSON lines after every group.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import bench_command
import bench_ranks
import bench_world
import gpu_lora
import plan_memory
import torch
from bench_world import Training

from surogate_core.engine.planning.prediction import predict
from surogate_core.engine.update import StepResult
from surogate_core.mesh.mesh import Mesh

NAME = "several_gpus"
"""Name of the files in `--out`, without suffix."""
GIB = ("peak_gib", "predicted_gib", "reserved_gib", "device_gib")
"""Figures of a rank's memory; a row has the largest of its ranks."""
WARM_UP = 3
"""Steps before the clock starts, unless `--warm-up` says otherwise."""

LORA = Training()
FULL = Training(preset="8b", lora=False, optimizer="adamw_8bit", master="bfloat16", zero_level=1, accumulation=1)
LONG = replace(
    LORA, preset="8b", rows=1, micro_batches=1, shared_rows=True, recompute=True, head_chunks=16, offload=("residuals",)
)
SPARSE = replace(LORA, preset="moe-30b-a3b", rows=8, accumulation=1, recompute=True, head_chunks=8)
SPARSE_FULL = replace(FULL, preset="moe-30b-a3b", layers=6, recompute=True, rows=4)
BALANCE = 1.05
"""Loads of ranks above this multiple of the mean are evened out: two ranks have 1.3 with 30 % on experts of one."""
HOT = replace(SPARSE, shared_experts=True, routes="hot")
HOT_FULL = replace(SPARSE_FULL, shared_experts=True, routes="hot")
CASES: dict[str, Training] = {
    "0.6B LoRA bf16": LORA,
    "0.6B LoRA fp8": replace(LORA, recipe="fp8-hybrid"),
    "8B LoRA bf16": replace(LORA, preset="8b"),
    "8B LoRA fp8": replace(LORA, preset="8b", recipe="fp8-hybrid"),
    "8B full, level 1, accumulation 4": replace(FULL, accumulation=4),
    "8B full, level 1, accumulation 1": FULL,
    "8B full, level 2, accumulation 4": replace(FULL, zero_level=2, accumulation=4),
    "8B full, level 2, accumulation 1": replace(FULL, zero_level=2),
    "8B full, level 3, accumulation 4": replace(FULL, zero_level=3, accumulation=4),
    "8B full, level 3, accumulation 1": replace(FULL, zero_level=3),
    "4B full, level 0, accumulation 4": replace(FULL, preset="4b", zero_level=0, accumulation=4),
    "4B full, level 1, accumulation 4": replace(FULL, preset="4b", accumulation=4),
    "4B full, level 1, weights shared out, accumulation 4": replace(
        FULL, preset="4b", shard_weights=True, accumulation=4
    ),
    "4B full, level 1, accumulation 1": replace(FULL, preset="4b"),
    "4B full, level 3, accumulation 1": replace(FULL, preset="4b", zero_level=3),
    "4B full, level 2, accumulation 4": replace(FULL, preset="4b", zero_level=2, accumulation=4),
    "4B full, level 3, accumulation 4": replace(FULL, preset="4b", zero_level=3, accumulation=4),
    **{
        f"{size.upper()} full fp8, level {level}, accumulation 4": replace(
            FULL, preset=size, recipe="fp8-hybrid", zero_level=level, accumulation=4
        )
        for size in ("4b", "8b")
        for level in (1, 3)
    },
    "4B full, level 3, accumulation 4, no graphs": replace(
        FULL, preset="4b", zero_level=3, accumulation=4, graphs=False
    ),
    "4B full, level 3, 4 rows, accumulation 4": replace(FULL, preset="4b", zero_level=3, accumulation=4, rows=4),
    "4B full, level 1, exact, accumulation 4": replace(FULL, preset="4b", exact=True, accumulation=4),
    "0.6B LoRA bf16, M = 64": replace(LORA, micro_batches=64),
    "4B full, level 1, M = 64": replace(FULL, preset="4b", micro_batches=64),
    "0.6B LoRA bf16, accumulation 1": replace(LORA, accumulation=1),
    "8B LoRA bf16, base sharded": replace(LORA, preset="8b", shard_weights=True),
    "8B QLoRA nf4, base sharded": replace(LORA, preset="8b", base="nf4", shard_weights=True),
    "32B LoRA bf16, base sharded": replace(
        LORA, preset="32b", shard_weights=True, accumulation=1, recompute=True, head_chunks=8
    ),
    "8B full, level 3, fp32 AdamW and masters": replace(
        FULL, zero_level=3, optimizer="adamw", master="float32", recompute=True
    ),
    "0.6B LoRA fp32, 4 layers, shared rows of 5 documents": replace(
        LORA, layers=4, rows=5, length=768, micro_batches=2, shared_rows=True, fp32=True
    ),
    "0.6B full fp32, 4 layers, shared rows of 5 documents": replace(
        LORA, lora=False, layers=4, rows=5, length=768, micro_batches=2, shared_rows=True, fp32=True
    ),
    "8B LoRA bf16, shared rows of 32k": replace(LONG, length=2**15),
    "8B LoRA bf16, shared rows of 32k, 16 documents": replace(LONG, rows=16),
    "8B LoRA bf16, shared rows of 128k": replace(LONG, length=2**17),
    "30B-A3B LoRA bf16": SPARSE,
    "30B-A3B LoRA bf16, experts shared out": replace(SPARSE, shared_experts=True),
    "30B-A3B LoRA bf16, experts shared out, rows sent": replace(SPARSE, shared_experts=True, expert_rows=True),
    "30B-A3B LoRA bf16, experts shared out, Zipf, evened out": replace(
        SPARSE, shared_experts=True, expert_balance=BALANCE
    ),
    "30B-A3B LoRA bf16, experts shared out, even routes": replace(SPARSE, shared_experts=True, routes="even"),
    "30B-A3B LoRA bf16, experts shared out, 30 % on four experts": HOT,
    "30B-A3B LoRA bf16, experts shared out, 30 % on four experts, evened out": replace(HOT, expert_balance=BALANCE),
    "30B-A3B QLoRA nf4, experts shared out, 30 % on four experts": replace(HOT, base="nf4"),
    "30B-A3B QLoRA nf4, experts shared out, 30 % on four experts, evened out": replace(
        HOT, base="nf4", expert_balance=BALANCE
    ),
    "30B-A3B QLoRA nf4, experts shared out": replace(SPARSE, base="nf4", shared_experts=True),
    "30B-A3B full, 6 layers, level 1": SPARSE_FULL,
    "30B-A3B full, 6 layers, level 1, experts shared out": replace(SPARSE_FULL, shared_experts=True),
    "30B-A3B full, 6 layers, level 1, experts shared out, 30 % on four experts": HOT_FULL,
    "30B-A3B full, 6 layers, level 1, experts shared out, 30 % on four experts, evened out": replace(
        HOT_FULL, expert_balance=BALANCE
    ),
    "30B-A3B full, 6 layers, level 3": replace(SPARSE_FULL, zero_level=3),
    "30B-A3B full, level 1, experts shared out": replace(SPARSE_FULL, layers=0, rows=8, shared_experts=True),
    "30B-A3B full, level 3": replace(SPARSE_FULL, layers=0, rows=8, zero_level=3),
    "235B-A22B QLoRA nf4, experts shared out": replace(
        SPARSE, preset="moe-235b-a22b", base="nf4", rows=4, shared_experts=True
    ),
    "8B LoRA bf16, shared rows of 288k, no graphs": replace(LONG, length=9 * 2**15, graphs=False),
}
LEAST_WORLD = {
    "8B full, level 3, fp32 AdamW and masters": 2,
    "30B-A3B full, level 1, experts shared out": 4,
    "30B-A3B full, level 3": 4,
    "235B-A22B QLoRA nf4, experts shared out": 2,
}
"""Case → fewest GPUs whose memory it fits; the others fit one."""


# ------------------------------------------------------------------------------------- a rank


def measure(work: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Build the engine of this rank, warm it up, time its steps."""
    training = Training.of(work["training"])
    cuda = work["device"] == "cuda"
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    started = time.perf_counter()
    assembly = bench_world.assembly_of(training, mesh.world, device)
    predicted = plan_memory.in_torch(predict(assembly)) if cuda else None
    engine = bench_world.engine_of(assembly, mesh, routes=training.routes)
    batches = bench_world.step_batches(training, mesh)
    results: list[StepResult] = []
    figures: list[tuple[float, float]] = []

    def step() -> None:
        results.append(engine.train_step(batches, step=len(results), lr=1e-4))
        if not figures:
            figures.append(results[0].read())

    for _ in range(work["warm_up"]):
        step()
    setup = time.perf_counter() - started
    mesh.gather("warm")
    times = gpu_lora.timed(step, work["steps"]) if cuda else bench_world.cpu_times(step, work["steps"])
    figures.append(results[-1].read())
    loads = bench_world.loads_of_ranks(results[-1], mesh.world, training.total(mesh.world))
    profile = gpu_lora.profile(step, 2) if work["profile"] else None
    return {
        "profile": profile,
        "loads": loads,
        "milliseconds_all": times,
        "setup_seconds": setup,
        "losses": [loss for loss, _ in figures],
        "gradient_norms": [norm for _, norm in figures],
        "gpu": torch.cuda.get_device_name(device) if cuda else "cpu",
        "peak_gib": (torch.cuda.max_memory_allocated() + mesh.memory) / 2**30 if cuda else None,
        "predicted_gib": None if predicted is None else predicted / 2**30,
        "reserved_gib": torch.cuda.memory_reserved() / 2**30 if cuda else None,
        "device_gib": gpu_lora.device_gib() if cuda else None,
    }


# ------------------------------------------------------------------------------------ a table


def row_of(name: str, training: Training, world: int, result: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a case in one world, from its ranks'."""
    row: dict[str, Any] = {"case": name, "world": world, "training": asdict(training)}
    if "error" in result:
        return {**row, **result}
    ranks = result["ranks"]
    steps = [max(times) for times in zip(*(rank["milliseconds_all"] for rank in ranks), strict=True)]
    medians = [statistics.median(rank["milliseconds_all"]) for rank in ranks]
    milliseconds = statistics.median(steps)
    return {
        **row,
        "gpu": ranks[0]["gpu"],
        "tokens_per_second": training.tokens(world) / milliseconds * 1e3,
        "milliseconds": milliseconds,
        "milliseconds_all": [rank["milliseconds_all"] for rank in ranks],
        "spread": (max(medians) - min(medians)) / min(medians),
        "setup_seconds": max(rank["setup_seconds"] for rank in ranks),
        "losses": ranks[0]["losses"],
        "gradient_norms": ranks[0]["gradient_norms"],
        "profile": ranks[0]["profile"],
        "loads": ranks[0].get("loads"),
        **{key: _largest(rank[key] for rank in ranks) for key in GIB},
    }


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def with_efficiency(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their share of N times the case's rate on one GPU: the mean of its repeats."""
    alone: dict[str, list[float]] = {}
    for row in rows:
        if row["world"] == 1 and "error" not in row:
            alone.setdefault(row["case"], []).append(row["tokens_per_second"])
    found = []
    for row in rows:
        one = alone.get(row["case"])
        share = row["tokens_per_second"] / (row["world"] * statistics.mean(one)) if one and "error" not in row else None
        found.append({**row, "efficiency": share})
    return found


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table."""
    heads = ["case", "GPUs", "tok/s", "efficiency", "ms a step", "spread", "GiB", "planned", "in use", "set-up"]
    heads += ["loss first … last"]
    text = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
    for row in with_efficiency(rows):
        cells = [row["case"], str(row["world"])]
        if "error" in row:
            cells += ["failed: " + row["error"].replace("|", "\\|"), *[""] * 8]
        else:
            several = row["world"] > 1
            peak, planned, used = row.get("peak_gib"), row.get("predicted_gib"), row.get("device_gib")
            losses = row.get("losses") or [float("nan")]
            cells += [
                f"{row['tokens_per_second']:,.0f}",
                f"{row['efficiency']:.1%}" if several and row["efficiency"] is not None else "",
                f"{row['milliseconds']:.1f}",
                f"{row['spread']:.2%}" if several and row.get("spread") is not None else "",
                "" if peak is None else f"{peak:.2f}",
                "" if peak is None or planned is None else f"{planned:.2f} ({planned / peak - 1:+.1%})",
                "" if used is None else f"{used:.1f}",
                f"{row['setup_seconds']:.0f} s",
                f"{losses[0]:.4f} … {losses[-1]:.4f}",
            ]
        text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text) + "\n"


# -------------------------------------------------------------------------------------- a run


def lines(options: argparse.Namespace) -> list[tuple[str, Training, int]]:
    """(name, what is trained, ranks) of every group of processes, in order."""
    found = []
    for name in options.only or CASES:
        training = CASES[name].tiny() if options.tiny else CASES[name]
        for _ in range(options.repeats):
            worlds = [n for n in options.worlds if n >= LEAST_WORLD.get(name, 1)]
            found += [(name, training, world) for world in worlds]
    return found


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every case in every world. The next group starts, without a GPU, while one is measured."""
    wanted, rows = lines(options), []
    until = time.monotonic() + options.budget

    def begin(number: int) -> bench_ranks.Group:
        _, training, world = wanted[number]
        work = {"training": asdict(training), "steps": options.steps, "device": options.device}
        work |= {"profile": options.profile, "warm_up": options.warm_up}
        # The same number of threads in every world, as far as the cores go.
        threads = max(1, (os.cpu_count() or 1) // (2 * max(options.worlds)))
        return bench_ranks.begin(work, world, script=__file__, cache=options.cache, threads=threads)

    following: bench_ranks.Group | None = None
    try:
        for number, (name, training, world) in enumerate(wanted):
            group, following = following or begin(number), None
            left = until - time.monotonic()
            if left < 10:
                group.kill()
                break
            before = time.monotonic()
            group.go()
            following = begin(number + 1) if number + 1 < len(wanted) else None
            row = row_of(name, training, world, group.wait(min(options.limit, left)))
            rows.append(row)
            save(options.out, rows, row)
            said = row.get("error") or f"{row['tokens_per_second']:,.0f} tok/s"
            took = time.monotonic() - before
            print(f"[{number + 1}/{len(wanted)}] {name}, gpus={world}: {said} ({took:.0f} s)", file=sys.stderr)
    finally:
        if following is not None:
            following.kill()
    return rows


def save(out: Path, rows: Sequence[Mapping[str, Any]], last: Mapping[str, Any], *, name: str = NAME) -> None:
    """Add a JSON line, and write the table again."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"{name}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(last) + "\n")
    (out / f"{name}.md").write_text(markdown(rows), encoding="utf-8")


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=[], metavar="NAME", help="these cases")
    parser.add_argument("--repeats", type=int, default=1, help="times that each case goes through all worlds")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a group")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="steps of a group before them, which also compile")
    parser.add_argument("--limit", type=float, default=150, help="seconds that a group may take")
    parser.add_argument("--budget", type=float, default=560, help="seconds that the run may take")
    parser.add_argument("--cache", type=Path, help="directory of compiled programs; each library's own without it")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument(
        "--commands",
        nargs="*",
        choices=list(bench_command.CASES),
        metavar="NAME",
        help="these whole commands, or all of them, with gpus=N instead of the cases",
    )
    parser.add_argument("--profile", action="store_true", help="kernel times of a step of rank 0, in the JSON lines")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script itself")
    parser.add_argument("--list", action="store_true", help="print the cases' names")
    return parser


def main() -> None:
    """Print the table; or be one rank of a group."""
    if bench_ranks.is_rank():
        bench_ranks.run_rank(measure, prepare=lambda work: bench_world.import_all(work["device"]))
    options = make_parser().parse_args()
    if options.list:
        print("\n".join([*CASES, *bench_command.CASES]))
        return
    rows = run(options) if options.commands is None else bench_command.run(options, save)
    print(markdown(rows))
    sys.exit(any("error" in row for row in rows))


if __name__ == "__main__":
    main()
