"""Whether what `surogate plan --fit` proposes does fit: the first proposal is trained with no more memory than that.

Of each configuration the first proposal is taken as `surogate plan` makes it for the GPU, and two optimizer steps of
random tokens are run in a process whose allocator may not go beyond the budget, less what CUDA itself takes. Several
processes run side by side. It needs the plugins installed.

    python benchmarks/plan_fits.py [--jobs 4] [--json FILE]
    python benchmarks/plan_fits.py --gpu h200 --propose         # without a GPU: the proposals alone
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

SHAPE = ["sequence_len=2048", "per_device_train_batch_size=2", "gradient_accumulation_steps=2"]
BUDGETS: dict[str, tuple[list[str], int]] = {
    "8B, adapters, NF4": (["model.preset=8b", "lora=true", "qlora_bnb=true"], 8),
    "0.6B, all weights": (["model.preset=0.6b", "lora=false"], 6),
    "8B, adapters": (["model.preset=8b", "lora=true"], 16),
    "1.7B, all weights": (["model.preset=1.7b", "lora=false"], 12),
}
"""Name → (overrides, GiB)."""
BORDERS = 64
STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One configuration's figures in bytes."""

    name: str
    budget: int
    overrides: list[str]
    """The proposal."""
    predicted: int
    """On the device, with what CUDA itself takes."""
    allocated: int
    reserved: int
    context: int
    """Bytes left to CUDA itself."""
    losses: list[float]


def surogate_plan(name: str, gpu: str | None) -> dict[str, Any]:
    """The first proposal, as JSON values."""
    overrides, gib = BUDGETS[name]
    words = [*overrides, *SHAPE, "model=qwen3", "--fit", f"{gib}GiB", "--json", *(["--gpu", gpu] if gpu else [])]
    command = [sys.executable, "-m", "surogate_core.cli.main", "plan", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    first: dict[str, Any] = json.loads(done.stdout)["fit"][0]
    return first


def train(name: str, proposal: dict[str, Any]) -> Result:
    """Two steps within the budget."""
    import bench
    import torch

    from surogate_core.app.arguments import load, parse
    from surogate_core.engine.planning.prediction import CUDA_CONTEXT
    from surogate_core.setup.assemble import resolve_model
    from surogate_core.setup.build import build_engine

    overrides, gib = BUDGETS[name]
    budget = gib * 2**30
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((budget - CUDA_CONTEXT) / total)
    words = ["model=qwen3", *overrides, *SHAPE, *proposal["overrides"]]
    config, registry = load(parse(words, command="surogate plan"), None)
    resolved = resolve_model(config, registry)
    batch = partial(
        bench.random_batch,
        resolved.model.vocab_size,
        rows=config.per_device_train_batch_size,
        length=config.sequence_len,
        borders=BORDERS,
    )
    engine = build_engine(config, registry, resolved, sample=batch(seed=0), progress=lambda task, done, total: None)
    losses = []
    for step in range(STEPS):
        seeds = range(step * config.gradient_accumulation_steps, (step + 1) * config.gradient_accumulation_steps)
        made = [batch(seed=seed) for seed in seeds]
        losses.append(engine.train_step(made, step=step, lr=1e-5).read()[0])
    return Result(
        name=name,
        budget=budget,
        overrides=proposal["overrides"],
        predicted=proposal["device_bytes"],
        allocated=torch.cuda.max_memory_allocated(),
        reserved=torch.cuda.max_memory_reserved(),
        context=CUDA_CONTEXT,
        losses=losses,
    )


def in_process(name: str, gpu: str | None) -> Result | None:
    """Propose and train in processes of their own; None where it fails, which is said."""
    try:
        proposal = surogate_plan(name, gpu)
        command = [sys.executable, __file__, "--one", name, "--proposal", json.dumps(proposal)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
    except RuntimeError as error:
        print(f"{name}: does not fit, or failed: {error}", flush=True)
        return None
    result = Result(**json.loads(done.stdout.splitlines()[-1]))
    mib = 2**20
    print(
        f"{name} in {result.budget / mib:.0f} MiB: {' '.join(result.overrides)}: "
        f"predicted {(result.predicted - result.context) / mib:.0f} + {result.context / mib:.0f}, "
        f"allocated {result.allocated / mib:.0f}, reserved {result.reserved / mib:.0f} MiB, losses {result.losses}",
        flush=True,
    )
    return result


def main() -> None:
    """Print a line a configuration."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--only", nargs="*", default=list(BUDGETS), choices=BUDGETS)
    parser.add_argument("--gpu", help="propose for such a GPU")
    parser.add_argument("--propose", action="store_true", help="train nothing")
    parser.add_argument("--one", choices=BUDGETS, help="this one in this process")
    parser.add_argument("--proposal", type=json.loads)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.propose:
        for name in options.only:
            print(name, surogate_plan(name, options.gpu), flush=True)
        return
    if options.one:
        print(json.dumps(asdict(train(options.one, options.proposal))))
        return
    with ThreadPoolExecutor(options.jobs) as pool:
        found = [r for r in pool.map(lambda name: in_process(name, options.gpu), options.only) if r is not None]
    print(f"{len(found)} of {len(options.only)} fit")
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in found], indent=1))


if __name__ == "__main__":
    main()
