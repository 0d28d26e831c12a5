"""Whether training has the same bits on 1, 2 and 4 GPUs, in two equal runs, and after a resume on fewer GPUs.

    python benchmarks/equal_bits.py [--worlds 1 2] [--only NAME …] [--steps 6] [--out DIR]
    python benchmarks/equal_bits.py --device cpu --tiny      # without a GPU

Qwen3-0.6B's shape with four layers, or 8B's with two (its LM head is not tied), random weights and random tokens; every
world runs the same micro-batches. Compared are the loss and the gradient norm of every step, and the digests of all
tensors that a checkpoint has: masters, the optimizer's and the recipe's state. A case that is not exact promises only
that two equal runs are equal. Each case trains in every world, once more in the largest, and from the largest world's
tensors after half of the steps in every smaller one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import bench_ranks
import bench_world
import torch
from bench_world import Training

from surogate_core.files.tensorfile import TensorFile, write_tensors
from surogate_core.mesh.mesh import Mesh

LORA = Training(layers=4, length=512, dropout=0.05, micro_batches=8)
FULL = replace(
    LORA, lora=False, dropout=0.0, optimizer="adamw_8bit", master="bfloat16", exact=True, zero_level=1, head_chunks=1
)
CASES: dict[str, Training] = {
    "LoRA": LORA,
    "LoRA fp8": replace(LORA, recipe="fp8-hybrid"),
    "LoRA, base sharded": replace(LORA, shard_weights=True),
    "LoRA nf4, base sharded": replace(LORA, base="nf4", shard_weights=True),
    "full exact, level 0": replace(FULL, zero_level=0),
    "full exact, level 1": FULL,
    "full exact, level 2": replace(FULL, zero_level=2),
    "full exact, level 3": replace(FULL, zero_level=3),
    "full exact, level 1, fp8": replace(FULL, recipe="fp8-hybrid"),
    "full exact, level 3, fp32 AdamW": replace(FULL, zero_level=3, optimizer="adamw", master="float32"),
    "full exact, level 3, head not tied": replace(FULL, zero_level=3, preset="8b", layers=2),
    "full, level 1": replace(FULL, exact=False),
    "full, level 3": replace(FULL, zero_level=3, exact=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training of a case."""

    world: int
    saves: bool = False
    """Whether it writes its tensors after half of the steps."""
    resumes: bool = False
    """Whether it starts from them."""

    def __str__(self) -> str:
        return f"{self.world} GPU{'s' if self.world > 1 else ''}" + (" from half" if self.resumes else "")


def runs(worlds: Sequence[int], *, exact: bool) -> list[Run]:
    """The trainings of a case: the largest world twice, then the others, then the resumed ones."""
    largest, *others = sorted(worlds, reverse=True)
    found = [Run(world=largest, saves=True), Run(world=largest)]
    if not exact:
        return found
    found += [Run(world=world) for world in others]
    return found + [Run(world=world, resumes=True) for world in (largest, *others)]


# ------------------------------------------------------------------------------------- a rank


def train(work: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """The figures of each step, and digests of the tensors at the end."""
    training, run = Training(**{**work["training"], "offload": ()}), Run(**work["run"])
    cuda = work["device"] == "cuda"
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    engine = bench_world.engine_of(bench_world.assembly_of(training, mesh.world, device), mesh)
    half, place = work["steps"] // 2, Path(work["place"])
    if run.resumes:
        engine.load_state({file.stem: TensorFile(file) for file in sorted(place.glob("*.safetensors"))})
    figures = {}
    for step in range(half if run.resumes else 0, work["steps"]):
        if step == half and run.saves:
            write_state(engine, mesh, place)
        batches = bench_world.step_batches(training, mesh, step=step)
        result = engine.train_step(batches, step=step, lr=1e-3)
        figures[step] = [value.hex() for value in result.read()]
    with tempfile.TemporaryDirectory() as end:
        digests = write_state(engine, mesh, Path(end))
    return {"figures": figures, "digests": digests}


def write_state(engine: Any, mesh: Mesh, place: Path) -> dict[str, str]:
    """File → digest of the tensors of a checkpoint, which rank 0 writes; empty on the others, which send theirs."""
    if not mesh.leads:
        engine.serve()
        return {}
    digests = {}
    for file, tensors in engine.state().items():
        _, digests[file] = write_tensors(place / f"{file}.safetensors", tensors)
    if mesh.world > 1:
        engine.dismiss()
    return digests


# -------------------------------------------------------------------------------- comparisons


def differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """In words, where two runs differ first; empty if their bits are equal."""
    for result in (first, other):
        if "error" in result:
            return f"failed: {result['error']}"
    a, b = first["ranks"][0], other["ranks"][0]
    for step, figures in b["figures"].items():
        if a["figures"][step] != figures:
            shown = [
                " ".join(f"{float.fromhex(value):.9g}" for value in each) for each in (a["figures"][step], figures)
            ]
            return f"step {step}: {shown[0]} against {shown[1]}"
    files = [file for file, digest in b["digests"].items() if a["digests"].get(file) != digest]
    return f"tensors of {', '.join(files)}" if files else ""


def _shown(figures: Sequence[str]) -> str:
    return " ".join(f"{float.fromhex(value):.9g}" for value in figures)


def one_case(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every training of a case, compared with the first."""
    training = CASES[name].tiny() if options.tiny else CASES[name]
    exact = training.is_exact
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        wanted = runs(options.worlds, exact=exact)
        work = {"training": asdict(training), "steps": options.steps, "device": options.device, "place": place}

        def begin(run: Run) -> bench_ranks.Group:
            given = {**work, "run": asdict(run)}
            return bench_ranks.begin(given, run.world, script=__file__, cache=options.cache)

        following: bench_ranks.Group | None = begin(wanted[0])
        first: dict[str, Any] = {}
        for run, after in zip(wanted, [*wanted[1:], None], strict=True):
            group, following = following, begin(after) if after else None
            assert group is not None
            group.go()
            result = group.wait(options.limit)
            first = first or result
            why = differences(first, result)
            rows.append({"case": name, "exact": exact, "run": str(run), "equal": not why, "why": why, **result})
            print(f"{name}: {run}: {why or 'equal'}", file=sys.stderr)
    return rows


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row a case, a cell a training."""
    text = ["| case | exact | compared with the first training on the most GPUs |", "| --- | --- | --- |"]
    for name in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == name]
        cells = "; ".join(f"{row['run']}: {'equal' if row['equal'] else row['why']}" for row in mine)
        text.append(f"| {name} | {'yes' if mine[0]['exact'] else 'no'} | {cells} |")
    return "\n".join(text) + "\n"


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limit", type=float, default=120, help="seconds that a training may take")
    parser.add_argument("--cache", type=Path, help="directory of compiled programs; each library's own without it")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script itself")
    return parser


def main() -> None:
    """Print the table; the exit status says whether all were equal. Or be one rank of a group."""
    if bench_ranks.is_rank():
        bench_ranks.run_rank(train)
    options = make_parser().parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in options.only:
        rows += one_case(name, options)
        (options.out / "equal_bits.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(markdown(rows))
    sys.exit(not all(row["equal"] for row in rows))


if __name__ == "__main__":
    main()
