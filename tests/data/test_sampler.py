"""The stream of rows: whole epochs, and exact continuation."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from surogate_core.batch import MicroBatch
from surogate_core.bundles.tasks import next_share
from surogate_core.data.pipeline import prepare
from surogate_core.data.sampler import EvalBatches, StepLoader, epoch_order
from surogate_core.data.shards import PackedRows, Row
from surogate_core.engine.ranks.lanes import Share
from surogate_core.errors import UserError


@pytest.fixture
def rows(write_rows: Any, make_config: Any, tokenizer: Any, formats: Any, document_rows: Any) -> PackedRows:
    """About a dozen packed rows."""
    return prepare(make_config(write_rows(document_rows)), tokenizer, formats).train


def loader(rows: PackedRows, seed: int = 1, micro_batches: int = 3) -> StepLoader:
    return StepLoader(rows, rows_per_micro_batch=2, micro_batches=micro_batches, seed=seed)


def same(a: Any, b: Any) -> bool:
    left, right = ({f: getattr(x, f) for f in x.__slots__} for x in (a, b))
    return all(
        torch.equal(left[k], right[k]) if isinstance(left[k], torch.Tensor) else left[k] == right[k] for k in left
    )


@pytest.mark.parametrize("done", [0, 1, 2, 3, 7])
def test_a_resumed_stream_continues_bit_identically(rows: PackedRows, done: int) -> None:
    whole = loader(rows)
    for _ in range(done):
        whole.next_step()
    state = json.loads(json.dumps(whole.state()))
    resumed = loader(rows)
    resumed.load_state(state)
    assert resumed.epoch == whole.epoch
    for _ in range(6):
        assert all(same(a, b) for a, b in zip(whole.next_step(), resumed.next_step(), strict=True))


def test_each_epoch_takes_every_row_once_in_an_order_of_its_own(rows: PackedRows) -> None:
    taken = StepLoader(rows, rows_per_micro_batch=1, micro_batches=len(rows), seed=5)
    epochs = [[tuple(b.input_ids.tolist()) for b in taken.next_step()] for _ in range(2)]
    assert taken.epoch == 2.0
    assert taken.steps_per_epoch == 1.0
    assert Counter(epochs[0]) == Counter(epochs[1])
    assert epochs[0] != epochs[1]
    assert sorted(epoch_order(len(rows), 5, 0)) == list(range(len(rows)))


def test_the_stream_does_not_depend_on_how_rows_are_grouped(rows: PackedRows) -> None:
    three, one = loader(rows), loader(rows, micro_batches=1)
    grouped = three.next_step()
    assert all(same(a, one.next_step()[0]) for a in grouped)
    assert three.state() == one.state()


@pytest.mark.parametrize("strided", [False, True])
def test_ranks_share_a_step_without_changing_its_rows(rows: PackedRows, strided: bool) -> None:
    """Micro-batch j of step s has the same rows on any number of ranks, and every rank knows the counts of all."""
    whole = loader(rows, micro_batches=8)
    steps = [whole.next_step() for _ in range(3)]
    for world in (1, 2, 4, 8):
        seen = []
        for rank in range(world):
            own = Share.of(8, rank=rank, ranks=world, exact=False, strided=strided).numbers
            seen += own
            mine = loader(rows, micro_batches=8)
            for expected in steps:
                for number, (batch, found) in enumerate(zip(expected, mine.next_share(own), strict=True)):
                    assert isinstance(found, MicroBatch) == (number in own)
                    assert same(found, batch) if isinstance(found, MicroBatch) else found == batch.counts()
            assert mine.state() == whole.state()
        assert sorted(seen) == list(range(8))


def test_a_share_of_weighted_rows_has_the_same_divisor(rows: PackedRows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "weighted", True)
    plain = rows.row

    def weighted(index: int) -> Row:
        row = plain(index)
        return replace(row, weights=row.weights * np.float32(0.1) * (1 + np.arange(len(row.weights)) % 7))

    monkeypatch.setattr(rows, "row", weighted)
    whole, others = loader(rows), loader(rows)
    for _ in range(4):
        expected = [batch.counts() for batch in whole.next_step()]
        assert others.next_share(()) == expected
        assert all(c.loss_weight != c.label_tokens for c in expected)


def test_a_step_that_a_task_changed_is_made_whole(rows: PackedRows) -> None:
    class Reversed(StepLoader):
        def next_step(self) -> list[MicroBatch]:
            return super().next_step()[::-1]

    mine = Reversed(rows, rows_per_micro_batch=2, micro_batches=3, seed=1)
    patched: Any = loader(rows)
    in_order = patched.next_step
    patched.next_step = lambda: in_order()[::-1]
    first, middle, last = loader(rows).next_step()
    for steps in (mine, patched):
        counts, made, more = next_share(steps, (1,))
        assert (counts, more) == (last.counts(), first.counts())
        assert same(made, middle)


def test_all_shapes_of_a_run_are_equal(
    write_rows: Any, make_config: Any, tokenizer: Any, formats: Any, document_rows: Any
) -> None:
    data = prepare(make_config(write_rows(document_rows), validation_split_ratio=0.2), tokenizer, formats)
    assert data.eval is not None
    stream = loader(data.train)
    batches = [b for _ in range(8) for b in stream.next_step()] + list(EvalBatches(data.eval, rows_per_micro_batch=2))
    assert (
        len({tuple(getattr(b, f).shape for f in ("input_ids", "labels", "positions", "cu_seqlens")) for b in batches})
        == 1
    )
    assert {b.input_ids.dtype for b in batches} == {b.labels.dtype for b in batches} == {torch.int64}
    assert {b.positions.dtype for b in batches} == {b.cu_seqlens.dtype for b in batches} == {torch.int32}


def test_evaluation_sees_every_row_once(rows: PackedRows) -> None:
    batches = EvalBatches(rows, rows_per_micro_batch=5)
    assert len(list(batches)) == len(batches) == -(-len(rows) // 5)
    assert sum(b.tokens for b in batches) == rows.stats.tokens
    assert sum(b.label_tokens for b in batches) == rows.stats.label_tokens


def test_the_order_depends_on_the_seed(rows: PackedRows) -> None:
    assert not same(loader(rows, seed=1).next_step()[0], loader(rows, seed=2).next_step()[0])


@pytest.mark.parametrize("change", [{"seed": 9}, {"rows": 3}, {"digest": "another"}, {"version": 0}])
def test_a_state_of_other_data_is_refused(rows: PackedRows, change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(change))} .*resume_from_checkpoint=false"):
        loader(rows).load_state(loader(rows).state() | change)


def test_the_order_is_the_same_on_every_machine() -> None:
    # Written down once: a change here breaks the resumption of every existing checkpoint.
    assert epoch_order(8, 1234, 0).tolist() == ORDER_0
    assert epoch_order(8, 1234, 1).tolist() == ORDER_1


ORDER_0 = [1, 6, 4, 0, 3, 5, 2, 7]
ORDER_1 = [6, 7, 4, 2, 0, 1, 5, 3]
