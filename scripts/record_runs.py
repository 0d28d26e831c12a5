"""Train the small model well and badly, and keep the curves as test data of surogate-monitor-adaptive.

Writes plugins/surogate-monitor-adaptive/tests/data/: `runs.json`, six runs with one thing wrong or nothing, and
`healthy.json`, the healthy one under 20 other seeds. A curve has, for each step, the loss, the gradient norm and the
learning rate with four digits; tests replay them. Takes about half an hour on one core; bits differ between machines.

    OMP_NUM_THREADS=1 python scripts/record_runs.py [--only NAME …] [--seeds 20] [--output DIR]
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surogate_core.config.resolve import load_run_config
from surogate_core.engine.engine import Inputs
from surogate_core.plugins.registry import load_plugins
from surogate_core.run.job import launch

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "plugins" / "surogate-monitor-adaptive" / "tests" / "data"

COMMON = (
    "sequence_len=128",
    "per_device_train_batch_size=8",
    "gradient_accumulation_steps=1",
    "save_steps=0",
    "eval_steps=50",
    "monitor=[jsonl]",
    "device=cpu",
    "optimizer=adamw",
)
HEALTHY = ("max_steps=400",)
RUNS: dict[str, tuple[str, ...]] = {
    "healthy": HEALTHY,
    "lr_too_high": ("max_steps=450", "learning_rate=0.4", "lr_scheduler_type=constant", "warmup_steps=150"),
    "warmup_too_short": ("max_steps=250", "learning_rate=1", "warmup_steps=5"),
    "plateau": (
        "max_steps=600",
        "lora=true",
        "lora_rank=1",
        "lora_target_modules=[k_proj]",  # next to nothing can be learnt with it
        "learning_rate=1e-2",
        "lr_scheduler_type=linear",
    ),
    "divergence": ("max_steps=300", "learning_rate=1", "lr_scheduler_type=constant", "warmup_steps=300"),
    "nan_spike": ("max_steps=400", "monitor=[jsonl,adaptive]", "auto_lr_reduction=true"),
}
NAN_STEP = 250
"""The step of `nan_spike` whose gradients are not numbers: its loss is scaled by NaN."""

KEPT_KEYS = ("learning_rate", "warmup_steps", "warmup_ratio", "lr_scheduler_type", "auto_lr_reduction", "max_steps")


@contextmanager
def nan_at(step: int | None) -> Iterator[None]:
    """The `step`-th training micro-batch (one is a step here) gets gradients of NaN."""
    load, count = Inputs.load, 0

    def poisoned(self: Inputs, batch: Any, seeds: Any, loss_scale: float) -> None:
        nonlocal count
        if loss_scale:  # an evaluation has none
            count += 1
            loss_scale = math.nan if count == step else loss_scale
        load(self, batch, seeds, loss_scale)

    Inputs.load = poisoned  # type: ignore[method-assign]
    try:
        yield
    finally:
        Inputs.load = load  # type: ignore[method-assign]


def record(name: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    """Run it; its curve."""
    registry = load_plugins()
    with tempfile.TemporaryDirectory() as directory, nan_at(NAN_STEP if name == "nan_spike" else None):
        latest = {text.partition("=")[0]: text for text in (*COMMON, *overrides)}
        config = load_run_config([*latest.values(), f"output_dir={directory}"], registry=registry)
        launch(config, registry)
        lines = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step_end"]
    (start,) = [line for line in lines if line["event"] == "run_start"]
    return {
        "command": " ".join(["surogate", *latest.values()]),
        "config": {key: getattr(config, key) for key in KEPT_KEYS},
        "start": {key: start[key] for key in ("parameters", "train_tokens", "steps", "epochs", "tokens_per_step")},
        **{key: [_short(line[key]) for line in steps] for key in ("loss", "grad_norm", "lr")},
        "held_out": [[line["step"], _short(line["loss"])] for line in lines if line["event"] == "eval_end"],
    }


def _short(value: float | str) -> float | str:
    return value if isinstance(value, str) else float(f"{value:.4g}")


def write(path: Path, runs: dict[str, Any]) -> None:
    """One run a line."""
    rows = [f"{json.dumps(name)}: {json.dumps(run, separators=(',', ':'))}" for name, run in runs.items()]
    path.write_text("{\n" + ",\n".join(rows) + "\n}\n")


def main() -> None:
    """Record what is asked for; what is there of other runs is kept."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=[*RUNS, "seeds"], default=[*RUNS, "seeds"])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=DATA)
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    file = options.output / "runs.json"
    found = json.loads(file.read_text()) if file.is_file() else {}
    for name in [n for n in RUNS if n in options.only]:
        found[name] = record(name, RUNS[name])
        write(file, found)
        print(name)
    if "seeds" not in options.only:
        return
    seeds_file = options.output / "healthy.json"
    seeds: dict[str, Any] = json.loads(seeds_file.read_text()) if seeds_file.is_file() else {}
    for seed in range(len(seeds), options.seeds):
        curve = record("healthy", (*HEALTHY, f"train_seed={seed}"))
        if seed:  # The rate is the same in all.
            del curve["lr"]
        seeds[str(seed)] = curve
        write(seeds_file, seeds)
        print(f"seed {seed}")


if __name__ == "__main__":
    main()
