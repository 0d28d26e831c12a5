"""Runs whose processes share rows: the losses of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_world import World, of_step

from surogate_core.errors import ConfigError
from surogate_core.plugins.registry import Registry

Records = Callable[..., list[dict[str, Any]]]

KEYS = ("max_steps=2", "save_steps=0", "eval_steps=0", "gradient_accumulation_steps=2")
LORA = ("lora=true", "lora_rank=4", "lora_dropout=0.2", "lora_target_modules=[all]")
FULL = ("lora=false", "optimizer=adamw")


@pytest.fixture(scope="module")
def ranks(installed: Registry) -> Iterator[World]:
    """Processes that the runs of this module share."""
    with World(installed) as world:
        yield world


def losses(records: Records, run: Path) -> list[float]:
    return [record["loss"] for event in ("eval_end", "step_end") for record in records(run, event)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param(LORA, id="lora"), pytest.param(FULL, id="full")])
def test_two_processes_share_rows(
    tmp_path: Path, base: list[str], ranks: World, records: Records, mode: tuple[str, ...]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    ranks.run(1, one, *base, *mode, *KEYS)
    assert ranks.run(2, two, *base, *mode, *KEYS, "context_parallel_size=2") == (0, [0])
    assert losses(records, two) == pytest.approx(losses(records, one), rel=1e-6)
    starts = [records(run, "run_start")[0]["tokens_per_step"] for run in (one, two)]
    assert starts[0] == starts[1]


@pytest.mark.slow
def test_a_checkpoint_continues_on_any_number_of_processes_that_share_rows(
    tmp_path: Path, base: list[str], ranks: World, records: Records
) -> None:
    keys, shared = [*base, *LORA, *KEYS, "save_steps=1"], "context_parallel_size=2"
    one, two = tmp_path / "one", tmp_path / "two"
    ranks.run(1, one, *keys)
    ranks.run(2, two, *keys, shared)
    onto_one = of_step(two, 1, tmp_path / "onto one")
    ranks.run(1, onto_one, *keys)
    onto_two = of_step(one, 1, tmp_path / "onto two")
    assert ranks.run(2, onto_two, *keys, shared) == (0, [0])
    for resumed in (onto_one, onto_two):
        assert records(resumed, "run_start")[-1]["start_step"] == 1
        assert losses(records, resumed) == pytest.approx(losses(records, one), rel=1e-6)


@pytest.mark.slow
def test_two_groups_of_two_processes(tmp_path: Path, base: list[str], ranks: World, records: Records) -> None:
    one, four = tmp_path / "one", tmp_path / "four"
    ranks.run(1, one, *base, *FULL, *KEYS)
    ended = ranks.run(4, four, *base, *FULL, *KEYS, "context_parallel_size=2", "gradient_accumulation_steps=1")
    assert ended == (0, [0, 0, 0])
    assert losses(records, four) == pytest.approx(losses(records, one), rel=1e-6)


def test_one_process_cannot_share_rows(tmp_path: Path, base: list[str], ranks: World) -> None:
    with pytest.raises(ConfigError, match=r"context_parallel_size.*does not divide gpus=1"):
        ranks.run(1, tmp_path / "run", *base, *LORA, *KEYS, "context_parallel_size=2")
