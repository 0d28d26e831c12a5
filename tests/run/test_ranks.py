"""Runs on several ranks: the same rows and bits as on one, resumed on any number of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_world import World

from surogate_core.plugins.registry import Registry

History = Callable[[Path], list[tuple[Any, ...]]]
Digests = Callable[[Path], dict[str, str]]
Records = Callable[..., list[dict[str, Any]]]

LORA = ("lora=true", "lora_rank=4", "lora_dropout=0.1", "lora_target_modules=[all]")
KEYS = ("max_steps=4", "save_steps=2", "eval_steps=2", "save_total_limit=9", "lr_scheduler_type=cosine")


@pytest.fixture(scope="module")
def ranks(installed: Registry) -> Iterator[World]:
    """Processes that the runs of this module share."""
    with World(installed) as world:
        yield world


def of_step(run: Path, step: int, to: Path) -> Path:
    """A copy of a run that ended after a step."""
    copy = Path(shutil.copytree(run, to))
    for path in copy.glob("checkpoint-*"):
        if int(path.name.removeprefix("checkpoint-")) > step:
            shutil.rmtree(path)
    return copy


def notes(records: Records, run: Path) -> str:
    return "\n".join(records(run, "run_start")[-1]["notes"])


def test_a_run_on_two_ranks_is_the_run_on_one(
    tmp_path: Path, base: list[str], ranks: World, history: History, digests: Digests, records: Records
) -> None:
    one, two, beside = (tmp_path / name for name in ("one", "two", "beside"))
    keys = [*base, *LORA, *KEYS]
    ranks.run(1, one, *keys, "gradient_accumulation_steps=4")
    ended = ranks.run(2, two, *keys, "gradient_accumulation_steps=2", of_rank=lambda r: [f"output_dir={beside}"] * r)
    assert ended == (0, [0])
    assert not beside.exists(), "a rank other than 0 has written something"
    assert history(two) == history(one)
    for step in (2, 4):
        assert digests(two / f"checkpoint-{step}") == digests(one / f"checkpoint-{step}")
    assert digests(two / "adapter") == digests(one / "adapter")

    facts = json.loads((two / "run.json").read_text())
    assert (facts["gpus"], facts["micro_batches"]) == (2, 4)
    assert facts["reduction"] == json.loads((one / "run.json").read_text())["reduction"]
    (start,) = records(two, "run_start")
    assert (start["gpus"], start["tokens_per_step"]) == (2, records(one, "run_start")[0]["tokens_per_step"])
    assert "equal bits on 1, 2 and 4 equal GPUs" in notes(records, two)

    # The same command on one rank: a step keeps its four micro-batches.
    resumed = of_step(two, 2, tmp_path / "resumed")
    ranks.run(1, resumed, *keys, "gradient_accumulation_steps=2")
    assert "gradient_accumulation_steps is 4 instead of 2: with gpus=1, a step keeps the 4" in notes(records, resumed)
    assert history(resumed) == history(one)
    assert digests(resumed / "checkpoint-4") == digests(one / "checkpoint-4")
