"""What `surogate plan` predicts of device memory against what a run takes, for many combinations.

Published Qwen3 shapes with random weights, all kernel packs, two optimizer steps of two micro-steps; LoRA is r=16 on
all seven projections. Every combination is a process of its own; several run side by side on the one GPU, since only
memory counts. Predicted is what a machine without a GPU would say, for kernels of an H200. Measured is the peak that
torch allocated from the start of the process, the peak that it reserved, and what the driver says of the process.
Weights are drawn on the GPU in the model's dtype, as if they came from files: no wider copy is made.

    python benchmarks/plan_memory.py [--only NAME …] [--jobs 4] [--json FILE]
    python benchmarks/plan_memory.py --predict            # without a GPU: the predictions alone

Shape suffixes: N tokens of a micro-batch, S document borders.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import bench
import numpy as np
import torch
from surogate_model_qwen3.model import build
from surogate_model_qwen3.presets import PRESETS
from torch import Tensor

from surogate_core.batch import IGNORE_LABEL, MicroBatch
from surogate_core.bundles import (
    TensorKind,
)
from surogate_core.dsl.declare import Model, TensorSpec
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.engine import Engine
from surogate_core.engine.planning.assembly import Assembly, EngineSettings
from surogate_core.engine.planning.prediction import Prediction, predict
from surogate_core.kernels.building import native

MICRO_STEPS, RANK, BORDERS = 2, 16, 64
GPU = (9, 0)
"""Compute capability that is predicted for."""
MIB = 2**20
RECIPES = {"bf16": "surogate_recipe_bf16", "fp8-hybrid": "surogate_recipe_fp8"}
CPU_TRAINING: tuple[TensorKind, ...] = ("weights", "master", "gradients", "optimizer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A combination."""

    preset: str = "0.6b"
    layers: int | None = None
    """Fewer than the published shape's."""
    lora: bool = False
    recompute: bool = True
    budget: float = 1.0
    """Share of the residuals that is kept."""
    recipe: str = "bf16"
    base: str = "bf16"
    """Storage of frozen projections."""
    optimizer: str = "adamw"
    master: str = "float32"
    offload: tuple[TensorKind, ...] = ()
    cpu_training: bool = False
    head_chunks: int = 1
    rows: int = 2
    length: int = 2048
    packed: bool = False
    """Documents of mean length 400 instead of one a row."""
    compiler: str = "inductor"
    graphs: bool = True

    @property
    def tokens(self) -> int:
        """N."""
        return self.rows * self.length

    @property
    def kinds(self) -> tuple[TensorKind, ...]:
        """The kinds of tensor on the host."""
        return (*self.offload, *(CPU_TRAINING if self.cpu_training else ()))


LORA = Case(lora=True, recompute=False, head_chunks=4)
BIG = replace(LORA, preset="8b")
CASES: dict[str, Case] = {
    "8B lora": BIG,
    "8B lora nf4, recompute": replace(BIG, base="nf4", recompute=True),
    "0.6B full, cpu_training": Case(cpu_training=True, head_chunks=4),
    "1.7B full, recompute, adamw_8bit": Case(preset="1.7b", optimizer="adamw_8bit"),
    "1.7B lora": replace(LORA, preset="1.7b"),
    "0.6B full, offload all but weights": Case(
        offload=("residuals", "optimizer", "master", "gradients"), recompute=False, head_chunks=4
    ),
    "8B lora, recompute": replace(BIG, recompute=True),
    "8B lora fp8-hybrid, 12 layers": replace(BIG, layers=12, recipe="fp8-hybrid"),
    "0.6B full": Case(recompute=False),
    "1.7B full, recompute, normuon, chunks 4": Case(preset="1.7b", optimizer="normuon", head_chunks=4),
    "0.6B lora": LORA,
    "8B lora fp8 base, recompute, 12 layers": replace(BIG, layers=12, base="fp8", recompute=True),
    "8B lora nvfp4 base, 4 layers": replace(BIG, layers=4, base="nvfp4"),
    "8B lora, offload residuals, 12 layers": replace(BIG, layers=12, offload=("residuals",)),
    "8B lora nf4, recompute, cpu_training, chunks 16, 12 layers": replace(
        BIG, layers=12, base="nf4", recompute=True, cpu_training=True, head_chunks=16
    ),
    "1.7B full, recompute, offload optimizer, adamw_8bit, bf16 masters": Case(
        preset="1.7b", optimizer="adamw_8bit", master="bfloat16", offload=("optimizer",)
    ),
    "0.6B lora fp8-hybrid, recompute, packed": replace(LORA, recipe="fp8-hybrid", recompute=True, packed=True),
    "1.7B lora, recompute, 8192 tokens a row, chunks 16": replace(
        LORA, preset="1.7b", recompute=True, rows=1, length=8192, head_chunks=16
    ),
    "8B lora, budget 0.5, 12 layers": replace(BIG, layers=12, budget=0.5),
    "1.7B full, budget 0.5, adamw_8bit": Case(preset="1.7b", recompute=False, budget=0.5, optimizer="adamw_8bit"),
    "0.6B lora fp8-hybrid, budget 0.25": replace(LORA, recipe="fp8-hybrid", budget=0.25),
    "0.6B full, recompute, no graphs, 8 layers": Case(layers=8, graphs=False),
    "0.6B lora, fx, 8 layers": replace(LORA, layers=8, compiler="fx", graphs=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One combination's figures in bytes."""

    name: str
    predicted: int
    """Predicted bytes of torch's tensors on the device, for this GPU."""
    host: int
    """Predicted on the host."""
    context: int
    """Predicted of what CUDA and NCCL take beside torch."""
    held: dict[str, int]
    allocated: int
    reserved: int
    beside: int | None
    """Bytes of the process by the driver, beyond those that torch reserved."""
    micro_step: int
    """Peak of a micro-step that is run again, without graphs."""
    update: int
    """Peak of an optimizer step that is run again, without graphs."""
    losses: list[float]


def lengths(case: Case, random: np.random.Generator) -> list[int]:
    """The lengths of the documents of a micro-batch; they fill its rows."""
    found: list[int] = []
    for _ in range(case.rows):
        rest = case.length
        while rest:
            wanted = int(random.lognormal(np.log(400) - 0.32, 0.8)) if case.packed else rest
            found.append(min(rest, max(8, wanted)))
            rest -= found[-1]
    return found


def batches(case: Case, vocab: int) -> list[MicroBatch]:
    """The micro-batches of a step, of random tokens."""
    random = np.random.default_rng(0)
    made = []
    for _ in range(MICRO_STEPS):
        documents = lengths(case, random)
        stops = np.cumsum([0, *documents])
        ids = torch.from_numpy(random.integers(0, vocab, case.tokens))
        labels = torch.roll(ids, -1)
        labels[torch.from_numpy(stops[1:] - 1)] = IGNORE_LABEL
        borders = [*stops.tolist(), *[case.tokens] * (BORDERS - len(stops))]
        made.append(
            MicroBatch(
                input_ids=ids,
                labels=labels,
                positions=torch.cat([torch.arange(n, dtype=torch.int32) for n in documents]),
                cu_seqlens=torch.tensor(borders, dtype=torch.int32),
                max_seqlen=case.length,
                tokens=case.tokens,
                label_tokens=case.tokens - len(documents),
            )
        )
    return made


def model_of(case: Case) -> Model:
    """The model."""
    config = dict(PRESETS[case.preset])
    return build(config | ({"num_hidden_layers": case.layers} if case.layers else {}))


def assembly_of(case: Case, device: torch.device) -> Assembly:
    """The common parts of a prediction and an engine."""
    settings = EngineSettings(
        device=device,
        dtype=torch.bfloat16,
        compiler="inductor" if case.compiler == "inductor" else "fx",
        cuda_graphs=case.graphs,
        tokens=case.tokens,
        borders=BORDERS,
        max_seqlen=case.length,
        head_chunks=case.head_chunks,
        recompute=Recompute(block=case.recompute, budget=case.budget),
        master_dtype=getattr(torch, case.master),
        update_on_cpu=case.cpu_training,
    )
    return bench.assemble(
        model_of(case),
        settings,
        recipe=case.recipe,
        optimizer=case.optimizer,
        offload=frozenset(case.kinds),
        lora=bench.adapters(RANK) if case.lora else None,
        weight_format=None if case.base == "bf16" else case.base,
    )


def predicted(case: Case) -> Prediction:
    """The plan for a GPU that need not be here."""
    with native.assuming(GPU):
        return predict(assembly_of(case, torch.device("cuda", 0)))


def in_torch(prediction: Prediction) -> int:
    """Bytes of torch's tensors on the device."""
    return prediction.total("device") - context(prediction)


def context(prediction: Prediction) -> int:
    """Bytes that CUDA and NCCL take beside them."""
    return sum(h.nbytes for h in prediction.held if h.kind in ("CUDA context", "NCCL"))


def of_driver(reserved: int) -> int | None:
    """Bytes that the driver counts for this process: the least of all on the GPU that reserve so much or more."""
    command = ["nvidia-smi", "--query-compute-apps=used_memory", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return min((int(n) * MIB for n in text.split() if n.isdigit() and int(n) * MIB >= reserved), default=None)


def measure(name: str) -> Result:
    """Build an engine and take two steps."""
    case, device = CASES[name], torch.device("cuda", torch.cuda.current_device())
    assembly = assembly_of(case, device)
    prediction = predict(assembly)
    gc.collect()

    def source(spec: TensorSpec) -> Tensor:
        value = torch.empty(spec.shape, dtype=torch.bfloat16, device=device)
        return value.fill_(1) if spec.init == "ones" else value.normal_(0, 0.02)

    torch.cuda.reset_peak_memory_stats()
    engine = Engine(assembly, source)
    made = batches(case, assembly.model.vocab_size)
    losses = [engine.train_step(made, step=step, lr=1e-5).read()[0] for step in range(2)]
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    now = torch.cuda.memory_reserved()
    driver = of_driver(now)
    peaks = []
    for part in (engine.step.train, engine.update.run):
        torch.cuda.reset_peak_memory_stats()
        with torch.no_grad():
            part()
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    return Result(
        name=name,
        predicted=in_torch(prediction),
        host=prediction.total("host"),
        context=context(prediction),
        held={h.kind: h.nbytes for h in prediction.held if h.place == "device"},
        allocated=allocated,
        reserved=reserved,
        beside=None if driver is None else driver - now,
        micro_step=peaks[0],
        update=peaks[1],
        losses=losses,
    )


def in_process(name: str, limit: float) -> tuple[Result | None, str]:
    """(the result of a process of its own, what it said where there is none)."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "result.json"
        command = [sys.executable, __file__, "--one", name, "--json", str(file)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return None, f"longer than {limit:g} s"
        if not file.exists():
            return None, (done.stderr or done.stdout)[-3000:]
        return Result(**json.loads(file.read_text())), ""


def line(result: Result) -> str:
    """For people, in MiB."""
    beside = "" if result.beside is None else f", beside torch {result.beside / MIB:.0f}"
    return (
        f"{result.name:60} predicted {result.predicted / MIB:7.0f}, allocated {result.allocated / MIB:7.0f} "
        f"({result.predicted / result.allocated - 1:+.1%}), reserved {result.reserved / MIB:7.0f}{beside}, "
        f"micro-step {result.micro_step / MIB:.0f}, update {result.update / MIB:.0f}, "
        f"host {result.host / MIB:.0f}, losses {' '.join(f'{loss:.4f}' for loss in result.losses)}"
    )


def run(names: Sequence[str], jobs: int, limit: float) -> list[Result]:
    """All, a limited number at a time."""
    found = []

    def one(name: str) -> None:
        result, said = in_process(name, limit)
        if result is not None:
            found.append(result)
        print(line(result) if result else f"{name}: no result: {said}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, names))
    return found


def main() -> None:
    """Print a line a combination."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--limit", type=float, default=300, help="seconds of a process")
    parser.add_argument("--predict", action="store_true", help="no GPU is asked for")
    parser.add_argument("--one", choices=CASES, help="this one in this process")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.predict:
        for name in options.only:
            prediction = predicted(CASES[name])
            parts = ", ".join(f"{h.kind} {h.nbytes / MIB:.0f}" for h in prediction.held if h.place == "device")
            print(f"{name:60} predicted {in_torch(prediction) / MIB:7.0f}: {parts}", flush=True)
        return
    if options.one:
        result = measure(options.one)
        options.json.write_text(json.dumps(asdict(result)))
        return
    found = run(options.only, options.jobs, options.limit)
    worst = max((abs(r.predicted / r.allocated - 1) for r in found), default=0.0)
    print(f"{len(found)} of {len(options.only)} measured, the farthest off by {worst:.1%}")
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in found], indent=1))


if __name__ == "__main__":
    main()
