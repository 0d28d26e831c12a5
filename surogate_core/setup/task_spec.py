"""The chosen task: its options, the objective that it trains, and how it is built."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.bundles.options import flat_marks
from surogate_core.bundles.tasks import OnlineContext, Together
from surogate_core.config.names import named_for
from surogate_core.config.schema import KEYS
from surogate_core.config.sharing import online_problems
from surogate_core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from typing import TypeAlias

    from transformers import PreTrainedTokenizerBase

    from surogate_core.bundles import (
        AdvantageSpec,
        Objective,
        ObjectiveSpec,
        PolicyLossSpec,
        ScheduleSpec,
        Steps,
        Task,
        TaskSpec,
    )
    from surogate_core.config.schema import RunConfig
    from surogate_core.data.pipeline import PreparedData
    from surogate_core.events import Event
    from surogate_core.plugins.registry import Registry
    from surogate_core.setup.assemble import ResolvedModel

    NamedOffer: TypeAlias = TaskSpec | ObjectiveSpec | ScheduleSpec | PolicyLossSpec | AdvantageSpec


def task_spec(config: RunConfig, registry: Registry) -> TaskSpec:
    """The task of a run."""
    spec: TaskSpec = registry.get("task", config.task)
    return spec


def named_offers(config: RunConfig, registry: Registry) -> list[NamedOffer]:
    """The task, its parts, and the other offers that a key of the configuration names."""
    task = task_spec(config, registry)
    named = {kind: getattr(config, key) for kind, key in named_for(task).items()}
    return [task, *(registry.get(kind, name) for kind, name in {**named, **task.chosen(config, registry)}.items())]


def option_keys(config: RunConfig, registry: Registry) -> frozenset[str]:
    """The flat keys that set options of the task, and of the other offers that a key names."""
    return frozenset(mark.key for spec in named_offers(config, registry) for mark in flat_marks(spec.options).values())


def objective_of(config: RunConfig, registry: Registry) -> Objective:
    """The task's own objective, or the one that the key `objective` names."""
    spec = task_spec(config, registry)
    if spec.objective is not None:
        parts = () if spec.parts is None else (spec.parts_of(config, registry),)
        return spec.objective(spec.options_of(config), *parts)
    chosen: ObjectiveSpec = registry.get("objective", config.objective)
    return chosen.build(chosen.options_of(config))


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What an online task gets of the run that it is part of."""

    emit: Callable[[Event], None] = lambda event: None
    """Shows an event to the monitors."""
    stopped: Callable[[], bool] = lambda: False
    """Whether a signal has come."""
    together: Together = field(default_factory=Together)
    """The ranks of the run."""


def online_task(
    config: RunConfig,
    registry: Registry,
    resolved: ResolvedModel,
    tokenizer: PreTrainedTokenizerBase,
    data: PreparedData | None,
    surroundings: Surroundings,
) -> Task:
    """The task of a spec with `online`. Raises `ConfigError` if several GPUs, whose number may be known only now,
    contradict other keys.
    """
    spec = task_spec(config, registry)
    assert spec.online is not None
    if config.gpus > 1:
        problems = online_problems(spec.name, {key: getattr(config, key) for key in KEYS})
        problems += list(spec.check(config, spec.options_of(config), registry)) if spec.check is not None else []
        if problems:
            raise ConfigError(problems)
    own: dict[str, Any] | None = resolved.weights.generation_config() if resolved.weights is not None else None
    return spec.online(
        OnlineContext(
            config=config,
            options=spec.options_of(config),
            tokenizer=tokenizer,
            registry=registry,
            generation_config=own or {},
            emit=surroundings.emit,
            stopped=surroundings.stopped,
            directory=Path(config.place),
            parts=spec.parts_of(config, registry),
            data=data,
            together=surroundings.together,
        )
    )


def check_end(config: RunConfig, steps: Steps) -> None:
    """Raise `ConfigError` if nothing says how many steps the run has."""
    if config.max_steps <= 0 and not math.isfinite(steps.steps_per_epoch):
        message = f"must be set: task {config.task} makes its data while it trains, so an epoch never ends."
        raise ConfigError([Problem(key="max_steps", message=message, fix="max_steps=200")])
