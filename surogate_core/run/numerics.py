"""`surogate numerics`: trains the same model from the same start on the same data under each recipe.

It also measures how each recipe rounds the operands of every projection of the first run's trained model. Shape
suffixes: N tokens, D features, I inputs, O outputs, V vocabulary, P slots, K roles.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from surogate_core.batch import MicroBatch
from surogate_core.bundles import Role
from surogate_core.config.schema import RunConfig
from surogate_core.data.pipeline import PreparedData, prepare
from surogate_core.data.sampler import collate
from surogate_core.dsl.slots import LinearSlot
from surogate_core.engine.engine import Engine, StepResult
from surogate_core.errors import UserError
from surogate_core.events import Progress
from surogate_core.kernels import ops
from surogate_core.run.assemble import resolve_device, resolve_model, resolve_recipe
from surogate_core.run.build import Choice, build_engine
from surogate_core.run.ranks import on_one_gpu
from surogate_core.run.tokenizer_of_run import tokenizer_of_run
from surogate_core.train.drive import drive
from surogate_core.train.precision import PrecisionWatch

if TYPE_CHECKING:
    from surogate_core.plugins.registry import Registry

ROLES: tuple[Role, ...] = get_args(Role)
LAST = 20
"""Number of last steps whose mean loss represents the run if nothing is held out."""

Rounding = Callable[[Tensor, Role], tuple[Tensor, Tensor]]
"""(matrix, role) → (rounded values, mask of clipped values)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One run's figures."""

    name: str
    """The name as given: the recipe and the changed keys."""
    recipe: str
    note: str | None
    """The recipe's notes, such as that it emulates."""
    losses: list[float]
    """Training loss of each step."""
    held: list[tuple[int, float]]
    """(step, held-out loss), the first before any step; empty if nothing is held out."""
    saturated: Mapping[str, float] | None
    """Role → share of the tensors of all steps that their delayed scale clipped; None without delayed scales."""
    underflowed: Mapping[str, float] | None
    """Role → share of the tensors below the format's normal numbers."""

    @property
    def loss(self) -> float:
        """The last held-out loss, or the mean training loss of the last steps."""
        last = self.losses[-LAST:]
        return self.held[-1][1] if self.held else sum(last) / len(last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounded:
    """How a recipe rounds the operands of one role in one layer."""

    layer: int
    role: str
    recipe: str
    error: float
    """Root of the sum of squared errors divided by the root of the sum of squares."""
    to_zero: float
    """Share of the non-zero values that become zero."""
    saturated: float
    """Share of the values that are clipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """All results."""

    model: str
    parameters: int
    device: str
    torch: str
    steps: int
    tokens_per_step: int
    seed: int
    trainings: list[Training]
    """The runs; the others are compared with the first."""
    rounding: list[Rounded]


def measure(
    runs: Sequence[tuple[str, RunConfig]], registry: Registry, *, progress: Callable[[Progress], None]
) -> Numerics:
    """Train each (name, config) on one GPU, the first as the reference. They may differ in everything except the data.

    Raises `UserError` if the first run would quantise its weights, or if a run diverges.
    """
    runs = [(name, on_one_gpu(config)) for name, config in runs]
    first = runs[0][1]
    if first.lora and registry.get("recipe", first.recipe.name).packs:
        raise UserError(
            f"{runs[0][0]}: keeps frozen weights rounded, so they cannot be rounded anew. "
            f"Fix: name bf16 first, or set lora=false."
        )
    resolved = resolve_model(first, registry)
    tokenizer, _ = tokenizer_of_run(
        first, vocab_size=resolved.model.vocab_size, pretrained=resolved.weights is not None
    )
    spec = registry.get("task", first.task)
    data = prepare(first, tokenizer, registry.all("dataset"), trains_prompts=spec.trains_prompts, progress=progress)
    device = resolve_device(first)
    roundings: dict[str, Rounding] = {}
    for _, config in runs:
        recipe = resolve_recipe(config, registry, device)
        if recipe.rounded is not None:
            roundings.setdefault(recipe.name, recipe.rounded)
    trainings: list[Training] = []
    prefer: Choice | None = None
    found: list[Rounded] = []
    parameters = 0
    for name, config in runs:
        engine, training = _train(name, config, registry, data, progress, prefer=prefer)
        # All of them compute the same values again, if memory allows it.
        prefer = prefer or Choice.taken(engine.settings)
        trainings.append(training)
        if len(trainings) == 1:
            parameters = engine.parameters.counts()[0]
            found = rounding_of(engine, collate(data.train, list(range(first.per_device_train_batch_size))), roundings)
        del engine
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return Numerics(
        model=resolved.title,
        parameters=parameters,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch=torch.__version__,
        steps=len(trainings[0].losses),
        tokens_per_step=first.per_device_train_batch_size * first.gradient_accumulation_steps * first.sequence_len,
        seed=first.train_seed,
        trainings=trainings,
        rounding=found,
    )


def _train(
    name: str,
    config: RunConfig,
    registry: Registry,
    data: PreparedData,
    progress: Callable[[Progress], None],
    *,
    prefer: Choice | None,
) -> tuple[Engine, Training]:
    task = registry.get("task", config.task).build(config, data)
    engine = build_engine(
        config,
        registry,
        resolve_model(config, registry),
        sample=task.sample(),
        progress=lambda task, done, total: progress(Progress(task=f"{name}: {task}", done=done, total=total)),
        prefer=prefer,
    )
    watch = PrecisionWatch.of(engine)
    held: list[tuple[int, float]] = []
    losses: list[float] = []
    for taken in drive(config, engine, task.steps(), task.evaluation()):
        if taken.result is not None:
            losses.append(_finite_loss(name, taken.step, taken.result, config))
            if watch is not None:
                watch.observe(taken.result.used_range(watch.columns))
            progress(Progress(task=f"{name}: training", done=taken.step, total=taken.total, unit="steps"))
        if taken.held is not None:
            held.append((taken.step, taken.held))
    recipe = resolve_recipe(config, registry, engine.settings.device)
    scales = watch.take(len(losses)) if watch is not None else None
    return engine, Training(
        name=name,
        recipe=recipe.name,
        note=recipe.note,
        losses=losses,
        held=held,
        saturated=scales.saturated if scales else None,
        underflowed=scales.underflowed if scales else None,
    )


def _finite_loss(name: str, step: int, result: StepResult, config: RunConfig) -> float:
    """The loss of a step; raises `UserError` if it or the gradient norm is not finite."""
    loss, norm = result.read()
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise UserError(
            f"{name}: step {step}: the loss is {loss:.6g} and the gradient norm {norm:.6g}. "
            f"Fix: lower learning_rate (now {config.learning_rate:g}), or look at the data."
        )
    return loss


# --------------------------------------------------------------------------------- rounding


class _Sums:
    """Sums over the tensors of a layer, role and recipe."""

    def __init__(self) -> None:
        self._totals = torch.zeros(5, dtype=torch.float64)

    def add(self, x: Tensor, rounded: Tensor, beyond: Tensor) -> None:
        wide = x.double()
        sums = (
            (rounded.double() - wide).square().sum(),
            wide.square().sum(),
            ((rounded == 0) & (x != 0)).sum(),
            beyond.sum(),
            torch.tensor(x.numel()),
        )
        self._totals += torch.stack([s.double().cpu() for s in sums])

    def figures(self) -> tuple[float, float, float]:
        """(relative error, share that becomes zero, share that is clipped); an error of 0 if all values are 0."""
        error, size, zeros, beyond, count = self._totals.tolist()
        return math.sqrt(error / size) if size else 0.0, zeros / count, beyond / count


def rounding_of(engine: Engine, batch: MicroBatch, roundings: Mapping[str, Rounding]) -> list[Rounded]:
    """How each recipe rounds the operands of the engine's projections, by layer and role, on one micro-batch.

    The blocks are run eagerly and multiply plainly, so operands are those of a model without rounding.
    """
    sums: dict[tuple[int, str, str], _Sums] = defaultdict(_Sums)
    layer = 0

    @torch.no_grad()
    def add(at: int, role: Role, x: Tensor) -> None:
        for name, rounding in roundings.items():
            sums[at, role, name].add(x, *rounding(x, role))

    def record(x_NI: Tensor, weight_OI: Tensor, slot: LinearSlot) -> Tensor:
        at, y_NO = layer, x_NI @ weight_OI.t()
        add(at, "activation", x_NI.detach())
        add(at, "weight", weight_OI.detach())
        y_NO.register_hook(lambda dy_NO: add(at, "gradient", dy_NO))
        return y_NO

    engine.inputs.load(batch, engine.seeds(0, 0), 1.0)
    tables = {
        **engine.model.tables(engine.inputs.positions, engine.settings.dtype),
        "cu_seqlens": engine.inputs.cu_seqlens,
    }
    (embedding,) = engine.parameters.inputs(engine.plan.embed)
    with torch.enable_grad():
        x_ND = torch.nn.functional.embedding(engine.inputs.input_ids, embedding).detach().requires_grad_()
        for piece in engine.plan.layers:
            assert piece.block is not None
            tensors = {s.name: t for s, t in zip(piece.specs, engine.parameters.inputs(piece), strict=True)}
            bound = piece.block.bind(tensors, piece.slots, gemm=record, seed=None)
            x_ND, _ = bound.outputs(x_ND, tables)
            layer += 1
        head = engine.plan.head
        tensors = {s.name: t for s, t in zip(head.specs, engine.parameters.inputs(head), strict=True)}
        logits_NV = engine.model.logits(x_ND, tensors)
        loss = ops.cross_entropy(logits_NV, engine.inputs.labels).sum() / max(1, batch.label_tokens)
        loss.backward()
    return [
        Rounded(layer=at, role=role, recipe=name, error=error, to_zero=zeros, saturated=cut)
        for at in range(layer)
        for role in ROLES
        for name in roundings
        for error, zeros, cut in [sums[at, role, name].figures()]
    ]
