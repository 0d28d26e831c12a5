"""Whole `surogate sft gpus=N` commands for the benchmarks, on random weights and the embedded conversations."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench_ranks import cause

from surogate_core.files.metrics import METRICS, read_metrics

PROGRAM = "import sys; from surogate_core.cli.main import main; sys.exit(main(sys.argv[1:]))"
EMBEDDED = "pkg://surogate_dataset_chat/embedded"
STEPS, SKIPPED = 40, 8
"""Optimizer steps of a timed command, and how many of them warm up."""
CASES: dict[str, tuple[str, ...]] = {
    "0.6B LoRA, command": ("model.preset=0.6b", "lora=true"),
    "8B LoRA, command": ("model.preset=8b", "lora=true"),
    "1.7B full, level 1, command": ("model.preset=1.7b", "lora=false", "optimizer=adamw_8bit", "zero_level=1"),
}


def overrides(directory: Path, *, gpus: int, device: str, steps: int, tiny: bool) -> list[str]:
    """The keys that all commands share."""
    shape = ["model.preset=tiny", "sequence_len=64"] if tiny else ["sequence_len=2048"]
    return [
        "model=qwen3",
        "from_scratch=true",
        f"datasets=[{{path: '{EMBEDDED}/train.jsonl', type: conversation}}]",
        "validation_datasets=[]",
        f"tokenizer='{EMBEDDED}/tokenizer'",
        *shape,
        "per_device_train_batch_size=2",
        "gradient_accumulation_steps=4",
        "warmup_steps=0",
        f"max_steps={steps}",
        "eval_steps=0",
        "save_steps=0",
        "monitor=[jsonl]",
        f"device={device}",
        f"gpus={gpus}",
        f"output_dir={directory / 'run'}",
        f"data_cache_dir={directory / 'data'}",
    ]


def command(*arguments: str) -> list[str]:
    """`surogate sft` with these arguments, by this interpreter."""
    return [sys.executable, "-c", PROGRAM, "sft", *arguments]


def steps_of(directory: Path) -> list[dict[str, Any]]:
    """The steps that the run in this directory has recorded so far."""
    file = directory / "run" / METRICS
    return read_metrics(file, event="step_end") if file.exists() else []


def rate(steps: Sequence[Mapping[str, Any]], skipped: int) -> float:
    """Tokens a second from the record of step `skipped` to the last one's."""
    first, last = steps[skipped - 1], steps[-1]
    tokens: int = last["total_tokens"] - first["total_tokens"]
    return tokens / (last["time"] - first["time"])


def measure(name: str, world: int, options: argparse.Namespace) -> dict[str, Any]:
    """One command's figures as a row of benchmarks/several_gpus.py."""
    row: dict[str, Any] = {"case": name, "world": world}
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        given = overrides(directory, gpus=world, device=options.device, steps=STEPS, tiny=options.tiny)
        keys = [key for key in CASES[name] if not (options.tiny and key.startswith("model.preset"))]
        before = time.time()
        try:
            done = subprocess.run(
                command(*given, *keys), capture_output=True, text=True, timeout=options.limit, check=False
            )
        except subprocess.TimeoutExpired:
            return {**row, "error": f"stopped after {options.limit:.0f} s"}
        after, steps = time.time(), steps_of(directory)
        if done.returncode or len(steps) <= SKIPPED:
            return {**row, "error": cause(done.stderr) or f"exit status {done.returncode}", "log": done.stderr[-3000:]}
    return {
        **row,
        "tokens_per_second": rate(steps, SKIPPED),
        "milliseconds": 1e3 * (steps[-1]["time"] - steps[SKIPPED - 1]["time"]) / (len(steps) - SKIPPED),
        "peak_gib": steps[-1]["peak_memory_bytes"] / 2**30 if options.device == "cuda" else None,
        "setup_seconds": steps[0]["time"] - before,
        "seconds": after - before,
        "losses": [steps[0]["loss"], steps[-1]["loss"]],
    }


def run(
    options: argparse.Namespace, save: Callable[[Path, Sequence[dict[str, Any]], dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Every command in every world. The first run of a command compiles for the others."""
    rows: list[dict[str, Any]] = []
    for name in options.commands or CASES:
        for world in options.worlds:
            row = measure(name, world, options)
            rows.append(row)
            save(options.out, rows, row)
            said = row.get("error") or f"{row['tokens_per_second']:,.0f} tok/s, {row['seconds']:.0f} s in all"
            print(f"{name}, gpus={world}: {said}", file=sys.stderr)
    return rows
