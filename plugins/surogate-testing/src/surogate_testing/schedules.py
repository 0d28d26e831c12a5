"""Checks of schedules: a factor for every step of short and long runs, from the step alone."""

from __future__ import annotations

from surogate_core.plugin import bundles
from surogate_core.service.training import Schedule
from surogate_testing.check import ensure

RUNS = ((1, 0), (2, 1), (7, 0), (1000, 30), (1_000_000, 2000))
"""(steps past the warm-up, steps of the warm-up)."""
ALL, SOME = 1000, 97
"""Steps of a run up to which every one is asked for; of a longer run this many, spread over it, and the last."""


def _contexts() -> list[tuple[bundles.ScheduleContext, list[int]]]:
    """The runs, and the steps to ask for."""
    found = []
    for steps, warmup in RUNS:
        asked = [*range(0, steps, 1 if steps <= ALL else steps // SOME), steps - 1]
        found.append((bundles.ScheduleContext(steps=steps, warmup=warmup), asked))
    return found


def gives_a_rate_for_every_step(spec: bundles.ScheduleSpec) -> None:
    """Finite and not negative, with and without warm-up, cool-down and a final rate."""
    for steps, warmup in RUNS:
        for cooldown, final in ((0, 0.0), (steps // 2, 0.1)):
            schedule = Schedule(
                spec=spec,
                options=spec.options(),
                owner="its plugin",
                peak=1e-3,
                warmup_steps=warmup,
                cooldown_steps=cooldown,
                final_fraction=final,
            )
            schedule.rates(steps + warmup)


def does_not_exceed_the_peak(spec: bundles.ScheduleSpec) -> None:
    """A factor is at most 1: `learning_rate` is the largest rate of a run."""
    for context, asked in _contexts():
        factor = spec.build(spec.options(), context)
        for step in asked:
            value = factor(step)
            ensure(value <= 1 + 1e-9, f"the factor of step {step} of {context} is {value}, which is above 1")


def depends_on_the_step_alone(spec: bundles.ScheduleSpec) -> None:
    """Any order of steps, and a schedule that is built again, give equal factors: a run that resumes needs them."""
    for context, asked in _contexts():
        first, second = spec.build(spec.options(), context), spec.build(spec.options(), context)
        forwards = [first(step) for step in asked]
        backwards = [second(step) for step in reversed(asked)][::-1]
        for step, one, other in zip(asked, forwards, backwards, strict=True):
            ensure(one == other, f"step {step} of {context} has the factor {one}, and {other} in another order")


CHECKS = (gives_a_rate_for_every_step, does_not_exceed_the_peak, depends_on_the_step_alone)
