"""The teacher's tokens: computed once, kept in the cache, and put beside the tokens that are trained.

Shape suffixes: N tokens of a micro-batch, M trained tokens of a row, K tokens of the teacher, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from surogate_task_distill import store as stores
from surogate_task_distill.loss import id_columns, logprob_columns
from surogate_task_distill.store import TeacherStore, Wanted, computed
from surogate_task_distill.task import teacher_columns
from surogate_task_distill.teacher import check_context, check_tokenizer
from torch import Tensor

from surogate_core.plugin import IGNORE_LABEL, ConfigError, MicroBatch, PackedRows, bundles, collate, encoding
from surogate_testing import tasks
from surogate_testing.chat_templates import byte_tokenizer

WANTED = Wanted(teacher="a digest", top_k=3, temperature=2.0, vocabulary=300)


@pytest.fixture(scope="module")
def rows() -> Iterator[PackedRows]:
    with tasks.small(bundles.TaskSpec(name="rows", build=lambda config, data: data)) as data:
        found: Any = data
        yield found.train


def logits_of(ids_N: Tensor) -> Tensor:
    """[N, V] of a teacher that knows no context; the last 20 outputs are padding of its embedding."""
    return torch.sin((ids_N[:, None] + 1) * torch.arange(1, 321)) * 3


class Teacher:
    """A forward in two parts, which counts its calls and fails at one of them."""

    def __init__(self, fails: int = 0):
        self.calls, self.fails = 0, fails

    def __call__(self, batch: MicroBatch) -> Iterator[tuple[slice, Tensor]]:
        self.calls += 1
        if self.calls == self.fails:
            raise KeyboardInterrupt
        for part in (slice(0, 50), slice(50, len(batch.labels))):
            yield part, logits_of(batch.input_ids[part])


def run(
    rows: PackedRows, cache: Path, teacher: Callable[..., Any], indices: list[int], seen: Any = None
) -> TeacherStore:
    return computed(
        rows,
        indices,
        WANTED,
        encoding.DataCache(cache, "teachers"),
        load=lambda: teacher,
        rows_per_pass=2,
        progress=seen or (lambda done, total: None),
    )


def test_a_row_has_the_most_probable_tokens_of_its_trained_tokens(rows: PackedRows, tmp_path: Path) -> None:
    progress: list[tuple[int, int]] = []
    indices = list(range(1, len(rows)))
    found = run(rows, tmp_path, Teacher(), indices, seen=lambda *done: progress.append(done))
    assert progress[-1] == (len(rows) - 1, len(rows) - 1)
    for index in indices:
        batch = collate(rows, [index])
        trained_N = batch.labels != IGNORE_LABEL
        logprobs_MV = (logits_of(batch.input_ids)[trained_N][:, :300] / 2).log_softmax(-1)
        values_MK, ids_MK = logprobs_MV.topk(3, -1)
        own_ids_MK, own_MK = found.row(index)
        assert (own_ids_MK == ids_MK.numpy()).all()
        assert abs(own_MK - values_MK.numpy()).max() < 2e-3


def test_a_killed_computation_continues_and_a_second_run_computes_nothing(
    rows: PackedRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "SHARD", 4)
    indices = list(range(len(rows)))
    whole = Teacher()
    expected = run(rows, tmp_path / "whole", whole, indices)
    with pytest.raises(KeyboardInterrupt):
        run(rows, tmp_path / "killed", Teacher(fails=4), indices)
    rest = Teacher()
    found = run(rows, tmp_path / "killed", rest, indices)
    assert rest.calls == whole.calls - 2  # the first four rows are there
    for index in indices:
        assert all((a == b).all() for a, b in zip(found.row(index), expected.row(index), strict=True))
    run(rows, tmp_path / "killed", Teacher(fails=1), indices)


def test_another_teacher_temperature_or_number_of_tokens_has_entries_of_its_own(rows: PackedRows) -> None:
    others = (
        Wanted(teacher="another", top_k=3, temperature=2.0, vocabulary=300),
        Wanted(teacher="a digest", top_k=4, temperature=2.0, vocabulary=300),
        Wanted(teacher="a digest", top_k=3, temperature=1.0, vocabulary=300),
    )
    assert len({wanted.key(rows, [0, 1]) for wanted in (WANTED, *others)}) == 4
    assert WANTED.key(rows, [0, 1]) != WANTED.key(rows, [1, 0])


def test_columns_are_at_the_positions_that_predict_trained_tokens(rows: PackedRows, tmp_path: Path) -> None:
    found = run(rows, tmp_path, Teacher(), [0, 2])
    indices = [2, None, 0]
    batch = collate(rows, indices)
    columns = teacher_columns(batch, indices, found, rows.sequence_len, 3)
    trained_N = batch.labels != IGNORE_LABEL
    ids_NK = torch.stack([columns[name] for name in id_columns(3)], -1)
    logprobs_NK = torch.stack([columns[name] for name in logprob_columns(3)], -1)
    logprobs_NV = (logits_of(batch.input_ids)[:, :300] / 2).log_softmax(-1)
    assert torch.equal(ids_NK[trained_N].long(), logprobs_NV[trained_N].topk(3, -1).indices)
    assert (logprobs_NK[trained_N] - logprobs_NV[trained_N].topk(3, -1).values).abs().max() < 2e-3
    assert not ids_NK[~trained_N].any()
    assert not logprobs_NK[~trained_N].any()


def test_a_teacher_with_another_tokenizer_or_too_few_positions_is_refused() -> None:
    own: Any = byte_tokenizer()
    assert check_tokenizer(own, own, word="big") == max(own.get_vocab().values()) + 1
    more: Any = SimpleNamespace(get_vocab=lambda: {**own.get_vocab(), "<extra>": 9999})
    check_tokenizer(own, more, word="big")
    with pytest.raises(ConfigError, match="big has another tokenizer than the model: token '<extra>' has id 9999"):
        check_tokenizer(more, own, word="big")
    prepared: Any = SimpleNamespace(context=128)
    check_context(prepared, 128, word="big")
    with pytest.raises(ConfigError, match="reads up to 128 tokens, and a document has 129"):
        check_context(prepared, 129, word="big")
