"""Whether training has the same bits on 1, 2 and 4 GPUs, in two equal runs, and after a resume on another number.

    python benchmarks/equal_bits.py [--worlds 1 2] [--only NAME …] [--fabric nccl] [--steps 6] [--out DIR]
    python benchmarks/equal_bits.py --device cpu --tiny      # without a GPU

The shape of Qwen3-0.6B or Qwen3-30B-A3B with four layers, random weights and random tokens; every world runs the same
micro-batches. Loss and gradient norm of every step are compared, and the digests of all tensors that a checkpoint has:
masters, the optimizer's and the recipe's state. A case that is not exact promises only that two equal runs are equal.
An exact case trains in every world, twice in the largest, and in every world from the tensors that the largest had
after half of the steps. A case with experts that are shared out does so from the half on alone: in the largest world
all bits are compared, in the others those of the tensors as they resume; how far losses are apart is shown. A world is
one group of processes that trains case after case.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import bench_ranks
import bench_world
import torch
from bench_world import Training

from surogate_core.engine.device_memory import give_back
from surogate_core.engine.engine import Engine
from surogate_core.files.tensorfile import TensorFile, write_tensors
from surogate_core.mesh.mesh import Mesh

LORA = Training(layers=4, length=512, dropout=0.05, micro_batches=8)
FULL = replace(
    LORA, lora=False, dropout=0.0, optimizer="adamw_8bit", master="bfloat16", exact=True, zero_level=1, head_chunks=1
)
SPARSE = replace(LORA, preset="moe-30b-a3b", dropout=0.0, shared_experts=True, routes="hot")
CASES: dict[str, Training] = {
    "LoRA": LORA,
    "LoRA fp8": replace(LORA, recipe="fp8-hybrid"),
    "LoRA, base sharded": replace(LORA, shard_weights=True),
    "LoRA nf4, base sharded": replace(LORA, base="nf4", shard_weights=True),
    "full exact, level 0": replace(FULL, zero_level=0),
    "full exact, level 1": FULL,
    "full exact, level 2": replace(FULL, zero_level=2),
    "full exact, level 3": replace(FULL, zero_level=3),
    "full exact, level 1, weights shared out": replace(FULL, shard_weights=True),
    "full exact, level 1, fp8": replace(FULL, recipe="fp8-hybrid"),
    "full exact, level 3, fp32 AdamW": replace(FULL, zero_level=3, optimizer="adamw", master="float32"),
    "full exact, level 3, head not tied": replace(FULL, zero_level=3, tied=False),
    "LoRA, base sharded in host memory": replace(LORA, shard_weights=True, offload=("weights",)),
    "full exact, level 1, state in host memory": replace(FULL, offload=("optimizer", "master")),
    "full exact, level 3, weights and state in host memory": replace(
        FULL, zero_level=3, offload=("weights", "optimizer", "master")
    ),
    "full, level 1": replace(FULL, exact=False),
    "full, level 1, weights shared out": replace(FULL, shard_weights=True, exact=False),
    "full, level 3": replace(FULL, zero_level=3, exact=False),
    "full, level 3, head not tied": replace(FULL, zero_level=3, exact=False, tied=False),
    "LoRA, experts shared out": SPARSE,
    "LoRA, experts shared out, evened out": replace(SPARSE, expert_balance=1.05),
    "LoRA fp8, experts shared out, evened out": replace(SPARSE, recipe="fp8-hybrid", expert_balance=1.05),
    "LoRA, experts shared out, rows sent, evened out": replace(SPARSE, expert_rows=True, expert_balance=1.05),
    "full, level 1, experts shared out, evened out": replace(
        FULL, preset=SPARSE.preset, exact=False, shared_experts=True, routes="hot", expert_balance=1.05
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training of a case."""

    case: str
    world: int
    saves: bool = False
    """Whether it writes its tensors after half of the steps. The others are compared with this one."""
    resumes: bool = False
    """Whether it starts from them."""

    def __str__(self) -> str:
        return f"{self.world} GPU{'s' if self.world > 1 else ''}" + (" from half" if self.resumes else "")


def runs(case: str, world: int, training: Training, *, largest: bool) -> list[Run]:
    """The trainings of a case in one world."""
    exact = training.is_exact
    found = [Run(case=case, world=world, saves=True)] if largest else []
    if largest or exact:
        found.append(Run(case=case, world=world))
    if exact or training.shared_experts:
        found.append(Run(case=case, world=world, resumes=True))
    return found


# ------------------------------------------------------------------------------------- a rank


def train_all(work: dict[str, Any], mesh: Mesh) -> None:
    """Take every training of this world in turn. Rank 0 writes a line after each."""
    torch.set_num_threads(1)
    lines = Path(work["lines"])
    bench_ranks.connect(mesh, work["fabric"], _device(work))
    copies = bench_ranks.count_copies()
    for number, (training, run) in enumerate(work["jobs"]):
        before = copies()
        found = train(Training.of(training), Run(**run), work, _mesh_of_job(mesh, number))
        # Copies in a CUDA graph are counted once. No case may be without them, and none may have them by accident.
        expected = mesh.world > 1 and work["fabric"] == "copy_engines"
        assert (copies() > before) == expected, f"{copies() - before} copies by copy engines, fabric={work['fabric']}"
        give_back()
        if mesh.leads:
            with lines.open("a") as file:
                file.write(json.dumps(found) + "\n")


def _mesh_of_job(mesh: Mesh, number: int) -> Mesh:
    """The same ranks and collectives, and a store in which nothing has happened yet."""
    if mesh.store is None:
        return Mesh()
    store = torch.distributed.PrefixStore(f"job {number}", mesh.store)
    return Mesh(rank=mesh.rank, world=mesh.world, store=store, fabric=mesh.fabric, local_world=mesh.world)


def _device(work: Mapping[str, Any]) -> torch.device:
    return torch.device("cuda", 0) if work["device"] == "cuda" else torch.device("cpu")


def train(training: Training, run: Run, work: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """The figures of each step, and digests of the tensors at the end."""
    assembly = bench_world.assembly_of(training, mesh.world, _device(work))
    engine = bench_world.engine_of(assembly, mesh, routes=training.routes)
    half, saved = work["steps"] // 2, Path(work["place"], run.case)
    if run.resumes:
        engine.load_state({file.stem: TensorFile(file) for file in sorted(saved.glob("*.safetensors"))})
    figures, at_half = {}, {}
    for step in range(half if run.resumes else 0, work["steps"]):
        if step == half and (run.saves or run.resumes):
            with tempfile.TemporaryDirectory() as other:
                at_half = write_state(engine, mesh, saved if run.saves else Path(other))
        batches = bench_world.step_batches(training, mesh, step=step)
        result = engine.train_step(batches, step=step, lr=1e-3)
        figures[str(step)] = [value.hex() for value in result.read()]
    with tempfile.TemporaryDirectory() as end:
        digests = write_state(engine, mesh, Path(end))
    engine.close()
    return {"figures": figures, "at_half": at_half, "digests": digests}


def write_state(engine: Engine, mesh: Mesh, place: Path) -> dict[str, str]:
    """File → digest of the tensors of a checkpoint, which rank 0 writes; empty on the others, which send theirs."""
    if not mesh.leads:
        engine.serve()
        return {}
    digests = {}
    place.mkdir(exist_ok=True)
    for file, tensors in engine.state().items():
        _, digests[file] = write_tensors(place / f"{file}.safetensors", tensors)
    if mesh.world > 1:
        engine.dismiss()
    return digests


# -------------------------------------------------------------------------------- comparisons

FAR_APART = 1e-2
"""Losses that are relatively this far apart are no other rounding of the same sums."""


def differences(first: Mapping[str, Any] | None, other: Mapping[str, Any], *, state_alone: bool = False) -> str:
    """In words, where two runs differ first; empty if their bits are equal.

    `state_alone`: compare the tensors with which a run resumes; what it computes then may differ by `FAR_APART`.
    """
    if "error" in other:
        return f"failed: {other['error']}"
    if first is None or "error" in first:
        return "nothing to compare with"
    saved, resumed = first.get("at_half", {}), other.get("at_half", {})
    if state_alone and not saved:
        return "nothing to compare with"
    if (state_alone or resumed) and (files := _unequal(saved, resumed)):
        return f"tensors at the resume of {', '.join(files)}"
    if state_alone:
        losses = apart(first, other)
        return "" if losses < FAR_APART else f"losses {losses:.1e} apart"
    for step, figures in other["figures"].items():
        if first["figures"][step] != figures:
            return f"step {step}: {_shown(first['figures'][step])} against {_shown(figures)}"
    files = _unequal(first["digests"], other["digests"])
    return f"tensors of {', '.join(files)}" if files else ""


def _unequal(first: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Files whose digests differ, or that one of two lacks."""
    return sorted(file for file in first.keys() | other.keys() if first.get(file) != other.get(file))


def apart(first: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Largest relative difference of two runs' losses."""
    pairs = [(first["figures"][step][0], figures[0]) for step, figures in other["figures"].items()]
    found = [abs(float.fromhex(b) / float.fromhex(a) - 1) for a, b in pairs]
    return max(found) if all(map(math.isfinite, found)) else math.inf


def _shown(figures: Sequence[str]) -> str:
    return " ".join(f"{float.fromhex(value):.9g}" for value in figures)


def in_world(world: int, left: list[Run], place: str, options: argparse.Namespace) -> Iterator[tuple[Run, Any]]:
    """Each training of a world with its result. One that fails ends its group; a new group takes the next cases."""
    lines = options.out.absolute() / f"equal_bits.world-{world}.jsonl"
    while left:
        lines.write_text("")
        jobs = [(asdict(training_of(run.case, options)), asdict(run)) for run in left]
        work = {"jobs": jobs, "steps": options.steps, "device": options.device, "place": place, "lines": str(lines)}
        work["fabric"] = fabric_of(options)
        group = bench_ranks.begin(work, world, script=__file__, cache=options.cache)
        group.go()
        result = group.wait(options.limit, progress=lambda: lines.stat().st_size)
        done = [json.loads(line) for line in lines.read_text().splitlines()]
        if "error" in result and len(done) < len(left):
            done.append({"error": result["error"], "log": result["log"]})
        yield from zip(left, done, strict=False)
        failed = {run.case for run, found in zip(left, done, strict=False) if run.saves and "error" in found}
        left = [run for run in left[len(done) :] if run.case not in failed]


def training_of(case: str, options: argparse.Namespace) -> Training:
    """What a case trains."""
    return CASES[case].tiny() if options.tiny else CASES[case]


def fabric_of(options: argparse.Namespace) -> str:
    """What connects the ranks: what a run on one machine takes first, if no fabric is named."""
    return options.fabric or ("copy_engines" if options.device == "cuda" else "gloo")


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every training, compared with the first one of its case."""
    rows: list[dict[str, Any]] = []
    first: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for world in sorted(options.worlds, reverse=True):
            largest = world == max(options.worlds)
            wanted = [
                run
                for case in options.only
                if largest or "error" not in first[case]
                for run in runs(case, world, training_of(case, options), largest=largest)
            ]
            for run, result in in_world(world, wanted, place, options):
                first.setdefault(run.case, result)
                exact = training_of(run.case, options).is_exact
                state_alone = not (exact or largest)
                why = differences(first[run.case], result, state_alone=state_alone)
                said = why or "equal"
                if state_alone and not why:
                    said += f" as it resumes; losses then within {apart(first[run.case], result):.1e}"
                row = {"case": run.case, "exact": exact, "fabric": fabric_of(options), "run": str(run), "why": why}
                rows.append({**row, "said": said, **result})
                print(f"{run.case}: {run}: {said}", file=sys.stderr, flush=True)
                (options.out / "equal_bits.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return rows


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row a case, with each of its trainings."""
    text = [
        "| case | exact | fabric | compared with the first training on the most GPUs |",
        "| --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == name]
        cells = "; ".join(f"{row['run']}: {row['said']}" for row in mine)
        text.append(f"| {name} | {'yes' if mine[0]['exact'] else 'no'} | {mine[0]['fabric']} | {cells} |")
    return "\n".join(text) + "\n"


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument(
        "--fabric", choices=["copy_engines", "nccl", "gloo"], help="default: copy_engines; gloo on CPUs"
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--limit", type=float, default=120, help="seconds that one training may take")
    parser.add_argument("--cache", type=Path, help="directory of compiled programs; each library's own without it")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script itself")
    return parser


def main() -> None:
    """Print the table; the exit status says whether all were equal. Or be one rank of a group."""
    if bench_ranks.is_rank():
        bench_ranks.run_rank(train_all, prepare=lambda work: bench_world.import_all(work["device"]))
    options = make_parser().parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = compare(options)
    print(markdown(rows))
    sys.exit(any(row["why"] for row in rows))


if __name__ == "__main__":
    main()
