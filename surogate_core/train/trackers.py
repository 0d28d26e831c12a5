"""What monitors share that log a run to an experiment tracker: names of its figures, and the order of its events."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ClassVar, Literal

from surogate_core.errors import MachineError
from surogate_core.events import (
    Advice,
    BlockFigures,
    Control,
    EvalEnd,
    Event,
    GpuStats,
    Notice,
    PhaseChange,
    PrecisionStats,
    RankStats,
    RolloutEval,
    Rollouts,
    RolloutSample,
    RolloutSamples,
    RoutingStats,
    RunEnd,
    RunInfo,
    RunStart,
    Samples,
    StepEnd,
    event_fields,
)
from surogate_core.files.figures import named_figures
from surogate_core.numbers import significant

STEP_SCALARS = (
    *("loss", "grad_norm", "lr", "epoch", "seconds", "tokens_per_second"),
    *("peak_memory_bytes", "speed_of_light"),
)
"""Fields of a step, named ``train/FIELD``."""

EVAL_SCALARS = ("loss", "gap")
"""Fields of an evaluation, named ``eval/FIELD``."""

GPU_SCALARS = ("utilization", "memory_used_bytes", "power_watts", "temperature_celsius", "sm_clock_mhz")
"""Fields of the GPU's telemetry, named ``gpu/FIELD``."""

ROUTING_SCALARS = (
    *("moe_load_imbalance", "moe_expert_utilization", "moe_worst_imbalance", "moe_entropy", "moe_cv", "moe_top_mass"),
    *("moe_dead_experts", "moe_aux_loss", "moe_aux_loss_raw", "moe_z_loss", "moe_z_loss_raw"),
    *("moe_rank_imbalance", "moe_rank_imbalance_evened", "moe_moved_rows", "moe_moved_bytes"),
)
"""Fields of a mixture of experts, named ``train/FIELD``."""


def scalars_of(event: Event) -> tuple[int, dict[str, float]]:
    """(step, name → value); no names for an event without figures. Values that were not measured are left out."""
    match event:
        case StepEnd():
            return event.step, _named("train", event, STEP_SCALARS) | _objective(event)
        case EvalEnd():
            return event.step, _named("eval", event, EVAL_SCALARS) | _objective(event)
        case Rollouts() | RolloutEval():
            return event.step, named_figures(event_fields(event))
        case GpuStats():
            return event.step, _named("gpu", event, GPU_SCALARS)
        case RankStats():
            memory = {"ranks/peak_memory_bytes_max": float(max(event.peak_memory_bytes))}
            return event.step, memory | ({"ranks/slowest_excess": event.slowest[1]} if event.slowest else {})
        case BlockFigures():
            return event.step, {f"block/{name}": value for name, value in event.figures.items()}
        case RoutingStats():
            return event.step, _named("train", event, ROUTING_SCALARS)
        case PrecisionStats():
            shares = {"saturated": event.saturated, "underflowed": event.underflowed}
            return event.step, {f"precision/{what}_{r}": s for what, by in shares.items() for r, s in by.items()}
    return 0, {}


def _objective(event: StepEnd | EvalEnd) -> dict[str, float]:
    return named_figures({"event": event.name, "figures": event.figures}) if event.figures else {}


def samples_of(event: Samples | RolloutSamples) -> dict[str, str]:
    """``samples/NUMBER`` → the prompt and what the model generated for it, as text; with the reward if it has one."""
    if isinstance(event, RolloutSamples):
        return {f"samples/{number}": _rewarded(sample) for number, sample in enumerate(event.samples, start=1)}
    pairs = zip(event.prompts, event.texts, strict=True)
    return {f"samples/{number}": f"{prompt}\n→ {text}" for number, (prompt, text) in enumerate(pairs, start=1)}


SAMPLE_COLUMNS = ("prompt", "completion", "reward", "advantage", "ended by", "tokens")
"""Columns of `sample_rows`."""


def sample_rows(event: RolloutSamples) -> list[list[str | float | None]]:
    """A row of `SAMPLE_COLUMNS` for each completion."""
    return [[s.prompt, s.completion, s.reward, s.advantage, s.reason, s.length] for s in event.samples]


def _rewarded(sample: RolloutSample) -> str:
    reward = "no reward" if sample.reward is None else f"reward {significant(sample.reward, 4)}"
    facts = ", ".join(filter(None, [reward, sample.reason, f"{sample.length} tokens"]))
    return f"[{facts}] {sample.prompt}\n→ {sample.completion}"


def _named(group: str, event: Event, fields: tuple[str, ...]) -> dict[str, float]:
    values = ((name, getattr(event, name)) for name in fields)
    return {f"{group}/{name}": float(value) for name, value in values if value is not None}


def package(module: str, *, monitor: str, install: str) -> Any:
    """A tracker's own package. `MachineError` says how to install it: when the monitor is built, before the run begins
    anything that takes long.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MachineError(f"monitor {monitor}: its package is not installed. Fix: pip install '{install}'") from error


def plain(value: Any, *, key: Callable[[str], str] = str, finite: bool = False) -> Any:
    """A configuration as JSON values; anything else becomes text, as do NaN and infinity if only `finite` numbers are
    taken. `key`: what each key becomes.
    """
    if isinstance(value, Mapping):
        return {key(str(name)): plain(item, key=key, finite=finite) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, key=key, finite=finite) for item in value]
    if finite and isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


Ended = Literal["finished", "stopped", "signal", "failed", "unknown"]
"""How a run ended: `RunEnd.reason`, or unknown if the monitor is closed before a `RunEnd`."""


class Tracker(ABC):
    """Base of a monitor that logs to an experiment tracker. It reads the events; a subclass logs.

    `run` is what `begin` returned: the tracker's run, None before it and after its end. `id`: the tracker's name for
    it, if `begin` needs one to continue a run that resumes; it is kept in checkpoints.
    """

    title: ClassVar[str] = ""
    """Name of the tracker in the notice that says where the run is."""

    def __init__(self, options: Any, info: RunInfo):
        self.options, self.info = options, info
        self.run: Any = None
        self.id: str | None = None

    @abstractmethod
    def begin(self, event: RunStart) -> tuple[Any, str]:
        """(the tracker's run, where to see it; empty if that needs no notice)."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log named figures; none for an event that has none."""

    @abstractmethod
    def text(self, step: int, name: str, text: str) -> None:
        """Log a text."""

    @abstractmethod
    def finish(self, run: Any, ended: Ended) -> None:
        """End the tracker's run."""

    def samples(self, event: Samples | RolloutSamples) -> None:
        """Log what the model generated: a text for each completion, unless a subclass has something better."""
        for name, text in samples_of(event).items():
            self.text(event.step, name, text)

    def on_event(self, event: Event) -> Control | None:
        """Log the event, if there is something to show."""
        if isinstance(event, RunStart):
            self._end("unknown")
            self.run, where = self.begin(event)
            return Control(events=(Notice(level="info", message=f"{self.title}: {where}"),)) if where else None
        if self.run is None:
            return None
        match event:
            case PhaseChange():
                self.text(event.step, "phase", event.phase)
            case Advice():
                self.text(event.step, f"advice/{event.rule}", f"{event.message} {event.key}: {event.suggestion}.")
            case Samples() | RolloutSamples():
                self.samples(event)
            case RunEnd():
                self._end(event.reason)
            case _:
                self.log(*scalars_of(event))
        return None

    def state(self) -> dict[str, Any]:
        """The id, if there is one."""
        return {} if self.id is None else {"id": self.id}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self.id = state.get("id")

    def close(self) -> None:
        """End a run of which no end was reported."""
        self._end("unknown")

    def _end(self, ended: Ended) -> None:
        run, self.run = self.run, None
        if run is not None:
            self.finish(run, ended)
