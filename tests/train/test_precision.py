"""Statistics of delayed scales: counts by role, and events of a run under fp8-hybrid."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from surogate_core.train import loop
from surogate_core.train.precision import PrecisionWatch

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]
FORMATS = {"activation": 2.0**-14, "weight": 2.0**-14, "gradient": 2.0**-29}
NAMES = ["layer 0 q_proj", "layer 1 q_proj"]


def test_tensors_are_counted_by_role_over_the_steps() -> None:
    watch = PrecisionWatch(NAMES, FORMATS)
    watch.observe(torch.tensor([[1.5, 0.0, 0.5], [1.0 + 2.0**-23, 0.0, 2.0**-30]]))
    watch.observe(torch.tensor([[0.5, 0.0, 0.0], [2.0**-15, 0.0, 3.0]]))
    stats = watch.take(7)
    assert stats is not None
    assert (stats.step, stats.steps) == (7, 2)
    # A role of which nothing was scaled is not among them: weights may be frozen.
    assert stats.saturated == {"activation": 1 / 4, "gradient": 1 / 3}
    assert stats.underflowed == {"activation": 1 / 4, "gradient": 1 / 3}
    assert (stats.worst, stats.worst_excess) == ("layer 1 q_proj gradient", 3.0)


def test_counts_begin_anew_and_what_is_not_finite_is_left_out() -> None:
    watch = PrecisionWatch(NAMES, FORMATS)
    watch.observe(torch.full((2, 3), 2.0))
    assert watch.take(1) is not None
    assert watch.take(1) is None
    watch.observe(torch.tensor([[math.inf, math.nan, 0.0], [0.0, 0.0, 0.0]]))
    assert watch.take(2) is None
    watch.observe(torch.tensor([[math.inf, 0.5, 0.0], [0.0, 0.0, 0.0]]))
    stats = watch.take(3)
    assert stats is not None
    assert (stats.steps, stats.saturated, stats.worst, stats.worst_excess) == (1, {"weight": 0.0}, "", 0.0)


@pytest.mark.slow
def test_a_run_tells_what_saturated_and_trains_as_without(
    tmp_path: Path,
    base: list[str],
    run_here: RunHere,
    records: Records,
    history: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = [*base, "recipe=fp8-hybrid", "lora=true", "max_steps=4", "monitor=[console,jsonl]"]
    monkeypatch.setattr(loop, "WINDOW", 2)
    run_here(tmp_path / "watched", *keys)
    told = records(tmp_path / "watched", "precision_stats")
    assert [(record["step"], record["steps"]) for record in told] == [(2, 2), (4, 2)]
    # The first step scales each tensor by its own largest value, the later ones by those of before.
    for record in told:
        assert record["saturated"].keys() == {"activation", "gradient"}  # base weights are frozen and packed
        assert all(0 <= share <= 1 for share in record["saturated"].values())
    # Some value of the second step is larger than any of the first.
    assert told[0]["saturated"]["gradient"] > 0
    assert told[0]["worst_excess"] > 1
    assert f"worst {told[0]['worst']}" in capsys.readouterr().out
    monkeypatch.setattr("surogate_core.train.precision.PrecisionWatch.of", lambda engine: None)
    run_here(tmp_path / "plain", *keys)
    assert records(tmp_path / "plain", "precision_stats") == []
    assert history(tmp_path / "plain") == history(tmp_path / "watched")


def test_a_recipe_without_scales_tells_nothing(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    run_here(tmp_path / "plain", *base, "max_steps=2")
    assert records(tmp_path / "plain", "precision_stats") == []
