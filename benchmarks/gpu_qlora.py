"""LoRA over quantised bases on one GPU, ours and transformers + bitsandbytes: one run, one table.

    python benchmarks/gpu_qlora.py [--only bf16 nf4 "nf4, lean" …] [--steps 4] [--out DIR]

Published Qwen3 shapes with random weights, LoRA r=16 on all projections, 2 rows of 2048 tokens a micro-step, 4
micro-steps an optimizer step (gpu_lora.py). One process takes the lines in turn; each one's peak is counted anew. A
line that fails costs only itself, and the files are written after each. bitsandbytes is not a requirement of Surogate.
"""

from __future__ import annotations

import argparse
import gc
import json
import shlex
import statistics
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import gpu_lora
import peers
import torch
from surogate_model_qwen3.presets import PRESETS

LEAN = "--recompute --optimizer adamw_8bit --offload residuals optimizer master --head-chunks 8"
OURS = {
    "bf16": "8b",
    "nf4": "8b --base nf4",
    "fp8": "8b --base fp8",
    "nvfp4": "8b --base nvfp4",
    "bf16, recompute": "8b --recompute",
    "nf4, recompute": "8b --base nf4 --recompute",
    "nf4, lean": f"8b --base nf4 {LEAN}",
    "nf4, 32b": "32b --base nf4",
}
"""Line → options of gpu_lora.py."""
PEERS = {"bitsandbytes": ("nf4", False), "bitsandbytes, checkpointing": ("nf4, lean", True)}
"""Line → (ours that it is compared with, whether it checkpoints its blocks)."""
LIKE = {"nf4": "bf16", "fp8": "bf16", "nvfp4": "bf16", "nf4, recompute": "bf16, recompute"}
"""Line → ours in bf16 that it is compared with."""


def ours(name: str, steps: int) -> dict[str, Any]:
    """Measure one of our lines."""
    options = gpu_lora.make_parser().parse_args([*shlex.split(OURS[name]), "--steps", str(steps)])
    result = gpu_lora.measure(options)
    return {field: getattr(result, field) for field in gpu_lora.Result.__slots__}


def peer(name: str, steps: int) -> dict[str, Any]:
    """Measure bitsandbytes."""
    preset, device = "8b", torch.device("cuda", torch.cuda.current_device())
    batches = gpu_lora.make_batches("row", PRESETS[preset]["vocab_size"], gpu_lora.ROWS + 1)
    work = peers.Work(
        preset=preset,
        config=PRESETS[preset],
        full=False,
        recompute=PEERS[name][1],
        rank=gpu_lora.RANK,
        scale=2.0,
        rows=gpu_lora.ROWS,
        attention="sdpa",
        device=device,
        batches=batches,
    )
    started = time.perf_counter()
    side = peers.build_peer("bitsandbytes", work)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses = [side.step()]
    torch.cuda.synchronize()
    setup = time.perf_counter() - started
    losses += [side.step() for _ in range(gpu_lora.WARM_UP - 1)]
    times = gpu_lora.timed(lambda: losses.append(side.step()), steps)
    milliseconds = statistics.median(times)
    return {
        "device": torch.cuda.get_device_name(device),
        "tokens_per_second": sum(b.tokens for b in batches) / milliseconds * 1e3,
        "milliseconds": milliseconds,
        "milliseconds_all": times,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "device_gib": gpu_lora.device_gib(),
        "setup_seconds": setup,
        "losses": [read() for read in losses],
        **side.facts,
    }


def line(name: str, steps: int) -> dict[str, Any]:
    """A line's figures, or ``{"error": …}``; what it allocated is given back."""
    try:
        return (ours if name in OURS else peer)(name, steps)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    finally:
        gc.collect()
        torch.cuda.empty_cache()
        left = torch.cuda.memory_allocated() / 2**30
        if left > 0.1:
            print(f"{name}: {left:.2f} GiB are still allocated, and in the peaks of what follows", file=sys.stderr)


def markdown(found: dict[str, dict[str, Any]]) -> str:
    """The table."""
    heads = ["line", "tok/s", "÷ bf16", "ours ÷ this", "ms a step", "peak", "reserved", "device", "frozen at rest"]
    heads += ["of them projections", "÷ bf16", "loss first … last"]
    text = ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]

    def ratio(a: str | None, b: str | None, field: str) -> str:
        first, second = (found.get(n or "", {}).get(field) for n in (a, b))
        return f"{first / second:.3f}" if first and second else ""

    for name, row in found.items():
        if "tokens_per_second" not in row:
            text.append(f"| {name} | failed: {row.get('error', 'no GPU')} |" + " |" * (len(heads) - 2))
            continue
        sizes = (row[key] for key in ("peak_gib", "reserved_gib", "device_gib", "frozen_gib"))
        cells = [
            name,
            f"{row['tokens_per_second']:,.0f}",
            ratio(name, LIKE.get(name), "tokens_per_second"),
            ratio(PEERS.get(name, (None,))[0], name, "tokens_per_second"),
            f"{row['milliseconds']:.1f}",
            *(f"{size:.2f} GiB" for size in sizes),
            f"{row['projections_gib']:.2f} GiB",
            ratio(name, LIKE.get(name), "projections_gib"),
            f"{row['losses'][0]:.3f} … {row['losses'][-1]:.3f}",
        ]
        text.append("| " + " | ".join(cells) + " |")
    return "\n".join(text) + "\n"


def versions() -> str:
    """Of what the lines run on."""
    found = []
    for name in ("torch", "triton", "transformers", "peft", "bitsandbytes"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def main() -> None:
    """Run the lines; the files are written after each."""
    names = [*OURS, *PEERS]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="LINE", help="; ".join(names))
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a line")
    parser.add_argument("--warm-up", type=int, default=gpu_lora.WARM_UP, help="steps before them")
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    gpu_lora.WARM_UP = options.warm_up
    found: dict[str, dict[str, Any]] = {}
    options.out.mkdir(parents=True, exist_ok=True)
    print(versions())
    for name in options.only:
        before = time.perf_counter()
        found[name] = line(name, options.steps)
        Path(options.out, "gpu_qlora.json").write_text(json.dumps(found, indent=1, default=str), encoding="utf-8")
        text = markdown(found)
        Path(options.out, "gpu_qlora.md").write_text(text, encoding="utf-8")
        took = time.perf_counter() - before
        print("\n".join(text.splitlines()[:2] if len(found) == 1 else []), text.splitlines()[-1], sep="\n", flush=True)
        print(f"{name}: {took:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
