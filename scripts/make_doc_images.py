"""Make docs/images/: curves of auto_lr_reduction and early_stop, and what the console looks like.

Trains four small runs on the CPU (a few minutes). `make_screens.py` makes the pictures of report and live page.

    OMP_NUM_THREADS=1 python scripts/make_doc_images.py [--keep DIR]
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surogate_commands.curves import Curve
from surogate_commands.picture import stacked
from surogate_core import events
from surogate_core.config.resolve import load_run_config
from surogate_core.files.records import RunRecord, read_run
from surogate_core.plugins.registry import load_plugins
from surogate_core.run.job import launch

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"

GUARD = (
    "learning_rate=2",
    "warmup_steps=150",
    "lr_scheduler_type=constant",
    "max_steps=300",
    "sequence_len=64",
    "per_device_train_batch_size=2",
    "eval_steps=50",
)
STOP = (
    "lora=true",
    "lora_rank=1",
    "lora_target_modules=[k_proj]",
    "learning_rate=1e-2",
    "lr_scheduler_type=linear",
    "max_steps=600",
    "sequence_len=128",
    "eval_steps=20",
)
RUNS = {
    "without-guard": GUARD,
    "auto_lr_reduction": (*GUARD, "auto_lr_reduction=true"),
    "without-early-stop": STOP,
    "early_stop": (*STOP, "early_stop=true"),
}


def train(directory: Path) -> None:
    """The four runs; one that is there already is kept."""
    registry = load_plugins()
    for name, keys in RUNS.items():
        place = directory / name
        if (place / "report.md").exists():
            continue
        common = ("save_steps=0", "device=cpu", "monitor=[jsonl,adaptive]", "gradient_accumulation_steps=1")
        launch(load_run_config([*common, *keys, f"output_dir={place}"], registry=registry), registry)


def keep_chart(path: Path, figures: Sequence[tuple[str, Sequence[tuple[str, RunRecord, str]]]]) -> None:
    """One SVG of several charts, one under the other: (title, (label, run, series)…)."""
    charts = [
        (title, [Curve(label=label, points=points(run, series), dots=series == "eval") for label, run, series in lines])
        for title, lines in figures
    ]
    path.write_text(stacked(charts))


def points(record: RunRecord, series: str) -> list[tuple[float, float]]:
    """The points of one curve."""
    steps, values = record.curve(series)
    return [(float(at), float(value)) for at, value in zip(steps, values, strict=True)]


def event_of(record: dict[str, Any]) -> events.Event:
    """The event that a line of metrics.jsonl was made of."""
    kinds = {kind.__name__.lower(): kind for kind in events.Event.__subclasses__()}
    kind = kinds[str(record["event"]).replace("_", "")]
    names = {one.name for one in dataclasses.fields(kind)}
    numbers = {"NaN": float("nan"), "Infinity": float("inf")}
    values = {key: numbers.get(value, value) if isinstance(value, str) else value for key, value in record.items()}
    return kind(**{key: value for key, value in values.items() if key in names})


def console(path: Path, directory: Path, *, steps: int) -> None:
    """The live view after this number of steps of a run."""
    from rich.console import Console
    from surogate_monitor_console.live import LiveView
    from surogate_monitor_console.options import ConsoleOptions

    config = load_run_config([*RUNS["auto_lr_reduction"], "auto_lr_reduction=true"], registry=load_plugins())
    values = {"learning_rate": config.learning_rate, "lr_scheduler_type": config.lr_scheduler_type}
    values |= {"recipe": {"name": "bf16"}, "optimizer": {"name": "adamw"}}
    info = events.RunInfo(run_name="example", output_dir="output", task="sft", config=values, interactive=True)
    screen = Console(record=True, force_terminal=True, width=118, height=40, file=io.StringIO())
    seconds = 0.0
    view = LiveView(ConsoleOptions(), info, console=screen, clock=lambda: seconds)
    view.close()  # frames are drawn here
    screen.clear()
    screen.export_text(clear=True)
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record.get("step", 0) > steps and record["event"] != "run_start":
            break
        seconds += float(record.get("seconds") or 0.0)
        view.on_event(event_of(record))
    screen.print(view.render())
    path.write_text(screen.export_svg(title="surogate auto_lr_reduction=true …"))


def main() -> None:
    """Train, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--keep", type=Path, help="where the runs are kept, and taken from if they are there")
    options = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.keep or Path(temporary)
        train(directory)
        found = {name: read_run(directory / name) for name in RUNS}
        with_guard, without_guard = found["auto_lr_reduction"], found["without-guard"]
        keep_chart(
            IMAGES / "auto_lr_reduction.svg",
            [
                ("Loss", [("with the guard", with_guard, "loss"), ("without", without_guard, "loss")]),
                ("Learning rate", [("", with_guard, "lr"), ("", without_guard, "lr")]),
            ],
        )
        stopped, whole = found["early_stop"], found["without-early-stop"]
        keep_chart(
            IMAGES / "early_stop.svg",
            [("Held-out loss", [("without", whole, "eval"), ("early_stop=true", stopped, "eval")])],
        )
        console(IMAGES / "console.svg", directory / "auto_lr_reduction", steps=180)
    for path in sorted(IMAGES.iterdir()):
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
