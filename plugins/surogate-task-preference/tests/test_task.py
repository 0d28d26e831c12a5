"""The tasks: which token is of which answer, and training on pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import surogate_task_preference as plugin
import torch
from surogate_task_preference.objectives import FIGURES, PREFERRED, TRAINED
from surogate_task_preference.task import of_pairs

from surogate_core.plugin import IGNORE_LABEL, REFERENCE, MicroBatch, ReferencedTask, bundles
from surogate_testing import tasks, tiny

SPECS = {spec.name: spec for spec in plugin.surogate_task()}
LENGTHS = (7, 5, 4, 8)
"""Tokens of the documents of a micro-batch: two pairs."""


def pairs(seed: int = 0) -> MicroBatch:
    """A micro-batch of two pairs and padding, without columns."""
    batch = tiny.batch(tiny.documents(LENGTHS, seed=seed))
    return replace(batch, real=torch.arange(tiny.TOKENS) < sum(LENGTHS))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("check", tasks.CHECKS, ids=lambda check: check.__name__)
def test_the_tasks_are_sound(check: Callable[[bundles.TaskSpec], None], name: str) -> None:
    check(SPECS[name])


def test_the_columns_tell_answers_padding_and_prompts_apart() -> None:
    batch = of_pairs(pairs(), tiny.TOKENS, lengths=True)
    expected = [1] * 7 + [-1] * 5 + [1] * 4 + [-1] * 8 + [0] * 8
    assert batch.columns[PREFERRED].tolist() == expected
    assert batch.columns[TRAINED].tolist() == (batch.labels != IGNORE_LABEL).float().tolist()
    assert (batch.divisor, batch.counts().loss_weight) == (2, 2)
    two_rows = replace(batch, positions=torch.arange(16).repeat(2).int(), real=torch.ones(32, dtype=torch.bool))
    with pytest.raises(AssertionError, match="without its partner"):
        of_pairs(two_rows, 16, lengths=False)


def test_rows_of_a_micro_batch_each_begin_with_a_chosen_answer() -> None:
    positions = torch.tensor([*range(5), *range(6), *range(5), *range(8), *range(8)], dtype=torch.int32)
    batch = replace(pairs(), positions=positions, real=torch.arange(32) % 16 < 16 - 5 * (torch.arange(32) < 16))
    assert of_pairs(batch, 16, lengths=False).columns[PREFERRED].tolist() == (
        [1] * 5 + [-1] * 6 + [0] * 5 + [1] * 8 + [-1] * 8
    )


@pytest.mark.parametrize("name", SPECS)
def test_only_losses_with_a_reference_ask_for_it(name: str) -> None:
    with tasks.small(SPECS[name]) as task:
        assert isinstance(task, ReferencedTask) == (name in ("dpo", "ipo"))
        assert set(task.sample().columns) == set(objective(name).columns)


def objective(name: str) -> Any:
    spec = SPECS[name]
    assert spec.objective is not None
    return spec.objective(spec.options())


@pytest.mark.parametrize("name", SPECS)
def test_a_model_learns_what_is_preferred(name: str) -> None:
    found, batch = objective(name), of_pairs(pairs(), tiny.TOKENS, lengths=name != "dpo")
    columns = {column: batch.columns.get(column, torch.zeros(tiny.TOKENS)) for column in found.columns}
    batch = replace(batch, columns=columns)
    made = tiny.engine(objective=found, columns=found.columns)
    if REFERENCE in found.columns:
        batch = replace(batch, columns={**columns, REFERENCE: made.logprobs(batch)})
    results = [made.train_step([batch], step=step, lr=0.02) for step in range(8)]
    losses = [result.read()[0] for result in results]
    assert losses[-1] < losses[0]
    if name == "dpo":
        assert losses[0] == pytest.approx(math.log(2), rel=1e-6)
    assert set(FIGURES) == set(found.figures)
