"""Phases, loss guard, early stop and token budget: what the monitor reports, changes and ends, and at which step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from surogate_monitor_adaptive.monitor import AdaptiveMonitor, AdaptiveOptions, replay

from surogate_core.plugin import events
from surogate_testing.run_events import START, curve, falling, info, step

Value = Callable[[int], float]
"""Step, 1 for the first → value."""


# ------------------------------------------------------------------------------- phases


def phases(recorded: Sequence[events.Event]) -> list[tuple[int, str, str]]:
    found = [e for control in replay(recorded, info()) for e in control.events if isinstance(e, events.PhaseChange)]
    return [(e.step, e.previous, e.phase) for e in found]


@pytest.mark.parametrize(
    ("loss", "phase"),
    [
        (lambda at: 2.0 - 0.0011 * 2 * at / 50, "converging"),
        (lambda at: 2.0 - 0.0008 * 2 * at / 50, "plateau"),
        (lambda at: 2.0 + 0.009 * 2 * at / 50, "plateau"),
        (lambda at: 2.0 + 0.012 * 2 * at / 50, "diverging"),
        (lambda at: 2.0 + 1.5 * (-1) ** at, "plateau"),  # single batches scatter, their level is the same
        (lambda at: 2.0 if at < 90 else 2.5 + 0.3 * (-1) ** at, "unstable"),
        (lambda at: 12 * math.exp(-at / 80), "converging"),
    ],
)
def test_phase(loss: Value, phase: str) -> None:
    assert phases(curve(200, loss))[-1][2] == phase


def test_the_first_phase_is_told_when_it_has_lasted() -> None:
    # 50 steps of warm-up, then 25 in which the phase must last.
    assert phases(curve(74, falling)) == []
    assert phases(curve(75, falling)) == [(75, "warmup", "converging")]


def test_a_phase_that_does_not_last_is_not_told() -> None:
    def bump(at: int, length: int) -> float:
        return falling(at) + (0.3 if 300 <= at < 300 + length else 0.0)

    assert phases(curve(500, lambda at: bump(at, 3))) == [(75, "warmup", "converging")]
    assert [p for _, _, p in phases(curve(500, lambda at: bump(at, 40)))] == ["converging", "diverging", "converging"]


# --------------------------------------------------------------------------- loss guard


def controls_at(recorded: Sequence[events.Event], **options: bool) -> list[tuple[int, float | None, int]]:
    """(step, scale, fade) of what changes the rate."""
    monitor = AdaptiveMonitor(AdaptiveOptions(**options), info())
    answers = [(getattr(event, "step", 0), monitor.on_event(event)) for event in recorded]
    return [(at, c.lr_scale, c.fade_steps) for at, c in answers if c is not None and c.lr_scale is not None]


def test_two_reductions_blend_back_and_five_are_for_good() -> None:
    def high(at: int) -> float:
        # Ten jumps in a row, then a quiet step, so that the level never passes for normal.
        return falling(at) + (1.0 if at >= 300 and at % 10 != 9 else 0.0)

    expected = [(300, 0.5, 50), (310, 0.5, 50), *((at, 0.5, 0) for at in range(320, 370, 10))]
    assert controls_at(curve(500, high), auto_lr_reduction=True) == expected
    assert controls_at(curve(500, high)) == []


def test_a_new_level_becomes_normal() -> None:
    found = controls_at(curve(900, lambda at: 2.0 + (1.0 if at >= 300 else 0.0)), auto_lr_reduction=True)
    assert [at for at, _, _ in found] == [300, 310, 320, 330, 340]


def test_what_is_not_finite_is_survived_until_no_reduction_is_left() -> None:
    recorded = curve(119, lambda at: 2.0 if at < 30 else math.nan)
    answers = [control for control in replay(recorded, info(auto_lr_reduction=True)) if control.proceed]
    assert len(answers) == 61  # steps 30 to 90; the seventh reduction is at 90
    assert [c.lr_scale for c in answers].count(0.5) == 7
    assert not any(control.proceed for control in replay(recorded, info()))


# --------------------------------------------------------------------------- early stop


def stopped(recorded: Sequence[events.Event], *, early_stop: bool = True) -> tuple[int, str] | None:
    monitor = AdaptiveMonitor(AdaptiveOptions(early_stop=early_stop), info())
    for event in recorded:
        control = monitor.on_event(event)
        if control is not None and control.stop:
            return getattr(event, "step", 0), control.reason
    return None


def evaluated(loss: Value, count: int, every: int = 10) -> list[events.Event]:
    recorded: list[events.Event] = [START]
    for at in range(1, count * every + 1):
        recorded.append(step(at, falling(at)))
        if at % every == 0:
            recorded.append(events.EvalEnd(step=at, loss=loss(at // every), label_tokens=1, seconds=0.1, gap=None))
    return recorded


def test_stops_when_converged() -> None:
    # Improvements of 0.1 % an evaluation; five losses make a score, and five scores must be high.
    at, reason = stopped(evaluated(lambda n: 2.0 * 0.999**n, 20)) or (0, "")
    assert at == 90
    assert reason.startswith("early stop: converged: score 0.9")
    assert stopped(evaluated(lambda n: 2.0 * 0.999**n, 8)) is None
    assert stopped(evaluated(lambda n: 2.0 * 0.994**n, 20)) is None
    assert stopped(evaluated(lambda n: 2.0 * 0.999**n, 20), early_stop=False) is None


def test_stops_when_the_loss_falls_too_slowly_for_its_flops() -> None:
    def kinked(n: int, share: float) -> float:
        return 10.0 - 0.1 * min(n, 20) - 0.1 * share * max(0, n - 20)

    at, reason = stopped(evaluated(lambda n: kinked(n, 0.1), 40)) or (0, "")
    # 5 evaluations reach back; below half from the third after the kink; five in a row.
    assert at == 270
    assert "of its best rate a FLOP" in reason
    assert stopped(evaluated(lambda n: kinked(n, 0.6), 40)) is None
    # A held-out loss that only ever rises has no best rate.
    assert "has not fallen" in (stopped(evaluated(lambda n: 2.0 + 0.3 * n, 20)) or (0, ""))[1]


def test_stops_after_diverging_for_200_steps() -> None:
    at, reason = stopped(curve(600, lambda at: 2.0 + 0.02 * at)) or (0, "")
    assert (at, reason) == (250, "early stop: the loss has been rising for 200 steps")
    assert stopped(curve(249, lambda at: 2.0 + 0.02 * at)) is None


def test_stops_after_a_plateau_of_500_steps() -> None:
    at, reason = stopped(curve(900, lambda at: 2.0)) or (0, "")
    assert (at, reason) == (550, "early stop: the loss has not improved for 500 steps")
    assert stopped(curve(900, falling)) is None


# ------------------------------------------------------------------------------- budget


def test_the_token_budget_is_told_at_the_start() -> None:
    start = replace(START, parameters=1000, train_tokens=5000, epochs=2.0)
    assert not replay([start], info())  # a fine-tuning run needs a few epochs, whatever the model's size
    (control,) = replay([start], replace(info(), task="pt"))
    (notice,) = control.events
    assert notice.data == {"budget": 20_000, "planned": 10_000.0}
    expected = "Token budget: 20 × 1,000 parameters = 20,000 tokens; this run trains on 10,000, 50.000% of it."
    assert notice.message == expected
