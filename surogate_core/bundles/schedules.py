"""Schedules of the learning rate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surogate_core.bundles.options import NoOptions, options_from_flat

if TYPE_CHECKING:
    from surogate_core.bundles.handed import RunKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleContext:
    """The run for which a schedule is built."""

    steps: int
    """Optimizer steps from the end of the warm-up to the end of the run, a cool-down included; at least 1."""
    warmup: int
    """Optimizer steps of the warm-up before them; 0 if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleSpec:
    """A schedule: the shape of the learning rate between warm-up and cool-down, which the core adds to every one."""

    name: str
    """The value of the key `lr_scheduler_type`."""
    build: Callable[[Any, ScheduleContext], Callable[[int], float]]
    """(options, context) → (step → factor). Step 0 is the first after the warm-up, `context.steps` - 1 the run's last.
    A factor is finite and not negative, and depends on the step alone: a run that resumes asks for any step first."""
    options: type = NoOptions
    """Dataclass of its own options; every field has a default. Flat keys set them."""
    falls: bool = True
    """True: the rate falls from learning_rate (factor 1) to the final rate (factor 0), learning_rate ·
    `final_lr_fraction`. False: the rate is learning_rate · factor, and only a cool-down ends at the final rate."""
    cooldown: float = 0.0
    """If `cooldown_steps` is 0, the core's cool-down takes this share of the run's steps, rounded up."""

    def options_of(self, config: RunKeys) -> Any:
        """The options, which flat keys of the configuration set."""
        return options_from_flat(self.options, config.flat)
