"""The learning rate of each step: warm-up, the schedule that `lr_scheduler_type` names, cool-down."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surogate_core.bundles.schedules import ScheduleContext, ScheduleSpec
from surogate_core.errors import PluginError, SurogateError

if TYPE_CHECKING:
    from surogate_core.config.schema import RunConfig
    from surogate_core.plugins.registry import Registry

CHECKED_AT_ONCE = 10_000
"""Largest number of steps, spread over the run, whose rates are computed before the first step to check them."""


def linear(options: Any, context: ScheduleContext) -> Callable[[int], float]:
    """From 1 to 0 at the end of the run, one past the last step, as in transformers."""
    return lambda step: 1.0 - step / context.steps


def cosine(options: Any, context: ScheduleContext) -> Callable[[int], float]:
    """Half a wave from 1 to 0 at the end of the run, one past the last step, as in transformers."""
    return lambda step: 0.5 * (1.0 + math.cos(math.pi * (step / context.steps)))


def constant(options: Any, context: ScheduleContext) -> Callable[[int], float]:
    """1 for every step."""
    return lambda step: 1.0


SCHEDULES = (
    ScheduleSpec(name="linear", build=linear),
    ScheduleSpec(name="cosine", build=cosine),
    ScheduleSpec(name="wsd", build=constant, falls=False, cooldown=0.1),
    ScheduleSpec(name="constant", build=constant, falls=False),
)
"""The schedules of the core."""


def warmup_length(*, total_steps: int, warmup_steps: int, warmup_ratio: float) -> int:
    """Warm-up in steps; a ratio is rounded up, as transformers does."""
    return warmup_steps or math.ceil(total_steps * warmup_ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The learning rates of a configuration, for any number of steps."""

    spec: ScheduleSpec
    options: Any
    """Instance of the schedule's options."""
    owner: str
    """The plugin that offers the schedule, as messages name it."""
    peak: float
    """Learning rate at the end of the warm-up."""
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    cooldown_steps: int = 0
    final_fraction: float = 0.0

    @classmethod
    def of(cls, config: RunConfig, registry: Registry) -> Schedule:
        """That of a run; raises `PluginError` if no plugin offers the schedule."""
        spec: ScheduleSpec = registry.get("schedule", config.lr_scheduler_type)
        return cls(
            spec=spec,
            options=spec.options_of(config),
            owner=registry.bundles("schedule")[spec.name].plugin.label,
            peak=config.learning_rate,
            warmup_steps=config.warmup_steps,
            warmup_ratio=config.warmup_ratio,
            cooldown_steps=config.cooldown_steps,
            final_fraction=config.final_lr_fraction,
        )

    def rates(self, total_steps: int) -> Callable[[int], float]:
        """Optimizer step, 0 for the first → its learning rate, in a run of `total_steps`.

        Warm-up: step s of w has peak·(s+1)/w, so that no step is lost at rate 0 and the last has the peak. Then the
        schedule says the rate. The cool-down takes the last `cooldown_steps` and falls linearly, from where the
        schedule is at its beginning to the final rate, one past the last step. A warm-up and cool-down longer than the
        run are cut at its end, the warm-up served first.

        Raises `PluginError` if the schedule fails or gives a rate that is negative or not finite: for one of
        `CHECKED_AT_ONCE` steps now, and for any other when its rate is asked for.
        """
        length = warmup_length(total_steps=total_steps, warmup_steps=self.warmup_steps, warmup_ratio=self.warmup_ratio)
        warmup = min(length, total_steps)
        cooldown_steps = self.cooldown_steps or math.ceil(total_steps * self.spec.cooldown)
        cooldown = min(cooldown_steps, total_steps - warmup)
        begin, final = total_steps - cooldown, self.peak * self.final_fraction
        scheduled = self._scheduled(ScheduleContext(steps=total_steps - warmup, warmup=warmup))

        def rate(step: int) -> float:
            assert 0 <= step < total_steps
            if step < warmup:
                return self.peak * (step + 1) / warmup
            if step < begin:
                return scheduled(step)
            return final + (scheduled(begin) - final) * (total_steps - step) / cooldown

        for step in range(0, total_steps, math.ceil(total_steps / CHECKED_AT_ONCE) or 1):
            rate(step)
        return rate

    def note(self, total_steps: int) -> str | None:
        """A sentence for a run whose warm-up leaves the schedule no step; None for any other."""
        length = warmup_length(total_steps=total_steps, warmup_steps=self.warmup_steps, warmup_ratio=self.warmup_ratio)
        if not 0 < total_steps <= length:
            return None
        key, value = ("warmup_steps", self.warmup_steps) if self.warmup_steps else ("warmup_ratio", self.warmup_ratio)
        return (
            f"Every step of this run ({total_steps}) is warm-up ({key}={value:g}), so "
            f"lr_scheduler_type={self.spec.name} has no effect. Fix: {key}=0, or more steps."
        )

    def _scheduled(self, context: ScheduleContext) -> Callable[[int], float]:
        """Optimizer step of the run, past the warm-up → the rate that the schedule gives it."""
        name, final = f"{self.owner}: schedule {self.spec.name}", self.peak * self.final_fraction
        if context.steps == 0:
            return lambda step: self.peak
        try:
            factor_of = self.spec.build(self.options, context)
        except SurogateError:
            raise
        except Exception as error:
            raise PluginError(f"{name} failed for {context}: {type(error).__name__}: {error}") from error

        def scheduled(step: int) -> float:
            try:
                factor = float(factor_of(step - context.warmup))
            except Exception as error:
                raise PluginError(f"{name} failed for step {step}: {type(error).__name__}: {error}") from error
            rate = final + (self.peak - final) * factor if self.spec.falls else self.peak * factor
            if not (math.isfinite(factor) and factor >= 0 and math.isfinite(rate)):
                raise PluginError(
                    f"{name} returned the factor {factor} for step {step}, {step - context.warmup} after the warm-up. "
                    f"A factor is finite and not negative."
                )
            return rate

        return scheduled


def check_rates(config: RunConfig, registry: Registry) -> None:
    """Compute the rates of a run that says how many steps it has, before any long work; raises as `Schedule.rates`."""
    if config.max_steps > 0:
        Schedule.of(config, registry).rates(config.max_steps)


def faded(scale: float, *, since: int, steps: int) -> float:
    """A factor that is `scale` at first and blends back to 1, linearly, `since` of `steps` steps later."""
    return scale + (1.0 - scale) * min(1.0, since / steps)
