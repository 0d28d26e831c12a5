"""`pretrain`: the base model, in slices of some minutes that each continue the one before.

The first call measures the speed and writes `pretrain.json`, which sets the number of steps so that the whole training
takes `--total-minutes`. Each call trains for `--minutes` and stops with a checkpoint; the last one exports the model to
`pretrain/model`.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surogate_core.files.metrics import METRICS, read_metrics

MARGIN = 40.0
"""Seconds before the end of a call in which a step ends and a checkpoint is written."""
SET_UP = 60.0
"""Seconds of a call until its first step, as the plan counts them."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--minutes", type=float, default=8.0, help="length of this call")
    parser.add_argument("--total-minutes", type=float, default=40.0, help="length of all calls, for the first one")
    parser.add_argument("--recipe", default="bf16", help="precision recipe, for the first call")
    parser.add_argument("--optimizer", choices=["normuon", "adamw"], default="normuon", help="for the first call")
    parser.add_argument("--rows", type=int, default=32, help="rows of a step, for the first call")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row, for the first call")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs that share the rows of a step, for the first call")
    parser.add_argument("--probe-steps", type=int, default=60, help="steps that measure the speed")
    parser.add_argument("--steps", type=int, help="steps of the training, instead of a measurement")
    parser.add_argument("--begin", type=Path, help="trained model to start from, instead of random weights")


TINY = {"rows": 2, "length": 128, "probe_steps": 4, "total_minutes": 0.05, "steps": 6}
"""Options of a trial on a CPU."""


def run(given: argparse.Namespace) -> None:
    """Train for one slice."""
    began = time.monotonic()
    if not (given.out / "data/manifest.json").is_file():
        raise SystemExit(f"{given.out}/data is missing. Fix: run `data` first.")
    place = given.out / "pretrain.json"
    if not place.is_file():
        plan = planned(given)
        place.write_text(json.dumps(plan, indent=1) + "\n")
    plan = json.loads(place.read_text())
    print(f"plan: {plan['steps']:,} steps of {plan['rows'] * plan['length']:,} tokens, {plan['recipe']}", flush=True)
    keys = {**settings(given.out, plan), "max_steps": plan["steps"], "output_dir": str(given.out / "pretrain")}
    code = train(keys, given.out / "pretrain.yaml", 60 * given.minutes - MARGIN - (time.monotonic() - began))
    print(json.dumps(progress(given.out / "pretrain", plan), indent=1))
    if code not in (0, 128 + signal.SIGTERM):
        raise SystemExit(code)


def settings(out: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the training."""
    data = out / "data"
    found = [data / name for name in ("text.jsonl.gz", "problems.jsonl.gz")]
    held = [data / name for name in ("text-held.jsonl", "problems-held.jsonl")]
    cools = max(1, plan["steps"] // 5)
    return {
        "task": "pt",
        "lora": False,
        "model": plan["begin"] or str(data / "base"),
        "from_scratch": plan["begin"] is None,
        "datasets": [{"path": str(path), "type": "text"} for path in found],
        "validation_datasets": [{"path": str(path), "type": "text"} for path in held],
        "sequence_len": plan["length"],
        "truncation_strategy": "split",
        "per_device_train_batch_size": plan["rows"] // plan["gpus"],
        "gradient_accumulation_steps": 1,
        "gpus": plan["gpus"],
        "zero_level": 0,  # normuon needs whole matrices
        "recipe": plan["recipe"],
        **OPTIMIZERS[plan["optimizer"]],
        "lr_scheduler_type": "wsd",
        "warmup_steps": min(300, max(1, plan["steps"] // 20)),
        "cooldown_steps": cools,
        "weight_decay": 0.1,
        "eval_steps": max(1, plan["steps"] // 16),
        "save_steps": max(1, plan["steps"] // 8),
        "save_total_limit": 2,
        "num_epochs": 1_000_000,
    }


OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "normuon": {"optimizer": {"name": "normuon", "rest_lr_factor": 0.1}, "learning_rate": 0.02},
    "adamw": {"optimizer": {"name": "adamw"}, "adamw_beta2": 0.95, "learning_rate": 1e-3},
}
"""Optimizer → its keys; the rates are those of loss_parity.py."""


def planned(given: argparse.Namespace) -> dict[str, Any]:
    """The plan for `--total-minutes` of training, from the measured speed or from `--steps`."""
    plan = {key: getattr(given, key) for key in ("recipe", "optimizer", "rows", "length", "gpus")}
    if given.rows % given.gpus:
        raise SystemExit(f"--rows {given.rows}: the GPUs cannot share them equally. Fix: a multiple of {given.gpus}.")
    plan["begin"] = None if given.begin is None else str(given.begin)
    if given.steps is not None:
        return {**plan, "steps": given.steps, "tokens_per_second": None}
    probe = given.out / "probe"
    keys = settings(given.out, {**plan, "steps": given.probe_steps})
    keys |= {"max_steps": given.probe_steps, "output_dir": str(probe), "eval_steps": 0, "save_steps": 0}
    code = train({**keys, "resume_from_checkpoint": False}, given.out / "probe.yaml", None)
    if code:
        raise SystemExit(code)
    speed = tokens_per_second(probe)
    calls = max(1.0, given.total_minutes / given.minutes)
    seconds = 60 * given.total_minutes - calls * (SET_UP + MARGIN)
    steps = max(1, int(speed * max(seconds, 1.0) / (given.rows * given.length)))
    print(f"{speed:,.0f} tokens/s: {steps:,} steps fit into {given.total_minutes:g} minutes", flush=True)
    return {**plan, "steps": steps, "tokens_per_second": speed}


def tokens_per_second(run_dir: Path) -> float:
    """The median speed of the second half of a run's steps."""
    speeds = [one["tokens_per_second"] for one in read_metrics(run_dir / METRICS, event="step_end")]
    return statistics.median(speeds[len(speeds) // 2 :])


def progress(run_dir: Path, plan: Mapping[str, Any]) -> dict[str, Any]:
    """How far the training is."""
    metrics = run_dir / METRICS
    there = metrics.is_file()
    steps = read_metrics(metrics, event="step_end") if there else []
    held = read_metrics(metrics, event="eval_end") if there else []
    last = steps[-1] if steps else {}
    return {
        "step": last.get("step", 0),
        "of": plan["steps"],
        "tokens": last.get("total_tokens", 0),
        "loss": last.get("loss"),
        "held_out_loss": held[-1]["loss"] if held else None,
        "tokens_per_second": tokens_per_second(run_dir) if steps else None,
        "model": str(run_dir / "model") if (run_dir / "model").is_dir() else None,
    }


def train(keys: Mapping[str, Any], file: Path, seconds: float | None) -> int:
    """Run `surogate` with the keys in a process of its own; after `seconds` it is asked to stop and save."""
    task = str(keys["task"])
    # JSON is YAML.
    file.write_text(json.dumps({key: value for key, value in keys.items() if key != "task"}, indent=1) + "\n")
    with subprocess.Popen([sys.executable, "-m", "surogate", task, str(file)]) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            return process.wait()
