"""Train the small model well and badly, and keep the curves as test data of surogate-monitor-adaptive.

Writes plugins/surogate-monitor-adaptive/tests/data/: `runs.json`, six runs with one thing wrong or nothing, and
`healthy.json`, the healthy one under 20 other seeds, and `tunings.json`, short trainings of three families, healthy and
unstable: from random weights, of all weights, and with LoRA on the trained result. A curve has, for each step, the
loss, the gradient norm and the learning rate with four digits; tests replay them. Takes about 45 minutes on one core;
bits differ between machines.

    OMP_NUM_THREADS=1 python scripts/record_runs.py [--only NAME …] [--families NAME …] [--seeds 20] [--output DIR]
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from surogate_core.config.resolve import load_run_config, to_dict
from surogate_core.engine.engine import MicroStepInputs
from surogate_core.plugins.registry import load_plugins
from surogate_core.run.job import launch
from surogate_core.train.loop import DivergedError

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

FAMILIES = ("qwen3", "qwen2", "llama")
BASE = ("max_steps=250", "eval_steps=25", "monitor=[jsonl]")
"""The training from random weights, whose result the others start from."""
TUNING = ("lora_rank=8", "max_steps=160", "eval_steps=16", "sequence_len=128", "weight_decay=0.01")
HEALTHY_TUNINGS: dict[str, tuple[str, ...]] = {
    "lora, 1e-3, 8 rows": ("lora=true", "learning_rate=1e-3", "per_device_train_batch_size=8"),
    "lora, 2e-4, 2 rows": ("lora=true", "learning_rate=2e-4", "per_device_train_batch_size=2"),
    "lora, 3e-3, 1 row": ("lora=true", "learning_rate=3e-3", "per_device_train_batch_size=1"),
    "all weights, 3e-4, 4 rows": ("lora=false", "learning_rate=3e-4", "per_device_train_batch_size=4"),
    "all weights, 1e-3, 1 row": ("lora=false", "learning_rate=1e-3", "per_device_train_batch_size=1"),
    "all weights, 2e-3, 2 rows": ("lora=false", "learning_rate=2e-3", "per_device_train_batch_size=2"),
}
"""On the result of each family: 18 runs, and the 3 from random weights."""
FAR_TOO_HIGH = ("lr_scheduler_type=constant", "warmup_steps=0")
UNSTABLE_TUNINGS: dict[str, tuple[str, ...]] = {
    "qwen3, all weights, 0.3": ("lora=false", "learning_rate=0.3", "per_device_train_batch_size=2", *FAR_TOO_HIGH),
    "qwen2, all weights, 0.1": ("lora=false", "learning_rate=0.1", "per_device_train_batch_size=4", *FAR_TOO_HIGH),
    "llama, all weights, 1": ("lora=false", "learning_rate=1", "per_device_train_batch_size=8", *FAR_TOO_HIGH),
    "qwen3, lora, 1": ("lora=true", "learning_rate=1", "per_device_train_batch_size=2", *FAR_TOO_HIGH),
    "llama, lora, 0.2": ("lora=true", "learning_rate=0.2", "per_device_train_batch_size=8", *FAR_TOO_HIGH),
}
"""On the result of the family that the name begins with."""

KEPT_KEYS = ("learning_rate", "warmup_steps", "warmup_ratio", "lr_scheduler_type", "auto_lr_reduction", "max_steps")


@contextmanager
def nan_at(step: int | None) -> Iterator[None]:
    """The `step`-th training micro-batch (one is a step here) gets gradients of NaN."""
    load, count = MicroStepInputs.load, 0

    def poisoned(self: MicroStepInputs, batch: Any, seeds: Any, loss_scale: float, **others: Any) -> None:
        nonlocal count
        if loss_scale:  # an evaluation has none
            count += 1
            loss_scale = math.nan if count == step else loss_scale
        load(self, batch, seeds, loss_scale, **others)

    MicroStepInputs.load = poisoned  # type: ignore[method-assign]
    try:
        yield
    finally:
        MicroStepInputs.load = load  # type: ignore[method-assign]


def record(name: str, overrides: tuple[str, ...], *, place: Path | None = None) -> dict[str, Any]:
    """Run it; its curve. `place` keeps the run's directory."""
    registry = load_plugins()
    with tempfile.TemporaryDirectory() as temporary, nan_at(NAN_STEP if name == "nan_spike" else None):
        directory = str(place or temporary)
        latest = {text.partition("=")[0]: text for text in (*COMMON, *overrides)}
        config = load_run_config([*latest.values(), f"output_dir={directory}"], registry=registry)
        with suppress(DivergedError):  # what it did until then is recorded
            launch(config, registry)
        lines = [json.loads(line) for line in (Path(directory) / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step_end"]
    (start,) = [line for line in lines if line["event"] == "run_start"]
    return {
        "command": " ".join(["surogate", *latest.values()]),
        "config": {"auto_lr_reduction": False} | {k: v for k, v in to_dict(config).items() if k in KEPT_KEYS},
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


def record_tunings(file: Path, families: Sequence[str]) -> None:
    """`tunings.json`: {"healthy": {name: curve}, "unstable": {name: curve}}; runs of other families there are kept."""
    found = json.loads(file.read_text()) if file.is_file() else {"healthy": {}, "unstable": {}}
    with tempfile.TemporaryDirectory() as directory:

        def take(kind: str, name: str, keys: tuple[str, ...], place: Path | None = None) -> None:
            found[kind][name] = record(name, keys, place=place)
            text = json.dumps(found, separators=(",", ":")).replace(directory, "DIR")
            file.write_text(text.replace('},"', '},\n"') + "\n")
            print(name, flush=True)

        for family in families:
            take("healthy", f"{family}, random weights", (*BASE, f"model={family}"), Path(directory) / family)
            base = (*TUNING, f"model={directory}/{family}/model", "dataset=embedded")
            for how, keys in HEALTHY_TUNINGS.items():
                take("healthy", f"{family}, {how}", (*base, *keys))
            for name, keys in UNSTABLE_TUNINGS.items():
                if name.startswith(family):
                    take("unstable", name, (*base, *keys))


def main() -> None:
    """Record what is asked for; what is there of other runs is kept."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", choices=[*RUNS, "seeds", "tunings"], default=[*RUNS, "seeds", "tunings"])
    parser.add_argument("--families", nargs="*", choices=FAMILIES, default=FAMILIES, help="of the tunings")
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
    if "tunings" in options.only:
        record_tunings(options.output / "tunings.json", options.families)
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
