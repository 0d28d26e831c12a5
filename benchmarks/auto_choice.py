"""Whether `recompute: auto` and `lmhead_chunks: auto` choose the fastest setting that fits.

For each line the run's own choice is made for what the GPU has free, or for a smaller memory that the allocator may not
exceed, and trained for a few optimizer steps of random tokens on random weights. Then the other settings are trained in
the same way in the same process. One that runs out of memory is reported as such. It needs a GPU and the plugins.

    python benchmarks/auto_choice.py [--only NAME …] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import bench
import torch

from surogate_core.batch import MicroBatch
from surogate_core.config.resolve import load_run_config
from surogate_core.config.schema import RunConfig
from surogate_core.engine.planning.prediction import CUDA_CONTEXT
from surogate_core.setup.assemble import ResolvedModel, is_out_of_memory, resolve_model
from surogate_core.setup.build import MemorySettings, build_engine, is_open

LARGE = ("sequence_len=4096", "per_device_train_batch_size=4")
LINES: dict[str, tuple[list[str], int]] = {
    "0.6B LoRA, defaults": (["model.preset=0.6b", "lora=true"], 0),
    "8B LoRA, defaults": (["model.preset=8b", "lora=true"], 0),
    "8B LoRA in 24 GiB": (["model.preset=8b", "lora=true"], 24),
    "1.7B all weights in 24 GiB": (
        ["model.preset=1.7b", "lora=false", "optimizer=adamw_8bit", "sequence_len=2048"],
        24,
    ),
    "8B LoRA, 4 × 4096, in 48 GiB": (["model.preset=8b", "lora=true", *LARGE], 48),
    "4B all weights in 48 GiB": (["model.preset=4b", "lora=false", "optimizer=adamw_8bit", *LARGE[:1]], 48),
}
"""Name → (overrides, GiB of memory; 0: all)."""
TRIED = (
    (False, 1.0, 1),
    (False, 1.0, 4),
    (False, 0.75, 1),
    (False, 0.5, 1),
    (False, 0.25, 1),
    (True, 1.0, 1),
    (True, 1.0, 4),
)
"""(recompute, recompute_budget, lmhead_chunks) of the settings beside the choice."""
BORDERS, WARM, STEPS = 512, 3, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One setting's figures."""

    line: str
    choice: str
    automatic: bool
    tokens_per_second: float | None
    """None: out of memory."""
    gib: float
    """Peak of what the allocator reserved, with CUDA's own memory as the prediction counts it."""
    losses: list[float]


def train(line: str, config: RunConfig, resolved: ResolvedModel) -> tuple[Measured, MemorySettings]:
    """The figures of a few optimizer steps, and the setting that was used."""
    batch = partial(
        bench.random_batch,
        resolved.model.vocab_size,
        rows=config.per_device_train_batch_size,
        length=config.sequence_len,
        borders=BORDERS,
    )
    torch.cuda.reset_peak_memory_stats()
    sample: MicroBatch = batch(seed=0)
    engine = build_engine(config, bench.registry(), resolved, sample=sample, progress=lambda task, done, total: None)
    chosen = MemorySettings.taken(engine.settings)
    batches = [batch(seed=seed) for seed in range(config.gradient_accumulation_steps)]
    seconds, losses = [], []
    for step in range(WARM + STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = engine.train_step(batches, step=step, lr=1e-5)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(result.read()[0])
    tokens = sum(b.tokens for b in batches)
    measured = Measured(
        line=line,
        choice=str(chosen),
        automatic=is_open(config),
        tokens_per_second=tokens / statistics.median(seconds[WARM:]),
        gib=(torch.cuda.max_memory_reserved() + CUDA_CONTEXT) / 2**30,
        losses=losses,
    )
    return measured, chosen


def attempt(line: str, config: RunConfig, resolved: ResolvedModel) -> tuple[Measured, MemorySettings | None]:
    """The same; a setting that does not fit has no speed."""
    try:
        return train(line, config, resolved)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    failed = str(
        MemorySettings(
            recompute=config.recompute is True,
            recompute_budget=config.recompute_budget,
            lmhead_chunks=0 if config.lmhead_chunks == "auto" else config.lmhead_chunks,
        )
    )
    return Measured(line=line, choice=failed, automatic=False, tokens_per_second=None, gib=0, losses=[]), None


def measure(line: str) -> list[Measured]:
    """The choice of the run, then the others."""
    overrides, gib = LINES[line]
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((gib * 2**30 - CUDA_CONTEXT) / total if gib else 1.0)
    free, _ = torch.cuda.mem_get_info()
    print(f"CUDA itself at the start: {(total - free) / 2**20:.0f} MiB")
    config = load_run_config(["model=qwen3", "from_scratch=true", *DEFAULTS, *overrides], registry=bench.registry())
    resolved = resolve_model(config, bench.registry())
    found = []
    first, taken = attempt(line, config, resolved)
    found.append(first)
    show(first)
    for block, budget, chunks in TRIED:
        other = MemorySettings(recompute=block, recompute_budget=budget, lmhead_chunks=chunks)
        if other == taken:
            continue
        gc.collect()
        torch.cuda.empty_cache()
        measured, _ = attempt(line, other.applied(config), resolved)
        found.append(measured)
        show(measured)
    gc.collect()
    torch.cuda.empty_cache()
    return found


DEFAULTS = (
    "sequence_len=1024",
    "per_device_train_batch_size=2",
    "gradient_accumulation_steps=4",
    "num_epochs=1",
    "warmup_steps=0",
    "learning_rate=1e-5",
)
"""What the example configuration of the family sets otherwise, at the schema's defaults."""


def show(measured: Measured) -> None:
    """Print a line."""
    speed = "out of memory" if measured.tokens_per_second is None else f"{measured.tokens_per_second / 1e3:.1f}k tok/s"
    mark = "*" if measured.automatic else " "
    print(f"{mark} {measured.line}: {measured.choice}: {speed}, {measured.gib:.1f} GiB", flush=True)


def main() -> None:
    """Print a line for each setting; * marks the run's own choice."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(LINES), choices=LINES)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for line in options.only:
        found = measure(line)
        rows += [asdict(m) for m in found]
        fastest = max(m.tokens_per_second or 0 for m in found)
        mine = found[0].tokens_per_second or 0
        print(f"{line}: the choice reaches {mine / fastest:.1%} of the fastest that fits", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
