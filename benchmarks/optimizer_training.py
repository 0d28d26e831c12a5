"""Whether the optimizers train alike: a small Qwen3 from scratch by each, over several seeds.

A Qwen3 of 29M parameters is pre-trained on Python sources and documentation of this machine (`parity_text.py`); its
held-out loss is taken on files that are kept apart. Learning rates are chosen first: `adamw` and `normuon` are trained
with seed 0 for `--sweep-steps` at each of their rates, and the one with the lowest held-out loss is taken for the
other seeds; `adamw_8bit` has that of `adamw`. With `normuon` embeddings and norms have a tenth of its rate. Then each
optimizer is trained with each of `--seeds`, which decides the initial weights and the order of the rows: the same for
all. Every run warms up for a twentieth of its steps and falls to a tenth by a cosine.

Each (optimizer, seed) is a process of its own, all at the same time on one device, so no time is measured here.

    python benchmarks/optimizer_training.py --out DIR [--steps 1000 …] [--device cpu --tiny]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import loss_parity
import numpy as np
import parity_text
import torch

from surogate_commands.curves import Curve
from surogate_commands.picture import stacked
from surogate_core.engine.engine import Engine
from surogate_core.engine.planning.pieces import RandomSource

SWEEP_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Kinds of training that are compared."""

    name: str
    """Name of the files that are written."""
    script: str
    """The program that starts them."""
    rates: Mapping[str, tuple[float, ...]]
    """Kind → the learning rates of its sweep; one that tries none takes the first kind's."""
    make: Callable[[str, Setting], Engine]
    """(kind, setting) → the engine with the sweep's initial weights."""

    @property
    def first(self) -> str:
        """The kind that the others are compared with."""
        return next(iter(self.rates))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting(loss_parity.Setting):
    """The settings of all processes."""

    out: Path = Path("optimizer_training")
    steps: int = 1000
    sweep_steps: int = 300
    seeds: tuple[int, ...] = (1, 2, 3)
    evaluate: int = 100
    held_rows: int = 96
    megabytes: int = 30

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
        # By its name: `super()` does not work in a dataclass with slots.
        whole: dict[str, Any] = loss_parity.Setting.config.__get__(self)
        return {**whole, **({} if self.tiny else {**shape, "num_attention_heads": 4})}


def prepare(setting: Setting, work: Path) -> dict[str, Any]:
    """Write the rows; how much there is."""
    train, held = parity_text.texts(parity_text.PYTHON, setting.megabytes * 10**6)
    tokenizer = parity_text.train_tokenizer(train[: max(1, len(train) // 6)], setting.vocabulary)
    facts: dict[str, Any] = {"files": [len(train), len(held)]}
    for name, found in (("train", train), ("held", held)):
        made = parity_text.rows(parity_text.tokens(tokenizer, found), setting.length)
        if not len(made):
            raise SystemExit(f"{name}: less than one row of {setting.length} tokens")
        facts[f"{name} tokens"] = made.size
        np.save(work / f"{name}.part.npy", made)
    for name in ("held", "train"):  # `train.npy` says that all is there
        (work / f"{name}.part.npy").rename(work / f"{name}.npy")
    return facts


def source(seed: int, setting: Setting) -> RandomSource:
    """Initial weights."""
    return RandomSource(seed=seed, std=0.02, device=torch.device(setting.device))


def optimizer_engine(name: str, setting: Setting) -> Engine:
    """The model under an optimizer."""
    return loss_parity.make_engine("bf16", replace(setting, optimizer=name), source(SWEEP_SEED, setting), lora=False)


OPTIMIZERS = Comparison(
    name="optimizer_training",
    script=__file__,
    rates={"adamw": (2.5e-4, 5e-4, 1e-3, 2e-3), "adamw_8bit": (), "normuon": (0.01, 0.02, 0.04)},
    make=optimizer_engine,
)


def swept(what: Comparison, setting: Setting, work: Path, name: str) -> dict[float, float]:
    """Rate → held-out loss of a kind's sweep; waits for the processes that find them."""
    name = name if what.rates[name] else what.first
    found: dict[float, float] = {}
    for rate in what.rates[name]:
        file = work / f"sweep-{name}-{rate}.json"
        while not file.exists():
            if list(work.glob("*.failed")):
                raise SystemExit("another process failed")
            time.sleep(0.1)
        found[rate] = json.loads(file.read_text())
    return found


def work_on(what: Comparison, name: str, seed: int, setting: Setting, work: Path) -> None:
    """A process: its share of the sweep, and then its run."""
    torch.set_float32_matmul_precision("high")
    engine = what.make(name, setting)
    while not (work / "train.npy").exists():
        time.sleep(0.1)
    rows, held = np.load(work / "train.npy"), loss_parity.held_batches(np.load(work / "held.npy"), setting)

    def run(steps: int, rate: float, seed: int) -> dict[str, Any]:
        loss_parity.restart(engine, source(seed, setting))
        batches = loss_parity.text_batches(rows, setting, seed=100 + seed)
        (found,) = loss_parity.train([engine], batches, steps, rate, held=held, every=setting.evaluate)
        return found

    for rate in what.rates[name][setting.seeds.index(seed) :: len(setting.seeds)]:
        loss = run(setting.sweep_steps, rate, SWEEP_SEED)["held"][-1][1]
        print(f"sweep {name} {rate}: {loss:.4f}", flush=True)
        loss_parity._write(work / f"sweep-{name}-{rate}.json", json.dumps(loss))
    found = swept(what, setting, work, name)
    # A rate that diverges is none.
    rate = min(found, key=lambda r: found[r] if math.isfinite(found[r]) else math.inf)
    figures = run(setting.steps, rate, seed)
    print(f"{name} seed {seed}: {figures['held'][-1][1]:.4f}", flush=True)
    told = {"rate": rate, "sweep": list(found.items()), "parameters": engine.parameters.counts()[0], **figures}
    told["kernels"] = {op: kernel for (op, _), kernel in engine.programs.kernels.chosen.items()}
    loss_parity._write(setting.out / f"{name}-{seed}.json", json.dumps(told))


# ----------------------------------------------------------------------------------- report


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def markdown(what: Comparison, found: Mapping[tuple[str, int], Any], setting: Setting, title: str) -> str:
    """The tables: final losses by seed, and what the sweeps found."""
    seeds = ", ".join(map(str, setting.seeds))
    head = f"| | learning rate | held-out loss of seeds {seeds} | mean ± standard error | against the first |"
    text = [title, "", head, "| --- " * 5 + "|"]
    sweeps = []
    for name in what.rates:
        runs = [found[name, seed] for seed in setting.seeds if (name, seed) in found]
        if len(runs) < len(setting.seeds):
            continue
        losses = [run["held"][-1][1] for run in runs]
        first = [found[what.first, seed]["held"][-1][1] for seed in setting.seeds]
        mean, error = mean_and_error(losses)
        gap, gap_error = mean_and_error([100 * (mine / theirs - 1) for mine, theirs in zip(losses, first, strict=True)])
        each = ", ".join(f"{loss:.4f}" for loss in losses)
        against = "" if losses == first else f"{gap:+.2f} ± {gap_error:.2f} %"
        text.append(f"| `{name}` | {runs[0]['rate']:g} | {each} | {mean:.4f} ± {error:.4f} | {against} |")
        if what.rates[name]:
            sweeps.append(f"{name} {', '.join(f'{rate:g}: {loss:.4f}' for rate, loss in runs[0]['sweep'])}")
    return "\n".join([*text, "", f"Sweep, {setting.sweep_steps} steps, seed {SWEEP_SEED}: {'; '.join(sweeps)}.", ""])


def picture(what: Comparison, found: Mapping[tuple[str, int], Any], setting: Setting) -> str:
    """SVG: held-out losses by step, mean over the seeds, and each kind's gap to the first."""
    means: dict[str, list[tuple[float, float]]] = {}
    for name in what.rates:
        runs = [found[name, seed]["held"] for seed in setting.seeds if (name, seed) in found]
        # The loss before the first step would leave no height for the rest.
        means[name] = [(row[0][0], fmean(loss for _, loss in row)) for row in zip(*runs, strict=True) if row[0][0]]
    base = dict(means[what.first])
    gaps = {n: [(s, 100 * (v / base[s] - 1)) for s, v in points if s in base] for n, points in means.items()}
    titles = f"Held-out loss, mean of {len(setting.seeds)} seeds", f"Gap to {what.first}, %"
    return stacked(
        [
            (title, [Curve(label=n, points=points) for n, points in each.items()])
            for title, each in zip(titles, (means, gaps), strict=True)
        ]
    )


# ------------------------------------------------------------------------------------- main


def compare(what: Comparison, setting: Setting, words: Sequence[str]) -> int:
    """All runs as processes; the number that failed."""
    setting.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        running = {
            (name, seed): subprocess.Popen(
                [sys.executable, what.script, *words, "--work", place, "--run", name, str(seed)], env=environment
            )
            for name in what.rates
            for seed in setting.seeds
        }
        try:
            facts = prepare(setting, work)
            print(f"data: {facts}, {time.monotonic() - started:.0f} s", flush=True)
            codes = {key: process.wait() for key, process in running.items()}
        finally:
            for process in running.values():
                process.kill()
    files = {key: setting.out / f"{key[0]}-{key[1]}.json" for key in running}
    found = {key: json.loads(file.read_text()) for key, file in files.items() if file.exists() and not codes[key]}
    where = torch.cuda.get_device_name() if setting.device == "cuda" else "cpu"
    sizes = {name: run["parameters"] for (name, _), run in found.items()}
    parameters = ", ".join(dict.fromkeys(f"{size / 1e6:.1f}M" for size in sizes.values()))
    title = (
        f"{where}, torch {torch.__version__}; {parameters} parameters, {setting.steps} steps of "
        f"{setting.rows} × {setting.length} tokens; {facts}; {time.monotonic() - started:.0f} s."
    )
    if found:
        loss_parity._write(setting.out / f"{what.name}.md", markdown(what, found, setting, title))
        loss_parity._write(setting.out / f"{what.name}.svg", picture(what, found, setting))
        print(markdown(what, found, setting, title))
        print({name: run["kernels"] for (name, _), run in found.items()})
    print(codes)
    return sum(code != 0 for code in codes.values())


def main(what: Comparison, title: str) -> None:
    """Exit status 1 if a run failed."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--out", type=Path, default=Path(what.name))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(Setting().seeds))
    for name in ("steps", "sweep_steps", "rows", "length", "vocabulary", "held_rows", "megabytes", "evaluate"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Setting(), name))
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    run, work = options.pop("run"), options.pop("work")
    setting = Setting(**{**options, "seeds": tuple(options["seeds"])})
    if not run:
        sys.exit(1 if compare(what, setting, sys.argv[1:]) else 0)
    try:
        work_on(what, run[0], int(run[1]), setting, work)
    except BaseException:
        if work.exists():
            (work / f"{run[0]}-{run[1]}.failed").touch()
        raise


if __name__ == "__main__":
    main(OPTIMIZERS, __doc__.split("\n")[0])
