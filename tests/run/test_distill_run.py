"""Distillation in whole runs of small models: a teacher that was trained here, and students from random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surogate_core.errors import ConfigError

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]
DISTILL = ("task=distill", "distill_top_k=8", "distill_kd_weight=1", "learning_rate=3e-2", "lr_scheduler_type=constant")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory, base: list[str], run_here: RunHere) -> Path:
    """A run that trained all weights of a model for a few steps."""
    place = tmp_path_factory.mktemp("teacher") / "run"
    run_here(place, *base, "lora=false", "learning_rate=3e-2")
    return place


def test_a_student_comes_closer_to_its_teacher(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records, teacher: Path
) -> None:
    keys = (*base, *DISTILL, f"distill_teacher={teacher}", "lora=false", "max_steps=12", "eval_steps=6")
    student = "model.config.hidden_size=16"
    run_here(tmp_path / "run", *keys, student)
    losses = [line["loss"] for line in records(tmp_path / "run", "eval_end")]
    assert losses[-1] < 0.5 * losses[0]
    # With the teacher's files in the cache, a second run is equal without reading the teacher again.
    run_here(tmp_path / "again", *keys, student)
    assert [line["loss"] for line in records(tmp_path / "again", "eval_end")] == losses


def test_only_the_rows_of_the_run_are_read_and_a_resumed_run_is_equal(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records, teacher: Path
) -> None:
    keys = (*base, *DISTILL, f"distill_teacher={teacher}", "lora=false", f"data_cache_dir={tmp_path / 'cache'}")
    run_here(tmp_path / "whole", *keys, "max_steps=4")
    run_here(tmp_path / "parts", *keys, "max_steps=2", "lr_scheduler_type=constant")
    run_here(tmp_path / "parts", *keys, "max_steps=4")
    figures = [
        [(line["step"], line["loss"], line["figures"]) for line in records(tmp_path / name, "step_end")]
        for name in ("whole", "parts")
    ]
    assert figures[0] == figures[1]
    assert figures[0][0][2].keys() == {"ce", "kl", "agreement"}


def test_a_missing_teacher_is_refused(tmp_path: Path, base: list[str], run_here: RunHere) -> None:
    with pytest.raises(ConfigError, match="distill_teacher: is not set, and task distill needs it"):
        run_here(tmp_path / "run", *base, *DISTILL)
    with pytest.raises(ConfigError, match="distill_teacher: nowhere: there is no such model"):
        run_here(tmp_path / "run", *base, *DISTILL, "distill_teacher=nowhere", "lora=false")
