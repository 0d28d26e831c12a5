"""Engines on several ranks for the benchmarks: what a case trains, and the micro-batches of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import bench
import gpu_lora
import torch
from presets import PRESETS
from shapes import Routes, Weights, model_of

from surogate_core.batch import BatchCounts, MicroBatch
from surogate_core.bundles import TensorKind
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.engine import Engine
from surogate_core.engine.planning.assembly import Assembly, EngineSettings
from surogate_core.engine.ranks.sharding import Sharing
from surogate_core.engine.update import StepResult
from surogate_core.mesh.axes import Axes
from surogate_core.mesh.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is trained. The defaults are LoRA as in benchmarks/gpu_lora.py."""

    preset: str = "0.6b"
    layers: int = 0
    """Fewer than the published shape's; 0: all."""
    tied: bool | None = None
    """Whether the LM head is the embedding; None: as in the published shape."""
    lora: bool = True
    rank: int = 16
    dropout: float = 0.0
    recipe: str = "bf16"
    base: str = "bf16"
    """Weight format of the frozen projections."""
    optimizer: str = "adamw"
    master: str = "float32"
    zero_level: int = 0
    shard_weights: bool = False
    exact: bool | None = None
    """Whether sums do not depend on the number of ranks; None: as the key's default, for LoRA."""
    shared_rows: bool = False
    """Whether all ranks share each micro-batch (`context_parallel_size`)."""
    shared_experts: bool = False
    """Whether all ranks share out the experts of each layer (`ep_size`)."""
    expert_rows: bool = False
    """Whether they send a row for each expert of a token (`ep_exchange=rows`)."""
    expert_balance: float | None = None
    """Largest load by the mean that they do not even out (`ep_load_balance_threshold`)."""
    routes: Routes = "zipf"
    """Which experts routers prefer."""
    fp32: bool = False
    """Whether a GPU computes in fp32 instead of bf16."""
    recompute: bool = False
    head_chunks: int = 4
    offload: tuple[TensorKind, ...] = ()
    rows: int = 2
    length: int = 2048
    accumulation: int = 4
    """Micro-batches of a rank in an optimizer step."""
    micro_batches: int = 0
    """Micro-batches of all ranks in an optimizer step, instead of `accumulation`."""
    graphs: bool = True
    """Whether a GPU replays CUDA graphs; otherwise the host starts each kernel."""

    @property
    def is_exact(self) -> bool:
        """Whether sums do not depend on the number of ranks."""
        return self.lora and not (self.shared_rows or self.shared_experts) if self.exact is None else self.exact

    def context(self, world: int) -> int:
        """Ranks that share a micro-batch."""
        return world if self.shared_rows else 1

    def total(self, world: int) -> int:
        """M, micro-batches of an optimizer step."""
        return self.micro_batches or self.accumulation * world // self.context(world)

    def tokens(self, world: int) -> int:
        """Tokens of an optimizer step."""
        return self.total(world) * self.rows * self.length

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Training:
        """From its fields as JSON gives them."""
        return cls(**{**values, "offload": tuple(values["offload"])})

    def tiny(self) -> Training:
        """The same for a CPU, in a second."""
        total = min(self.micro_batches, 8)
        preset = "moe-tiny" if self.preset.startswith("moe-") else "tiny"
        return replace(self, preset=preset, layers=2, rank=4, length=32, micro_batches=total)


def import_all(device: str) -> None:
    """Import what an engine would, so that a rank does so before its turn. No GPU is used."""
    bench.registry()
    if device == "cuda":
        import torch._inductor.compile_fx  # noqa: F401


def axes_of(training: Training, world: int) -> Axes:
    """The plan of the ranks."""
    return Axes.of(
        world,
        context=training.context(world),
        expert=world if training.shared_experts else 1,
        expert_rows=training.expert_rows,
        expert_balance=training.expert_balance if training.shared_experts and world > 1 else None,
        zero_level=training.zero_level,
        shard_weights=training.shard_weights or training.zero_level == 3,
        exact=training.is_exact,
        micro_batches=training.total(world),
    )


def assembly_of(training: Training, world: int, device: torch.device, *, seed: int = 0) -> Assembly:
    """The parts of a rank's engine, and of the prediction of its memory."""
    gpu = device.type == "cuda"
    tied = {} if training.tied is None else {"tie_word_embeddings": training.tied}
    settings = EngineSettings(
        device=device,
        dtype=torch.bfloat16 if gpu and not training.fp32 else torch.float32,
        compiler="inductor" if gpu else "fx",
        cuda_graphs=gpu and training.graphs,
        tokens=training.rows * training.length // training.context(world),
        borders=training.rows + 1,
        max_seqlen=training.length,
        head_chunks=training.head_chunks,
        recompute=Recompute(block=training.recompute),
        master_dtype=getattr(torch, training.master),
        seed=seed,
        axes=axes_of(training, world),
    )
    return bench.assemble(
        model_of(training.preset, layers=training.layers, **tied),
        settings,
        recipe=training.recipe,
        optimizer=training.optimizer,
        offload=frozenset(training.offload),
        lora=bench.adapters(training.rank, dropout=training.dropout) if training.lora else None,
        weight_format=None if training.base == "bf16" else training.base,
    )


def engine_of(assembly: Assembly, mesh: Mesh, *, seed: int = 0, routes: Routes = "zipf") -> Engine:
    """The engine of a rank, with random weights that are the same on every rank."""
    source = Weights(seed=seed, std=0.02, device=assembly.settings.device, routes=routes)
    return Engine(assembly, source, mesh=mesh, progress=gpu_lora.forget_the_set_up)


def step_batches(training: Training, mesh: Mesh, *, step: int = 0) -> list[MicroBatch | BatchCounts]:
    """The micro-batches of an optimizer step as a rank gets them: those of other ranks as counts."""
    batch = partial(
        bench.random_batch,
        PRESETS[training.preset]["vocab_size"],
        rows=training.rows,
        length=training.length,
        borders=training.rows + 1,
    )
    total = training.total(mesh.world)
    sharing = Sharing.of(mesh, axes_of(training, mesh.world))
    own = sharing.share(total).numbers
    # All have equal counts: every token is a label.
    counts = batch(seed=0).counts()
    return [batch(seed=step * total + j) if j in own else counts for j in range(total)]


def loads_of_ranks(result: StepResult, ranks: int, micro_batches: int) -> dict[str, float]:
    """Rows of the busiest of the ranks that share out experts by their mean, mean over the layers: of the whole step,
    as routed; and, where they even them out, of a micro-batch before and after, with the share of the rows that move.
    """
    sides: Any = result.sides().values()
    tokens_LE = next((total for role, total in sides if role == "expert_tokens"), None)
    if tokens_LE is None:
        return {}
    loads_LC = tokens_LE.double().unflatten(1, (ranks, -1)).sum(2)
    found = {"step": float((loads_LC.amax(1) / loads_LC.mean(1)).mean())}
    for total_LF in (total for role, total in sides if role == "rank_loads"):
        before, after, moved, _ = (total_LF.double().mean(0) / micro_batches).tolist()
        found |= {"routed": before, "evened": after, "moved": moved}
    return found


def cpu_times(function: Callable[[], object], count: int) -> list[float]:
    """Milliseconds of each call, on a CPU."""
    times = []
    for _ in range(count):
        before = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - before))
    return times
