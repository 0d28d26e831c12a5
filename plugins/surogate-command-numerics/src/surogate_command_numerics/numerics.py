"""`surogate numerics`: trains the same model from the same start on the same data under each recipe.

It also measures how each recipe and weight format rounds the operands of every projection of the first run's trained
model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from surogate_command_numerics.rounding import OperandRounding, Roundings, rounding_of
from surogate_core.plugin import PreparedData, ReferencedTask, UserError, collate, dsl, events, significant
from surogate_core.service.config import RunConfig
from surogate_core.service.data import prepare
from surogate_core.service.engine import Engine, StepResult
from surogate_core.service.setup import (
    MemorySettings,
    add_references,
    build_engine,
    identity_of,
    on_one_gpu,
    policy_of,
    resolve_device,
    resolve_model,
    resolve_recipe,
    resolve_weight_format,
    task_spec,
    tokenizer_of_run,
)
from surogate_core.service.training import PrecisionWatch, Schedule, drive

if TYPE_CHECKING:
    from surogate_core.service.plugins import Registry

LAST = 20
"""Number of last steps whose mean loss represents the run if nothing is held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One run's figures."""

    name: str
    """The name as given: the recipe and the changed keys."""
    recipe: str
    weight_format: str | None
    """The format in which it keeps frozen weights."""
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
    rounding: list[OperandRounding]


def measure(
    runs: Sequence[tuple[str, RunConfig]], registry: Registry, *, progress: Callable[[events.Progress], None]
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
    spec = task_spec(first, registry)
    if spec.online is not None:
        raise UserError(f"task {spec.name}: samples from the model, so runs of it see different data. Fix: task=sft")
    data = prepare(
        first,
        tokenizer,
        registry.all("dataset"),
        trains_prompts=spec.trains_prompts,
        group=spec.group,
        progress=progress,
    )
    device = resolve_device(first)
    roundings = _roundings([config for _, config in runs], registry, resolved.model, device)
    trainings: list[Training] = []
    prefer: MemorySettings | None = None
    found: list[OperandRounding] = []
    parameters = 0
    for name, config in runs:
        engine, training = _train(name, config, registry, data, progress, prefer=prefer)
        # All of them compute the same values again, if memory allows it.
        prefer = prefer or MemorySettings.taken(engine.settings)
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


def _roundings(
    configs: Sequence[RunConfig], registry: Registry, model: dsl.Model, device: torch.device
) -> dict[str, Roundings]:
    """Recipe or weight format → how it rounds. The formats only if the first run, which is measured, has none."""
    found: dict[str, Roundings] = {}
    formats = [resolve_weight_format(config, registry, model) for config in configs]
    for config, weight_format in zip(configs, formats, strict=True):
        recipe = resolve_recipe(config, registry, device)
        found.setdefault(recipe.name, Roundings.of(recipe))
        if weight_format is not None and formats[0] is None:
            found.setdefault(weight_format.name, Roundings.of_format(weight_format))
    return {name: one for name, one in found.items() if one.dense or one.experts}


def _train(
    name: str,
    config: RunConfig,
    registry: Registry,
    data: PreparedData,
    progress: Callable[[events.Progress], None],
    *,
    prefer: MemorySettings | None,
) -> tuple[Engine, Training]:
    task, resolved = task_spec(config, registry).task_of(config, data), resolve_model(config, registry)
    engine = build_engine(
        config,
        registry,
        resolved,
        sample=task.sample(),
        progress=lambda task, done, total: progress(events.Progress(task=f"{name}: {task}", done=done, total=total)),
        prefer=prefer,
    )
    if isinstance(task, ReferencedTask):
        policy = policy_of(identity_of(config, registry, resolved)["essential"], config, registry, {})
        add_references(config, engine, task, policy=policy, show=progress)
    watch = PrecisionWatch.of(engine)
    held: list[tuple[int, float]] = []
    losses: list[float] = []
    for taken in drive(config, engine, task.steps(), task.evaluation(), Schedule.of(config, registry)):
        if taken.result is not None:
            losses.append(_finite_loss(name, taken.step, taken.result, config))
            if watch is not None:
                watch.observe(taken.result.used_range(watch.columns))
            progress(events.Progress(task=f"{name}: training", done=taken.step, total=taken.total, unit="steps"))
        if taken.held is not None:
            held.append((taken.step, taken.held))
    recipe = resolve_recipe(config, registry, engine.settings.device)
    weight_format = resolve_weight_format(config, registry, engine.model)
    of_experts = recipe.note_of_experts if engine.model.expert_slots() else None
    scales = watch.take(len(losses)) if watch is not None else None
    return engine, Training(
        name=name,
        recipe=recipe.name,
        weight_format=weight_format.name if weight_format is not None else None,
        note=" ".join(filter(None, (recipe.note, of_experts))) or None,
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
            f"{name}: step {step}: the loss is {significant(loss, 6)} and the gradient norm {significant(norm, 6)}. "
            f"Fix: lower learning_rate (now {config.learning_rate:g}), or look at the data."
        )
    return loss
