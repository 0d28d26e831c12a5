"""What `recompute_budget` costs and saves: tokens a second and peak memory for several budgets.

The engines of `gpu_lora.py` (Qwen3's shapes, random weights, LoRA r=16, 2 rows of 2048 tokens, 4 micro-steps a step),
a process each. They compile side by side, and are then timed one after the other, alone on the GPU. Time is by CUDA
events around whole optimizer steps, of which the median is reported; memory is the peak that torch allocated.

    python benchmarks/recompute_budget.py [1.7b] [--budgets 0 0.25 0.5 0.75 1] [--steps 6] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import gpu_lora
import torch

WARM_UP = 3


def one(preset: str, budget: float, steps: int) -> None:
    """Compile and warm up, say so, wait for a line, measure, print JSON."""
    device = torch.device("cuda", torch.cuda.current_device())
    options = gpu_lora.make_parser().parse_args([preset, "--budget", str(budget)])
    batches = gpu_lora.make_batches("row", gpu_lora.PRESETS[preset]["vocab_size"], gpu_lora.ROWS + 1)
    engine = gpu_lora.make_engine(options, device, gpu_lora.ROWS + 1)
    losses: list[Any] = []

    def step() -> None:
        losses.append(engine.train_step(batches, step=len(losses), lr=1e-4))

    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    gpu_lora.timed(step, 2)  # the clock rises again
    milliseconds = statistics.median(gpu_lora.timed(step, steps))
    tokens = gpu_lora.MICRO_STEPS * gpu_lora.ROWS * gpu_lora.LENGTH
    found = {
        "budget": budget,
        "tokens_per_second": tokens / milliseconds * 1e3,
        "milliseconds": milliseconds,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "losses": [loss.read()[0] for loss in losses],
    }
    print(json.dumps(found), flush=True)


def answer(process: subprocess.Popen[str]) -> str:
    """The next line that a process prints; empty at its end."""
    stream: IO[str] | None = process.stdout
    assert stream is not None
    return stream.readline().strip()


def main() -> None:
    """Print a line a budget."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("preset", nargs="?", default="1.7b", choices=list(gpu_lora.PRESETS))
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.0, 0.25, 0.5, 0.75, 1.0])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--wait", action="store_true", help="for a line of input before timing: other work may end")
    parser.add_argument("--one", type=float, help="this budget in this process")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.one is not None:
        one(options.preset, options.one, options.steps)
        return
    words = [sys.executable, __file__, options.preset, "--steps", str(options.steps), "--one"]
    processes = {
        budget: subprocess.Popen([*words, str(budget)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for budget in options.budgets
    }
    ready = [budget for budget, process in processes.items() if answer(process) == "ready"]
    if options.wait:
        sys.stdin.readline()
    found = []
    for budget in ready:
        out, _ = processes[budget].communicate("\n")
        result = json.loads(out.splitlines()[-1])
        found.append(result)
        print(
            f"{options.preset} budget {budget:g}: {result['tokens_per_second']:,.0f} tok/s, "
            f"{result['milliseconds']:.1f} ms a step, peak {result['peak_gib']:.2f} GiB, "
            f"losses {' '.join(f'{loss:.6f}' for loss in result['losses'][:4])}",
            flush=True,
        )
    if len(ready) < len(processes):
        print("failed:", *sorted(processes.keys() - ready))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
