"""Losses of the embedded example by optimizer and seed: `python benchmarks/optimizers.py adamw adamw_8bit`.

Each argument is an optimizer with its overrides, joined by commas: ``normuon,learning_rate=0.02``. Every one is trained
from random weights for the same steps on the same data with each of `--seeds`; on a CPU about two minutes a run of
the default 12 epochs. Prints the held-out loss at the end, the mean training loss of the last 50 steps, and both as
means over the seeds, relative to the first optimizer's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

LAST = 50
"""Steps whose training loss is averaged: the loss of one step is noisy."""


def train(words: list[str], directory: Path) -> tuple[float, float, float]:
    """(held-out loss at the end, mean training loss of the last steps, median ms of a step)."""
    command = [sys.executable, "-m", "surogate_core.cli.main", *words, f"output_dir={directory}"]
    command += ["monitor=[jsonl]", "eval_steps=0", "save_steps=0", "resume_from_checkpoint=false"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    steps = [e for e in events if e["event"] == "step_end"]
    evaluations = [e for e in events if e["event"] == "eval_end"]
    times = sorted(1000 * e["seconds"] for e in steps)
    return evaluations[-1]["loss"], fmean(e["loss"] for e in steps[-LAST:]), times[len(times) // 2]


def main() -> None:
    """Train all, print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("optimizers", nargs="+")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--epochs", type=float, default=12)
    arguments = parser.parse_args()
    means: list[tuple[float, float]] = []
    for optimizer in arguments.optimizers:
        name, *overrides = optimizer.split(",")
        found = []
        for seed in arguments.seeds:
            words = [f"optimizer={name}", *overrides, f"train_seed={seed}", f"num_epochs={arguments.epochs}"]
            with tempfile.TemporaryDirectory() as directory:
                held_out, training, ms = train(words, Path(directory) / "run")
            print(
                f"{optimizer:40} seed {seed}  held-out {held_out:.4f}  training {training:.4f}  {ms:.0f} ms", flush=True
            )
            found.append((held_out, training))
        means.append((fmean(h for h, _ in found), fmean(t for _, t in found)))
        of_first = [f"{mine / first - 1:+.2%}" for mine, first in zip(means[-1], means[0], strict=True)]
        print(f"{optimizer:40} mean    held-out {means[-1][0]:.4f} ({of_first[0]})", end="  ")
        print(f"training {means[-1][1]:.4f} ({of_first[1]})", flush=True)


if __name__ == "__main__":
    main()
