"""The figures of events as named scalars, so that every back end shows them under the same names."""

from __future__ import annotations

from surogate_core.events import (
    BlockFigures,
    EvalEnd,
    Event,
    GpuStats,
    PrecisionStats,
    RankStats,
    RolloutEval,
    Rollouts,
    RolloutSample,
    RolloutSamples,
    RoutingStats,
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
