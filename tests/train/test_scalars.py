"""Names and values of the scalars."""

from __future__ import annotations

import math

import pytest

from surogate_core.events import (
    EvalEnd,
    GpuStats,
    PrecisionStats,
    RankStats,
    Rollouts,
    RolloutSamples,
    RoutingStats,
    StepEnd,
)
from surogate_core.train.scalars import SAMPLE_COLUMNS, sample_rows, samples_of, scalars_of
from surogate_testing.monitors import events


def test_every_event_of_a_run() -> None:
    found = [(type(event), *scalars_of(event)) for event in events()]
    silent = [kind for kind, _, named in found if not named]
    assert not {StepEnd, EvalEnd, GpuStats, PrecisionStats, Rollouts, RoutingStats} & set(silent)
    step = next(named for kind, at, named in found if kind is StepEnd and at == 2)
    assert step["train/loss"] == 1.5
    assert step["train/speed_of_light"] == 0.4
    assert step["train/rewards/margins"] == 0.2
    assert len(step) == 9
    bad = next(named for kind, at, named in found if kind is StepEnd and at == 3)
    assert math.isnan(bad["train/loss"])
    assert bad["train/grad_norm"] == math.inf
    evaluations = [named for kind, _, named in found if kind is EvalEnd]
    assert evaluations == [{"eval/loss": 4.0}, {"eval/loss": 2.0, "eval/gap": 0.5, "eval/rewards/margins": 0.2}]
    (gpu,) = [named for kind, _, named in found if kind is GpuStats]
    assert gpu["gpu/power_watts"] == 400.0
    (ranks,) = [named for kind, _, named in found if kind is RankStats]
    assert ranks == {"ranks/peak_memory_bytes_max": 2.0**31, "ranks/slowest_excess": pytest.approx(1 / 3)}
    assert scalars_of(RankStats(step=1, peak_memory_bytes=(1, 2))) == (1, {"ranks/peak_memory_bytes_max": 2.0})
    (precision,) = [named for kind, _, named in found if kind is PrecisionStats]
    assert precision == {
        "precision/saturated_activation": 0.1,
        "precision/saturated_gradient": 0.0,
        "precision/underflowed_activation": 0.0,
    }


def test_completions_have_their_rewards_with_them() -> None:
    (event,) = (e for e in events() if isinstance(e, RolloutSamples))
    assert list(samples_of(event).values()) == [
        "[reward 1, stop, 2 tokens] 2 + 2\n→  4",
        "[no reward, timeout, 8 tokens] 2 + 2\n→  [",
    ]
    rows = [dict(zip(SAMPLE_COLUMNS, row, strict=True)) for row in sample_rows(event)]
    assert [(row["completion"], row["reward"], row["ended by"]) for row in rows] == [
        (" 4", 1.0, "stop"),
        (" [", None, "timeout"),
    ]
