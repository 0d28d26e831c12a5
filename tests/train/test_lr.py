"""Learning-rate schedules against transformers', and their properties."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from surogate_core.train.lr import faded, learning_rate, warmup_length

PEAK = 3e-4


def reference(schedule, warmup: int, total: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    scheduler = schedule(optimizer, warmup, total)
    rates = []
    for _ in range(total):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    ("kind", "schedule"), [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)]
)
def test_equals_transformers(kind, schedule, warmup: int) -> None:
    """Equal from the warm-up's end on; in the warm-up ours is one step ahead, as theirs begins at rate 0."""
    total = 50
    theirs = reference(schedule, warmup, total)
    ours = [learning_rate(step, total_steps=total, peak=PEAK, kind=kind, warmup_steps=warmup) for step in range(total)]
    assert ours[warmup:] == pytest.approx(theirs[warmup:], rel=1e-12, abs=1e-18)
    assert ours[:warmup] == pytest.approx(theirs[1 : warmup + 1], rel=1e-12)


def test_wsd_holds_then_falls() -> None:
    rates = [learning_rate(s, total_steps=100, peak=1.0, kind="wsd", warmup_steps=4) for s in range(100)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert set(rates[4:91]) == {1.0}
    assert rates[90:] == pytest.approx([1 - i / 10 for i in range(10)])
    longer = [learning_rate(s, total_steps=100, peak=1.0, kind="wsd", cooldown_steps=50) for s in range(100)]
    assert longer[50] == 1.0
    assert longer[75] == pytest.approx(0.5)


def test_constant() -> None:
    rates = [learning_rate(s, total_steps=10, peak=2.0, kind="constant", warmup_steps=2) for s in range(10)]
    assert rates == [1.0] + [2.0] * 9
    cooled = learning_rate(9, total_steps=10, peak=2.0, kind="constant", cooldown_steps=4, final_fraction=0.5)
    assert cooled == pytest.approx(1.25)


def test_warmup_length() -> None:
    assert warmup_length(total_steps=101, warmup_steps=0, warmup_ratio=0.1) == math.ceil(10.1)
    assert warmup_length(total_steps=101, warmup_steps=5, warmup_ratio=0.0) == 5
    assert warmup_length(total_steps=101, warmup_steps=0, warmup_ratio=0.0) == 0


@given(
    kind=st.sampled_from(["linear", "cosine", "wsd", "constant"]),
    total=st.integers(1, 300),
    warmup=st.integers(0, 350),
    cooldown=st.integers(0, 350),
    final=st.floats(0, 1),
)
def test_bounds_and_continuity(kind, total: int, warmup: int, cooldown: int, final: float) -> None:
    rates = [
        learning_rate(
            step,
            total_steps=total,
            peak=PEAK,
            kind=kind,
            warmup_steps=warmup,
            cooldown_steps=cooldown,
            final_fraction=final,
        )
        for step in range(total)
    ]
    warm = min(warmup, total)
    assert all(0 < rate <= PEAK * (1 + 1e-12) for rate in rates)
    assert all(rate >= PEAK * final * (1 - 1e-12) for rate in rates[warm:])
    assert rates[:warm] == sorted(rates[:warm])
    # Never a rise after the warm-up, and never a jump: at most the steepest phase's slope a step.
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(rates[warm:]))
    if kind == "wsd" and cooldown == 0:
        cooldown = math.ceil(total / 10)
    cool = min(cooldown, total - warm)
    slopes = [1 / warm if warm else 0, 1 / cool if cool else 0, math.pi / 2 / (total - warm) if total > warm else 0]
    steepest = PEAK * max(slopes) * (1 + 1e-9)
    assert all(abs(b - a) <= steepest for a, b in pairwise(rates))


def test_a_factor_that_blends_back() -> None:
    assert [faded(0.5, since=s, steps=4) for s in range(6)] == [0.5, 0.625, 0.75, 0.875, 1.0, 1.0]
